"""Writes the ranks' parameters as a Hugging Face folder, one tensor at a time. It appears whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_agent.errors import CheckpointError
from parallel import process_groups
from parallel.model import read_hf_config
from parallel.weight_source import MegatronWeightSource, TensorMeta

_MAX_FILE_BYTES = 1 << 30  # what rank 0 holds before it writes; also the size of one safetensors file
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
_INDEX = "model.safetensors.index.json"
_MARKER = ".exported"
"""A file in every export: only folders that have it, or are empty, are ever replaced."""


def check_export_target(out_folder: str | Path) -> None:
    """Raises CheckpointError where something other than an earlier export is at `out_folder`."""
    out_folder = Path(out_folder)
    if not out_folder.exists() or (out_folder / _MARKER).exists():
        return
    if not out_folder.is_dir() or any(out_folder.iterdir()):
        raise CheckpointError(f"{out_folder} exists and is no earlier export; name a folder that does not exist yet")


def export_hf(chunks: Sequence[torch.nn.Module], source_folder: str | Path, out_folder: str | Path) -> None:
    """Write config, tokenizer and weights that transformers and vLLM load. Collective over all ranks.

    Everything but the weights is copied from `source_folder`, the folder the model was built from. World rank 0
    writes under a temporary name beside `out_folder` and renames it at the end, replacing an earlier export.
    Raises CheckpointError on every rank where rank 0 could not write, or where something else is at `out_folder`.
    """
    source = MegatronWeightSource(chunks, read_hf_config(source_folder))
    error = None
    if dist.get_rank() == 0:
        error = _write_folder(source, Path(source_folder), Path(out_folder))
    else:
        for _ in source:
            pass
    errors = [error]
    dist.broadcast_object_list(errors, src=0, group=process_groups.cpu_group())
    if errors[0]:
        raise CheckpointError(errors[0])


def _write_folder(source: MegatronWeightSource, source_folder: Path, out_folder: Path) -> str | None:
    """Rank 0's part; returns what went wrong, because the other ranks wait in collectives until the stream ends."""
    out_folder = out_folder.resolve()
    partial = out_folder.with_name(f".{out_folder.name}.partial")
    stream = iter(source)
    try:
        check_export_target(out_folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_other_files(source_folder, partial, dtype=source.metadata()[0].dtype)
        _write_weights(stream, source.metadata(), partial)
        (partial / _MARKER).touch()
        _replace_folder(partial, out_folder)
    except (OSError, SafetensorError, CheckpointError) as error:
        for _ in stream:
            pass
        shutil.rmtree(partial, ignore_errors=True)
        return f"{out_folder}: the model cannot be written: {error}; free space or choose another folder"
    return None


def _copy_other_files(source_folder: Path, target: Path, *, dtype: torch.dtype) -> None:
    for path in source_folder.iterdir():
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and path.name != "config.json":
            shutil.copy2(path, target / path.name)
    config = json.loads((source_folder / "config.json").read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_weights(stream: Iterator[tuple[str, torch.Tensor]], metadata: list[TensorMeta], folder: Path) -> None:
    groups = _split_into_files(metadata)
    file_of: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file_name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for expected in names:
            name, tensor = next(stream)
            assert name == expected, f"weight stream yielded {name}, metadata said {expected}"
            # A clone: safetensors refuses tensors that share memory, and some are views of one parameter.
            tensors[name] = tensor.to("cpu", copy=True)
            file_of[name] = file_name
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        _flush_to_disk(folder / file_name)
    assert next(stream, None) is None, "weight stream yielded more than metadata said"
    if len(groups) > 1:
        total = sum(_num_bytes(meta) for meta in metadata)
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split_into_files(metadata: list[TensorMeta]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for meta in metadata:
        if groups[-1] and size + _num_bytes(meta) > _MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(meta.name)
        size += _num_bytes(meta)
    return groups


def _num_bytes(meta: TensorMeta) -> int:
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(partial: Path, out_folder: Path) -> None:
    """Rename into place; an earlier export is moved aside first and removed only after the new one stands."""
    previous = out_folder.with_name(f".{out_folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if out_folder.exists():
        out_folder.rename(previous)
    partial.rename(out_folder)
    shutil.rmtree(previous, ignore_errors=True)
