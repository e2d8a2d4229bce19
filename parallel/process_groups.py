"""Process groups of the trainer ranks: the only reader of Megatron's parallel_state."""

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_agent.config import ParallelConfig
from megatron_agent.errors import ConfigError

_device: torch.device | None = None
_cpu_group: dist.ProcessGroup | None = None


def initialize(parallel: ParallelConfig, device: torch.device, *, seed: int) -> None:
    """Join the other ranks (environment variables set by torchrun) and build Megatron's groups. Collective.

    `device` is the CPU or this rank's own GPU. Raises ConfigError where the world size does not fit the sizes in
    `parallel`.
    """
    global _device, _cpu_group
    if device.type == "cpu":
        from parallel import cpu

        cpu.enable()
    else:
        torch.cuda.set_device(device)
    from megatron.core import parallel_state, tensor_parallel

    _check_world_size(parallel, int(os.environ.get("WORLD_SIZE", "1")))
    timeout = timedelta(seconds=parallel.timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method="env://", timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        distributed_timeout_minutes=math.ceil(parallel.timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _cpu_group = _member(dist.new_group(backend="gloo", timeout=timeout))
    _device = device


def _check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    model_parallel = parallel.tensor * parallel.pipeline
    if world_size % model_parallel:
        raise ConfigError(
            f"{world_size} ranks cannot be split into parallel.tensor {parallel.tensor} x parallel.pipeline "
            f"{parallel.pipeline} = {model_parallel}; start a multiple of {model_parallel} ranks"
        )
    if parallel.data is not None and world_size != model_parallel * parallel.data:
        raise ConfigError(
            f"{world_size} ranks were started, but parallel.tensor {parallel.tensor} x parallel.pipeline "
            f"{parallel.pipeline} x parallel.data {parallel.data} needs {model_parallel * parallel.data}"
        )


def shutdown() -> None:
    """Leave all groups; safe to call when nothing was initialised."""
    global _device, _cpu_group
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    _device = _cpu_group = None


def _member(group: object) -> dist.ProcessGroup:
    """Torch types a group as optional, or as an int where this rank is no member; every rank is in ours."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def device() -> torch.device:
    """This rank's device."""
    assert _device is not None, "process_groups.initialize() was not called"
    return _device


def cpu_group() -> dist.ProcessGroup:
    """All ranks, over gloo: for host data and objects."""
    assert _cpu_group is not None, "process_groups.initialize() was not called"
    return _cpu_group


def tensor_group() -> dist.ProcessGroup:
    """Ranks that hold the slices of the same layers."""
    from megatron.core import parallel_state

    return _member(parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Ranks that hold the successive layers of one model copy, for one tensor rank."""
    from megatron.core import parallel_state

    return _member(parallel_state.get_pipeline_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """Ranks that hold the same weights and work on different rows."""
    from megatron.core import parallel_state

    return _member(parallel_state.get_data_parallel_group())


def model_parallel_group() -> dist.ProcessGroup:
    """Ranks that together hold one model copy (tensor x pipeline)."""
    from megatron.core import parallel_state

    return _member(parallel_state.get_model_parallel_group())


def tensor_rank() -> int:
    return tensor_group().rank()


def tensor_size() -> int:
    return tensor_group().size()


def pipeline_rank() -> int:
    return pipeline_group().rank()


def pipeline_size() -> int:
    return pipeline_group().size()


def data_rank() -> int:
    return data_group().rank()


def data_size() -> int:
    return data_group().size()


def is_first_stage() -> bool:
    """True where this rank embeds tokens."""
    return pipeline_rank() == 0


def is_last_stage() -> bool:
    """True where this rank computes logits."""
    return pipeline_rank() == pipeline_size() - 1
