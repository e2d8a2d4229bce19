"""Weights through shared memory: what the trainer writes is what a replica reads, and nothing stays behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_agent.errors import WeightSyncError
from megatron_agent.weight_buckets import SHARED_MEMORY_DIR, BucketEntry
from parallel.weight_sender import SharedMemorySender
from rollout.weight_receiver import _map, _view

BUCKET_BYTES = 4096


class Replica:
    """A sync client that reads each bucket at once, as a replica does, and may fail at one."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.bucket_sizes: list[int] = []
        self._fails_at = fails_at

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self._fails_at == len(self.bucket_sizes):
            raise WeightSyncError("the replica is gone")
        buffer = _map(update_info["path"])
        self.bucket_sizes.append(len(buffer))
        for fields in update_info["entries"]:
            entry = BucketEntry(**fields)
            assert entry.name not in self.received
            self.received[entry.name] = _view(buffer, entry)


def send(tensors: list[tuple[str, torch.Tensor]], replica: Replica, *, verify: bool = True) -> None:
    sender: Any = SharedMemorySender(tensors, replica, bucket_bytes=BUCKET_BYTES, verify=verify)  # type: ignore[arg-type]
    sender.send(replicas_changed=False)


def left_behind() -> list[Path]:
    return list(Path(SHARED_MEMORY_DIR).glob("megatron-agent-weights-*"))


def assert_arrives(tensors: list[tuple[str, torch.Tensor]]) -> Replica:
    before = set(left_behind())
    replica = Replica()
    send(tensors, replica)
    assert list(replica.received) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert replica.received[name].dtype == tensor.dtype
        assert torch.equal(replica.received[name], tensor)
    assert set(left_behind()) == before
    return replica


def test_layers_that_arrive_in_two_buckets() -> None:
    replica = assert_arrives([(f"layers.{i}.weight", torch.randn(20, 30)) for i in range(2)])
    assert len(replica.bucket_sizes) == 2


def test_a_tensor_as_large_as_the_bucket_three_times_in_a_row() -> None:
    replica = assert_arrives([(f"w{i}", torch.randn(BUCKET_BYTES // 4)) for i in range(3)])
    assert replica.bucket_sizes == [BUCKET_BYTES] * 3


def test_a_tensor_larger_than_the_bucket() -> None:
    assert_arrives([("small", torch.randn(3)), ("large", torch.randn(3 * BUCKET_BYTES)), ("last", torch.randn(3))])


def test_a_transpose_and_odd_sizes_and_types() -> None:
    assert_arrives(
        [
            ("transpose", torch.randn(5, 7).t()),
            ("odd", torch.randn(1)),
            ("half", torch.randn(13, 3).to(torch.bfloat16)),
            ("slice", torch.randn(9, 9)[:, 2:5]),
        ]
    )


def test_a_changed_byte_is_found_and_the_tensor_named() -> None:
    class Tampering(Replica):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            with open(update_info["path"], "r+b") as file:
                file.seek(update_info["entries"][1]["offset"])
                file.write(b"\xff")
            super().update_weights(update_info)

    with pytest.raises(ValueError, match="tensor second: checksum"):
        send([("first", torch.zeros(4)), ("second", torch.zeros(4))], Tampering())


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_replica_that_fails_leaves_the_stream_read_to_its_end(bucket: int) -> None:
    """The other ranks take part in the stream's collectives until its end: stopping early would leave them waiting."""
    read = []

    class Source(list):
        def __iter__(self):
            for item in super().__iter__():
                read.append(item[0])
                yield item

    before = set(left_behind())
    names = [f"w{i}" for i in range(5)]
    with pytest.raises(WeightSyncError, match="gone"):
        send(Source((name, torch.zeros(BUCKET_BYTES // 4)) for name in names), Replica(fails_at=bucket))
    assert read == names
    assert set(left_behind()) == before


def test_ranks_without_a_client_take_part_in_the_stream() -> None:
    read = []
    source: Any = (read.append(name) or (name, torch.empty(0)) for name in ("a", "b"))
    sender = SharedMemorySender(source, None, bucket_bytes=BUCKET_BYTES, verify=False)
    assert sender.send(replicas_changed=False) == 0
    assert read == ["a", "b"]
