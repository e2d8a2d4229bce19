"""vLLM plug-in: receives weights through shared memory, inside each worker process of a replica on CPU.

Registered by the `vllm.general_plugins` entry point in every process of vLLM. Written against vLLM 0.32.
"""

import logging
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
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

    slot: int
    """Which of the sender's buckets it is."""
    path: str
    """Its file, which is there the first time and mapped from then on."""
    entries: list[dict[str, Any]]
    """BucketEntry fields."""
    partial: bool = False
    """The update may leave modules out (sync.delta), which keep what they have."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads buckets through vLLM's layerwise reload, so that fused and sharded layers take their own parts.

    A module of which nothing comes keeps what it has.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buckets = BucketMaps()
        self._packed: dict[torch.nn.Module, Any] = {}
        self._is_partial = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """No rendezvous: the file's path comes with each bucket."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._packed = {module: module.cpu_linear for module in _vocabulary_layers(self.model)}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one bucket."""
        entries = [BucketEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in update_info.entries]
        self._is_partial = update_info.partial
        model: Any = self.model
        with self._buckets.tensors(update_info.slot, update_info.path, entries) as tensors:
            model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = log.level
        if self._is_partial:
            log.setLevel(logging.ERROR)  # it warns of each module of which nothing came
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        finally:
            log.setLevel(level)
        _share_packed_vocabulary(self._packed)

    def shutdown(self) -> None:
        """Nothing is held that the process's end does not release."""


class BucketMaps:
    """The sender's buckets as this process sees them: each mapped until its slot gets another file."""

    def __init__(self) -> None:
        self._opened: dict[int, _Opened] = {}

    @contextmanager
    def tensors(self, slot: int, path: str, entries: list[BucketEntry]) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """The bucket's tensors by name, without a copy. Reading one raises ValueError where its checksum is wrong.

        The sender fills the bucket anew after this. vLLM keeps the tensors of a module of which some are still to
        come; their pages become this process's own at the end.
        """
        opened = self._opened.get(slot)
        if opened is None or opened.path != path:
            if opened is not None:
                os.close(opened.file)
            opened = self._opened[slot] = _Opened(path, os.open(path, os.O_RDONLY))
        buffer = opened.map(entries[-1].offset + entries[-1].num_bytes)
        windows: list[weakref.ref[memoryview]] = []

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for entry in entries:
                window = memoryview(buffer)[entry.offset : entry.offset + entry.num_bytes]
                windows.append(weakref.ref(window))  # alive as long as a tensor looks through it
                yield entry.name, _tensor(window, entry)

        yield read()
        held = [window for reference in windows if (window := reference()) is not None]
        for window in held:
            _make_private(window)
        if held:  # these pages of the mapping no longer follow the file
            opened.buffer = None


@dataclass(slots=True)
class _Opened:
    """A bucket's file, held open because the sender unlinks it, and its mapping."""

    path: str
    file: int
    buffer: mmap.mmap | None = None

    def map(self, size: int) -> mmap.mmap:
        """The mapping of the whole file, of which `size` bytes are needed."""
        if self.buffer is None or len(self.buffer) < size:
            # Private, so that a page can be made this process's own by a write; until then Linux shows the file's.
            self.buffer = mmap.mmap(self.file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self.buffer


def _make_private(window: memoryview) -> None:
    pages = np.frombuffer(window, dtype=np.uint8)
    pages[:: mmap.PAGESIZE] |= 0
    pages[-1:] |= 0


def _tensor(window: memoryview, entry: BucketEntry) -> torch.Tensor:
    """The entry's tensor, without a copy; raises ValueError naming it where its checksum is not the sender's."""
    tensor = torch.frombuffer(window, dtype=getattr(torch, entry.dtype)).view(entry.shape)
    if entry.checksum is not None and (received := checksum(tensor)) != entry.checksum:
        raise ValueError(f"tensor {entry.name}: checksum {received:#010x} received, {entry.checksum:#010x} sent")
    return tensor


def _vocabulary_layers(model: torch.nn.Module) -> list[Any]:
    """Embedding and output layer, where vLLM keeps a packed copy of their weight."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear")
    ]


def _share_packed_vocabulary(before: dict[Any, Any]) -> None:
    """Give a tied output layer the copy that the embedding has packed: on CPU vLLM 0.32 leaves its own stale.

    `before`: what each layer had packed before the update. Layers are tied where they have one weight.
    """
    for layer, packed in before.items():
        if layer.cpu_linear is packed:
            continue
        for other in before:
            if other.weight is layer.weight:
                other.cpu_linear = layer.cpu_linear
