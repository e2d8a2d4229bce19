"""The tensors of a checkpoint in megatron-core's distributed format: model weights and optimizer state.

The stored form depends on no parallel size: each tensor is stored whole or in slices of the whole, and a rank
reads what it holds. Files are written by the training processes themselves; Megatron's own writer forks others,
which is for saving in the background.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_ranks

from parallel import process_groups
from parallel.model import unwrap
from parallel.optimizer import torch_adams

# Optimizer tensors take the shape of their parameter: the one form that fits other tensor and pipeline sizes. They
# are gathered over gloo on the first data rank, so that the other ranks need no memory for them.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


class CheckpointState:
    """Everything of one checkpoint that is tensors, on its way to disk."""

    def __init__(self, model_chunks: list[nn.Module], optimizer: Any) -> None:
        """Collective: gathers sharded optimizer state and checks that the ranks together hold each tensor once."""
        self._sharded, self._common = save_preprocess(_sharded_state(model_chunks, optimizer, is_loading=False))

    def write_common(self, folder: Path) -> None:
        """What is equal on all ranks (hyperparameters, step count) and the format's description; rank 0 only."""
        with open(folder / COMMON_STATE_FNAME, "wb") as file:
            torch.save(self._common, file)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))

    def write_tensors(self, folder: Path) -> None:
        """Each rank its tensors, one file a rank, fsynced. Collective.

        Raises torch's CheckpointException on every rank where any of them failed.
        """
        sharded: Any = self._sharded
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        save_by_ranks(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=FileSystemWriter(folder),
            planner=MCoreSavePlanner(flatten_state_dict=False),
            process_group=process_groups.cpu_group(),
        )


def read_tensors(folder: Path, model_chunks: list[nn.Module], optimizer: Any) -> None:
    """Load weights and optimizer state, under the same or other parallel sizes. Collective."""
    state: Any = dist_checkpointing.load(_sharded_state(model_chunks, optimizer, is_loading=True), str(folder))
    for index, chunk in enumerate(model_chunks):
        unwrap(chunk).load_state_dict(state[f"model{index}"])
    for part, part_state in _parts(optimizer, state["optimizer"]):
        _load_part(part, part_state)
    for adam in torch_adams(optimizer):
        for parameter_state in adam.state.values():
            # Megatron hands one step tensor to all parameters, which would then be counted up once for each.
            parameter_state["step"] = parameter_state["step"].clone()


def read_weights(folder: Path, model_chunks: list[nn.Module]) -> None:
    """Load only the weights, under the same or other parallel sizes. Collective."""
    state: Any = dist_checkpointing.load(_sharded_weights(model_chunks), str(folder))
    for index, chunk in enumerate(model_chunks):
        unwrap(chunk).load_state_dict(state[f"model{index}"])


def _sharded_weights(model_chunks: list[nn.Module]) -> dict[str, Any]:
    metadata = dict(_METADATA)  # Megatron adds process groups to it
    return {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=metadata) for index, chunk in enumerate(model_chunks)
    }


def _sharded_state(model_chunks: list[nn.Module], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    model = _sharded_weights(model_chunks)
    return model | {"optimizer": optimizer.sharded_state_dict(model, is_loading, metadata=dict(_METADATA))}


def _parts(optimizer: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """Each optimizer inside Megatron's chained one with its state, which has no level of its own for a single one."""
    parts = optimizer.chained_optimizers
    return zip(parts, [state] if len(parts) == 1 else [state[i] for i in range(len(parts))], strict=True)


def _load_part(part: Any, state: dict[str, Any]) -> None:
    """Load one optimizer; torch's AdamW needs help with `step`, which it keeps per parameter and Megatron stores once.

    The distributed optimizer copies every entry of a parameter's state out of the checkpoint, so `step` steps aside
    meanwhile. The others do not store a step count of 0, that of a checkpoint from before the first update.
    """
    adam = part.optimizer
    if not isinstance(adam, torch.optim.AdamW):
        part.load_state_dict(state)
    elif "param_state" in state:
        tensors = state.pop("param_state")
        part.load_state_dict(state)
        steps = {parameter: adam.state[parameter].pop("step") for parameter in adam.state}
        part.load_parameter_state_from_fully_reshardable(tensors)
        for parameter, step in steps.items():
            adam.state[parameter]["step"] = step
    else:
        inner = state.get("optimizer", state)
        inner["state"].setdefault("common_step", torch.zeros(()))
        part.load_state_dict(state)
