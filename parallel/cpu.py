"""The only module that makes megatron-core run without CUDA.

Megatron-core names CUDA in a few places that have an obvious answer on a machine without one: the current device
is the CPU, its random state is the CPU generator's, waiting for it takes no time. `enable()` gives these answers
once, by rebinding names. No torch call is intercepted on the way through the model: a rebound name costs what the
original costs.
"""

import contextlib
import importlib
import types
from typing import Any

import torch

# Modules that create tensors with device="cuda" spelled out; each gets a `torch` whose factories ignore that.
_MODULES_NAMING_CUDA = (
    "megatron.core.utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full")

_enabled = False


class _NoStream:
    """Stands where Megatron expects a CUDA stream or event: CPU work is finished when the call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def record(self, _stream: Any = None) -> None:
        pass

    def wait(self, _stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def enable() -> None:
    """Give megatron-core its CPU answers; call before building groups or models. A second call does nothing.

    Raises AssertionError where CUDA is available, because the answers would be wrong there.
    """
    global _enabled
    if _enabled:
        return
    assert not torch.cuda.is_available(), "parallel.cpu.enable() is for machines without CUDA"
    _answer_cuda_calls()
    _answer_random_state()
    _answer_tensor_methods()
    torch_without_cuda = _torch_with_cpu_factories()
    for name in _MODULES_NAMING_CUDA:
        vars(importlib.import_module(name))["torch"] = torch_without_cuda
    _enabled = True


def _answer_cuda_calls() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.empty_cache = lambda: None
    stream = _NoStream()
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: stream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _NoStream


def _answer_random_state() -> None:
    """One generator on CPU: what Megatron forks and restores as the CUDA state is the CPU generator's."""
    cuda: Any = torch.cuda
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = cuda.get_rng_state
    random._set_cuda_rng_state = cuda.set_rng_state


def _answer_tensor_methods() -> None:
    """`Tensor.cuda()` stays where it is; `Tensor.type()` answers the CUDA name that the optimizers compare with."""
    tensor: Any = torch.Tensor
    cpu_type = tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = cpu_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.type = type_
    tensor.cuda = lambda self, *_args, **_kwargs: self


def _torch_with_cpu_factories() -> types.ModuleType:
    """A module equal to torch, except that its factories take device="cuda" to mean the CPU."""

    class CpuTorch(types.ModuleType):
        def __getattr__(self, name: str) -> Any:  # submodules that torch loads lazily
            return getattr(torch, name)

    cpu_torch = CpuTorch("torch")
    vars(cpu_torch).update({name: value for name, value in vars(torch).items() if name != "__getattr__"})
    for name in _FACTORIES:
        setattr(cpu_torch, name, _on_cpu(getattr(torch, name)))
    return cpu_torch


def _on_cpu(factory: Any) -> Any:
    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return create
