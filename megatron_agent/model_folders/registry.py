"""Makes a model's HF folder on first use, by a named builder."""

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_agent.config import ModelConfig
from megatron_agent.errors import ConfigError, ModelFolderError

BUILDERS = {
    "tiny_qwen3": "megatron_agent.model_folders.tiny_qwen3:build",
    "smollm2": "megatron_agent.model_folders.smollm2:build",
}


def resolve_builder(name: str) -> Callable[..., None]:
    """The builder function behind a registered name or `package.module:function`."""
    reference = BUILDERS.get(name, name)
    module_name, _, attribute = reference.partition(":")
    if not attribute:
        raise ConfigError(
            f"model.builder.name is {name!r}; use one of {', '.join(sorted(BUILDERS))} or package.module:function"
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.builder.name {name!r} cannot be imported: {error}") from error


def ensure_model_folder(model: ModelConfig) -> Path:
    """The model's HF folder, built first when it does not exist and a builder is configured.

    The folder appears under its name only when complete, so a killed build leaves nothing that looks usable.
    Raises ModelFolderError where the folder is missing and no builder is configured.
    """
    folder = Path(model.path)
    if (folder / "config.json").exists():
        return folder
    if model.builder is None:
        raise ModelFolderError(
            f"model.path {folder} has no config.json; point it at an HF folder, or set model.builder to make one"
        )
    build = resolve_builder(model.builder.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(staging, **model.builder.args)
        os.chmod(staging, 0o755)
        try:
            staging.rename(folder)
        except OSError as error:  # not empty: another run built it meanwhile, or it holds something else
            if not (folder / "config.json").exists():
                raise ModelFolderError(
                    f"model.path {folder} exists, and holds no model; name another folder, or remove it"
                ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder
