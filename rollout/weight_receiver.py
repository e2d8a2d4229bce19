"""vLLM plug-in: receives weights through shared memory, inside each worker process of a replica on CPU.

Registered by the `vllm.general_plugins` entry point in every process of vLLM. Written against vLLM 0.32.
"""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_agent.weight_buckets import BACKEND, BucketEntry, checksum


def register() -> None:
    """Make the engine known to this process; safe to call twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rollout.weight_receiver", "SharedMemoryEngine")


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    path: str
    entries: list[dict[str, Any]]
    """BucketEntry fields."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads buckets through vLLM's layerwise reload, so that fused and sharded layers take their own parts."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """No rendezvous: the file's path comes with each bucket."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one bucket. vLLM may keep views until a layer is complete, and with them the bucket's pages."""
        buffer = _map(update_info.path)
        entries = [BucketEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in update_info.entries]
        model: Any = self.model
        model.load_weights((entry.name, _view(buffer, entry)) for entry in entries)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_lm_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held between buckets."""


def _map(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDONLY)
    try:
        # Private and writable only because torch warns about tensors over read-only memory; nothing writes.
        return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)


def _view(buffer: mmap.mmap, entry: BucketEntry) -> torch.Tensor:
    """The entry's tensor, without a copy; raises ValueError naming it where its checksum is not the sender's."""
    dtype = getattr(torch, entry.dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=entry.num_bytes // dtype.itemsize, offset=entry.offset)
    tensor = flat.view(entry.shape)
    if entry.checksum is not None and (received := checksum(tensor)) != entry.checksum:
        raise ValueError(f"tensor {entry.name}: checksum {received:#010x} received, {entry.checksum:#010x} sent")
    return tensor


def _repack_tied_lm_head(model: torch.nn.Module) -> None:
    """Pack a tied output layer again: on CPU vLLM 0.32 keeps a packed copy of it that the reload leaves stale."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
