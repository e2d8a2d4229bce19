"""Sends the trainer's weights to the fleet, layer by layer.

    all ranks:  iterate the weight source (collective)         replicas:  load each bucket, all replicas at once
    rank 0:     begin -> buckets -> finish -> commit

On CPU a bucket lies in shared memory (`parallel/shared_memory_sender.py`), where every replica of this host reads it
without a copy of its own. On CUDA vLLM's own trainer engines (`nccl`, `ipc`) take the same source. One transport, one
class.
"""

import logging
import socket
import time
from typing import Any, Protocol

import torch

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import sync_backend
from megatron_agent.errors import WeightSyncError
from megatron_agent.weight_buckets import BACKEND
from parallel.distribute import broadcast_object
from parallel.shared_memory_sender import Sent, SharedMemorySender
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
        """Take the replicas out of service and wait until they are idle; True where one has no weights yet."""
        ...

    def commit(self, version: int) -> None:
        """Put the replicas back to service with weights of this version."""
        ...


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

    def send(self, *, replicas_changed: bool) -> Sent:
        """One full update; returns what was sent. Collective. `replicas_changed`: shake hands anew."""
        if self._engine is None or replicas_changed:
            self._engine = self._make_engine()
        self._engine.send_weights()
        metadata = self._source.metadata()
        num_bytes = sum(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in metadata)
        return Sent(num_bytes=num_bytes, num_tensors=len(metadata), tensors_total=len(metadata))

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
        self._replicas_changed = True
        """Whether a replica may lack what was last committed, as after a failure."""
        bucket_bytes = config.sync.bucket_mib * 2**20
        backend = sync_backend(config)
        self._transport: SharedMemorySender | VllmSender
        if backend == BACKEND:
            self._transport = SharedMemorySender(
                source, client, bucket_bytes=bucket_bytes, verify=config.sync.verify, delta=config.sync.delta
            )
        else:
            self._transport = VllmSender(source, client, config, backend=backend, bucket_bytes=bucket_bytes)

    def send(self, version: int) -> dict[str, float]:
        """One sync; returns `sync_s`, `sync_bytes` and `sync_tensors_sent_frac`. Collective over all trainer ranks.

        A replica that died before is restarted first. On CPU one that dies or fails on the way is restarted as well,
        and the sync begins anew. Raises WeightSyncError where that fails too, and on CUDA at once; the replicas then
        serve nothing.
        """
        started = time.monotonic()
        sent, error = self._try(version)
        if broadcast_object(error is not None):
            if error:
                logger.warning("weight sync of version %d failed and is tried again: %s", version, error)
            sent, error = self._try(version)
            if broadcast_object(error is not None):
                raise error or WeightSyncError("the weight sync failed twice; rank 0 says why")
        return {
            "sync_s": time.monotonic() - started,
            "sync_bytes": float(sent.num_bytes),
            "sync_tensors_sent_frac": sent.tensors_frac,
        }

    def _try(self, version: int) -> tuple[Sent, WeightSyncError | None]:
        """(what was sent, what went wrong on rank 0)."""
        error: WeightSyncError | None = None
        changed, self._replicas_changed = self._replicas_changed, True
        try:
            changed = (self._client.begin() if self._client else False) or changed
        except WeightSyncError as failure:
            error = failure
        go, changed = broadcast_object((error is None, changed))
        if not go:
            return Sent(), error
        try:
            sent = self._transport.send(replicas_changed=changed)
            if self._client:
                self._client.commit(version)
        except WeightSyncError as failure:
            if not self._transport.can_retry:
                raise
            return Sent(), failure
        self._replicas_changed = False
        return sent, None
