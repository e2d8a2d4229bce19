"""Loads a Hugging Face folder into the ranks' parameters and exports one, without a whole model in any memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_agent.errors import ModelFolderError
from parallel import process_groups
from parallel.families.layout import Weight
from parallel.families.registry import family_for
from parallel.model import read_hf_config
from parallel.stage_weights import OUTPUT_LAYER, all_weights, stage_parameters

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INDEX_KEY = "weight_map"


class WeightFiles:
    """The safetensors files of a folder; reads slices of named tensors without reading the rest."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open_files: dict[str, Any] = {}
        index = self.folder / _INDEX
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))[_INDEX_KEY]
        elif (self.folder / _SINGLE).is_file():
            self._file_of = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            raise ModelFolderError(
                f"{folder}: neither {_SINGLE} nor {_INDEX}; save the model with save_pretrained (safetensors)"
            )

    def names(self) -> set[str]:
        return set(self._file_of)

    def slice(self, name: str, shape: tuple[int, ...]) -> Any:
        """A lazy tensor to index; raises ModelFolderError where it has another shape."""
        lazy = self._file(self._file_of[name]).get_slice(name)
        if tuple(lazy.get_shape()) != shape:
            raise ModelFolderError(
                f"{self.folder}: {name} has shape {tuple(lazy.get_shape())}, but config.json asks for {shape}"
            )
        return lazy

    def _file(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            path = self.folder / file_name
            try:
                self._open_files[file_name] = safe_open(path, framework="pt")
            except (FileNotFoundError, SafetensorError) as error:
                raise ModelFolderError(f"{path}: cannot be read: {error}; copy the folder again") from error
        return self._open_files[file_name]


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], folder: str | Path, *, backbone_only: bool = False) -> None:
    """Fill this rank's parameters from the folder's safetensors, reading only the slices that it holds.

    `backbone_only` leaves the output layer as it is: a critic's value head, which no folder holds.
    Call before the optimizer is made, which copies fp32 masters from the parameters. Values are cast to the
    parameters' type. Raises ModelFolderError naming a tensor that is missing, has another shape or has no place.
    """
    hf_config = read_hf_config(folder)
    files = WeightFiles(folder)
    _check_names(files, hf_config, backbone_only=backbone_only)
    for weight, parameter in _held_weights(chunks, hf_config):
        if not (backbone_only and weight.megatron_name == OUTPUT_LAYER):
            _load(weight, parameter, files)


def _held_weights(chunks: Sequence[torch.nn.Module], hf_config: Any) -> list[tuple[Weight, torch.nn.Parameter]]:
    """Each parameter of this rank with its description, a tied output layer on its own stage included."""
    family, tensor_size = family_for(hf_config), process_groups.tensor_size()
    by_name = {weight.megatron_name: weight for _, weight in all_weights(hf_config)}
    for weight in family.weights_after_layers(hf_config, tensor_size=tensor_size):
        by_name[weight.megatron_name] = weight
    parameters = stage_parameters(chunks, hf_config)
    unknown = sorted(set(parameters) - set(by_name))
    assert not unknown, f"family {family.model_type} describes no weight for the parameter {unknown[0]}"
    return [(by_name[name], parameter) for name, parameter in parameters.items()]


def _check_names(files: WeightFiles, hf_config: Any, *, backbone_only: bool) -> None:
    """Every rank checks the whole model, so all of them stop with the same error before any reads."""
    weights = [weight for _, weight in all_weights(hf_config)]
    if backbone_only:
        weights = [weight for weight in weights if weight.megatron_name != OUTPUT_LAYER]
    wanted = {source.name for weight in weights for source in weight.sources}
    missing = sorted(wanted - files.names())
    if missing:
        raise ModelFolderError(
            f"{files.folder}: no tensor {missing[0]} (one of {len(missing)} missing); the folder's weights do not fit "
            "its config.json"
        )
    # Some folders save the tied copy too, and old ones the rotary frequencies.
    spare = {"lm_head.weight"} if hf_config.tie_word_embeddings or backbone_only else set()
    unplaced = sorted(name for name in files.names() - wanted - spare if not name.endswith("rotary_emb.inv_freq"))
    if unplaced:
        raise ModelFolderError(
            f"{files.folder}: {unplaced[0]} (one of {len(unplaced)} tensors) has no place in a "
            f"{hf_config.model_type} model; is model_type in config.json right?"
        )


def _load(weight: Weight, parameter: torch.nn.Parameter, files: WeightFiles) -> None:
    dim = weight.dim or 0
    runs = weight.runs_of_rank(process_groups.tensor_rank(), process_groups.tensor_size())
    held = sum(run.length for run in runs)
    assert parameter.shape[dim] == held, f"{weight.megatron_name}: {parameter.shape[dim]} != {held} along {dim}"
    position = 0
    for run in runs:
        target = parameter.data.narrow(dim, position, run.length)
        if run.source is None:
            target.zero_()
        else:
            source = weight.sources[run.source]
            lazy = files.slice(source.name, source.shape)
            stop = run.start + run.length
            target.copy_(lazy[run.start : stop] if dim == 0 else lazy[:, run.start : stop])
        position += run.length
