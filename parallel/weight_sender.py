"""Sends the trainer's weights to the fleet, layer by layer.

    all ranks:  iterate the weight source (collective)         replicas:  map, check and load each bucket
    rank 0:     fill bucket -> announce -> unlink  ----------------------->  (all replicas at once)

On CPU a bucket is a file in shared memory, which every replica of this host reads without a copy of its own. On CUDA
vLLM's own trainer engines (`nccl`, `ipc`) take the same source. One transport, one class.
"""

import logging
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import sync_backend
from megatron_agent.errors import WeightSyncError
from megatron_agent.weight_buckets import BACKEND, SHARED_MEMORY_DIR, BucketEntry, aligned, checksum
from parallel.distribute import broadcast_object
from parallel.weight_source import MegatronWeightSource, as_vllm_source

logger = logging.getLogger(__name__)


class SyncClient(Protocol):
    """Drives the weight update of all replicas at once; raises WeightSyncError where one fails or is late.

    The first four methods are vLLM's VLLMWeightSyncClient.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def begin(self) -> bool:
        """Take the replicas out of service and wait until they are idle; True where one was started anew."""
        ...

    def commit(self, version: int) -> None:
        """Put the replicas back to service with weights of this version."""
        ...


class SharedMemorySender:
    """The transport on CPU."""

    can_retry = True

    def __init__(self, source: MegatronWeightSource, client: SyncClient | None, *, bucket_bytes: int, verify: bool):
        self._source = source
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._verify = verify

    def send(self, *, replicas_changed: bool) -> int:
        """One full update; returns the bytes sent (0 on ranks other than 0). Collective.

        Every update stands alone, so it does not matter here that `replicas_changed`.
        """
        if self._client is None:
            for _ in self._source:
                pass
            return 0
        tensors = iter(self._source)
        try:
            self._client.start_weight_update()
            total = sum(self._send_bucket(bucket) for bucket in _buckets(tensors, self._bucket_bytes))
            self._client.finish_weight_update()
        except WeightSyncError:
            for _ in tensors:  # the other ranks are in the stream's collectives to its end
                pass
            raise
        return total

    def _send_bucket(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        assert self._client is not None
        entries, size = self._layout(tensors)
        file, path = tempfile.mkstemp(prefix="megatron-agent-weights-", dir=SHARED_MEMORY_DIR)
        try:
            try:
                os.posix_fallocate(file, 0, size)
            except OSError as error:
                raise WeightSyncError(
                    f"no room for a bucket of {size / 2**20:.0f} MiB in {SHARED_MEMORY_DIR}: {error.strerror}; "
                    "lower sync.bucket_mib or enlarge the shared memory of this machine or container"
                ) from error
            with mmap.mmap(file, size) as buffer:
                for (_, tensor), entry in zip(tensors, entries, strict=True):
                    dtype = tensor.dtype
                    target = torch.frombuffer(buffer, dtype=dtype, count=tensor.numel(), offset=entry.offset)
                    target.copy_(tensor.detach().reshape(-1))
                    del target  # the mapping cannot close while a tensor looks at it
            self._client.update_weights({"path": path, "entries": [entry.to_dict() for entry in entries]})
        finally:
            os.close(file)
            os.unlink(path)
        return size

    def _layout(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[list[BucketEntry], int]:
        entries, offset = [], 0
        for name, tensor in tensors:
            entry = BucketEntry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=aligned(offset),
                num_bytes=tensor.numel() * tensor.element_size(),
                checksum=checksum(tensor) if self._verify else None,
            )
            entries.append(entry)
            offset = entry.offset + entry.num_bytes
        return entries, offset


class VllmSender:
    """The transports on CUDA: vLLM's trainer engine of that name, made at the first sync.

    A failure ends the run, which goes on from its checkpoint: it may have left the other ranks inside a collective of
    vLLM's, from where there is no way back to a common point.
    """

    can_retry = False

    def __init__(
        self,
        source: MegatronWeightSource,
        client: SyncClient | None,
        config: ExperimentConfig,
        *,
        backend: str,
        bucket_bytes: int,
    ) -> None:
        self._source = source
        self._client = client
        self._num_workers = config.rollout.replicas * config.rollout.tensor_parallel
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._engine: Any = None

    def send(self, *, replicas_changed: bool) -> int:
        """One full update; returns the bytes sent. Collective. `replicas_changed`: shake hands anew."""
        if self._engine is None or replicas_changed:
            self._engine = self._make_engine()
        self._engine.send_weights()
        return sum(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self._source.metadata())

    def _make_engine(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client: Any = self._client  # None on the ranks that do not talk to the fleet
        return WeightTransferTrainerFactory.trainer_init(
            self._init_info(), client=client, source=as_vllm_source(self._source)
        )

    def _init_info(self) -> Any:
        rank = torch.distributed.get_rank()
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=self._bucket_bytes)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=rank,
            # Not MASTER_ADDR, which is the loopback address in a run on one trainer node.
            master_address=broadcast_object(_own_address() if rank == 0 else None),
            master_port=broadcast_object(_free_port() if rank == 0 else None),
            world_size=1 + self._num_workers,
            packed=True,
            packed_buffer_size_bytes=self._bucket_bytes,
        )


def _buckets(source: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Runs of tensors of at most `limit` bytes together; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in source:
        size = aligned(tensor.numel() * tensor.element_size())
        if bucket and used + size > limit:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += size
    if bucket:
        yield bucket


def _own_address() -> str:
    """This machine's address as the replicas' machines know it."""
    import ray

    return ray.util.get_node_ip_address()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class WeightSender:
    """Hands the policy's weights to the whole fleet, version by version."""

    def __init__(self, source: MegatronWeightSource, config: ExperimentConfig, client: SyncClient | None) -> None:
        """`client` is rank 0's; None on the other ranks and where there is no fleet."""
        self._client = client
        bucket_bytes = config.sync.bucket_mib * 2**20
        backend = sync_backend(config)
        self._transport: SharedMemorySender | VllmSender
        if backend == BACKEND:
            self._transport = SharedMemorySender(source, client, bucket_bytes=bucket_bytes, verify=config.sync.verify)
        else:
            self._transport = VllmSender(source, client, config, backend=backend, bucket_bytes=bucket_bytes)

    def send(self, version: int) -> dict[str, float]:
        """One sync; returns `sync_s` and `sync_bytes`. Collective over all trainer ranks.

        A replica that died before is restarted first. On CPU one that dies or fails on the way is restarted as well,
        and the sync begins anew. Raises WeightSyncError where that fails too, and on CUDA at once; the replicas then
        serve nothing.
        """
        started = time.monotonic()
        num_bytes, error = self._try(version)
        if broadcast_object(error is not None):
            if error:
                logger.warning("weight sync of version %d failed and is tried again: %s", version, error)
            num_bytes, error = self._try(version)
            if broadcast_object(error is not None):
                raise error or WeightSyncError("the weight sync failed twice; rank 0 says why")
        return {"sync_s": time.monotonic() - started, "sync_bytes": float(num_bytes)}

    def _try(self, version: int) -> tuple[int, WeightSyncError | None]:
        """(bytes sent, what went wrong on rank 0)."""
        error: WeightSyncError | None = None
        changed = False
        try:
            changed = self._client.begin() if self._client else False
        except WeightSyncError as failure:
            error = failure
        go, changed = broadcast_object((error is None, changed))
        if not go:
            return 0, error
        try:
            num_bytes = self._transport.send(replicas_changed=changed)
            if self._client:
                self._client.commit(version)
        except WeightSyncError as failure:
            if not self._transport.can_retry:
                raise
            return 0, failure
        return num_bytes, None
