"""Checks of the model: its folder, read as JSON, or the builder that will make it, read as source."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_check_names import arguments_problem, name_problem
from megatron_agent.model_families import SUPPORTED_MODEL_TYPES
from megatron_agent.model_folders.registry import BUILDERS
from megatron_agent.source_reading import parameters, reference_problem

BUILDER_SIZES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
}
"""Builder arguments whose meaning is known, so that sizes can be checked before the folder exists."""


def folder_exists(config: ExperimentConfig) -> bool:
    """Whether model.path is an HF folder already; the builder runs only where it is not."""
    return (Path(config.model.path) / "config.json").exists()


def check_builder(config: ExperimentConfig) -> Iterator[str]:
    """The builder's name and arguments."""
    builder = config.model.builder
    if builder is None:
        return
    problem = name_problem("model.builder.name", builder.name, BUILDERS)
    if problem:
        yield problem
        return
    reference = BUILDERS.get(builder.name, builder.name)
    yield from arguments_problem("model.builder.args", reference, builder.args, given_later={"folder"})


def check_model_folder(config: ExperimentConfig) -> Iterator[str]:
    """The folder's files, as far as they exist already."""
    folder = Path(config.model.path)
    if not folder_exists(config):
        if config.model.builder is None:
            yield f"model.path {folder} has no config.json; point it at an HF folder, or set model.builder to make one"
        return
    hf_config = _read_json(folder / "config.json")
    if hf_config is None:
        yield f"model.path: {folder / 'config.json'} is not a JSON object; copy the model again"
        return
    model_type = hf_config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        yield (
            f"model.path: {folder / 'config.json'} has model_type {model_type!r}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if not any(folder.glob("*.safetensors")):
        yield f"model.path {folder} holds no .safetensors file; save the model with transformers' save_pretrained"
    if not (folder / "tokenizer_config.json").exists():
        yield f"model.path {folder} has no tokenizer_config.json; save the tokenizer into the same folder"
    elif not _has_chat_template(folder):
        yield (
            f"model.path: the tokenizer in {folder} has no chat template, so messages cannot become tokens; "
            "add a chat_template.jinja, or take the instruct model"
        )


def check_other_models(config: ExperimentConfig) -> Iterator[str]:
    """The folders of critic and teacher, and that both read the policy's tokens."""
    critic, teacher = config.algorithm.critic, config.algorithm.teacher
    for option, folder in (
        ("algorithm.critic.path", critic.path if critic else None),
        ("algorithm.teacher.path", teacher.path if teacher else None),
    ):
        if folder is not None and not (Path(folder) / "config.json").exists():
            yield (
                f"{option} {folder} has no config.json; point it at an HF folder (checkpoint.export_hf writes a run's)"
            )
        elif folder is not None and folder_exists(config):
            own, other = _vocabulary(Path(config.model.path)), _vocabulary(Path(folder))
            if own and other and own != other:
                yield (
                    f"{option} {folder}: its tokenizer is not that of model.path {config.model.path}, so it cannot "
                    "read the policy's tokens; use a model of the same family"
                )


def check_model_sizes(config: ExperimentConfig) -> Iterator[str]:
    """Parallel sizes, context length and top_k against heads, layers, positions and vocabulary."""
    sizes = _model_sizes(config)
    parallel, rollout = config.parallel, config.rollout
    for option, ways, size, noun in (
        ("parallel.tensor", parallel.tensor, "num_attention_heads", "attention heads"),
        ("parallel.tensor", parallel.tensor, "num_key_value_heads", "KV heads"),
        ("parallel.pipeline", parallel.pipeline, "num_hidden_layers", "layers"),
        ("rollout.tensor_parallel", rollout.tensor_parallel, "num_attention_heads", "attention heads"),
    ):
        count = sizes.get(size)
        if count and count % ways:
            yield f"{option} {ways} does not divide the model's {count} {noun}; use a divisor of {count}"
    vocabulary, teacher = sizes.get("vocab_size"), config.algorithm.teacher
    if vocabulary and teacher and teacher.top_k > vocabulary:
        yield f"algorithm.teacher.top_k {teacher.top_k} is more than the model's {vocabulary} tokens; lower it"
    positions = sizes.get("max_position_embeddings")
    if positions and rollout.max_model_len > positions:
        yield f"rollout.max_model_len {rollout.max_model_len} is more than the model's {positions} positions; lower it"


def _model_sizes(config: ExperimentConfig) -> Mapping[str, int]:
    """The sizes in config.json, by HF name, or those that the builder will give it; what is unknown is absent."""
    if folder_exists(config):
        hf_config = _read_json(Path(config.model.path) / "config.json") or {}
        sizes = {key: value for key, value in hf_config.items() if isinstance(value, int)}
        return {"num_key_value_heads": sizes.get("num_attention_heads", 0)} | sizes
    builder = config.model.builder
    if builder is None:
        return {}
    reference = BUILDERS.get(builder.name, builder.name)
    if ":" not in reference or reference_problem(reference):
        return {}
    arguments = parameters(reference).defaults | builder.args
    return {hf: arguments[name] for name, hf in BUILDER_SIZES.items() if isinstance(arguments.get(name), int)}


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    return bool((_read_json(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    return ((_read_json(path) or {}).get("model") or {}).get("vocab") if path.exists() else None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
