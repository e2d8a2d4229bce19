"""Weights through shared memory: what the trainer writes is what a replica reads, and nothing stays behind."""

import concurrent.futures.thread
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_agent.errors import WeightSyncError
from megatron_agent.weight_buckets import FILE_PREFIX, SHARED_MEMORY_DIR, BucketEntry
from parallel.shared_memory_sender import Sent, SharedMemorySender, _Bucket
from rollout.weight_receiver import BucketMaps

BUCKET_BYTES = 4096
WAIT_S = 20


class Replica:
    """A sync client that reads each bucket at once, as a replica does, and may fail at one."""

    def __init__(self, *, fails_at: int | None = None, during_load: Callable[[], object] = lambda: None) -> None:
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.bucket_sizes: list[int] = []
        self.paths: set[str] = set()
        self._fails_at = fails_at
        self._during_load = during_load
        self._buckets = BucketMaps()

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.received = {}

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("load")
        self._during_load()
        if self._fails_at == len(self.bucket_sizes):
            raise WeightSyncError("the replica is gone")
        entries = [BucketEntry(**fields) for fields in update_info["entries"]]
        self.bucket_sizes.append(sum(entry.num_bytes for entry in entries))
        self.paths.add(update_info["path"])
        with self._buckets.tensors(update_info["slot"], update_info["path"], entries) as tensors:
            for name, tensor in tensors:
                assert name not in self.received
                self.received[name] = self.keep(tensor)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """As vLLM keeps the tensors of an incomplete module: without a copy."""
        return tensor


def sender_of(tensors: Iterable[tuple[str, torch.Tensor]], replica: Any, **options: Any) -> SharedMemorySender:
    return SharedMemorySender(tensors, replica, **{"bucket_bytes": BUCKET_BYTES, "verify": True} | options)


def send(tensors: Iterable[tuple[str, torch.Tensor]], replica: Replica) -> None:
    sender_of(tensors, replica).send(replicas_changed=False)


def left_behind() -> list[Path]:
    """Files of this process: other runs of this machine have theirs in the same place."""
    return list(Path(SHARED_MEMORY_DIR).glob(f"{FILE_PREFIX}{os.getpid()}-*"))


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
    source = (read.append(name) or (name, torch.empty(0)) for name in ("a", "b"))
    assert sender_of(source, None).send(replicas_changed=False) == Sent()
    assert read == ["a", "b"]


class Signals(list[tuple[str, torch.Tensor]]):
    """A stream of tensors that fill a bucket each; it says when it is asked for the one that follows another."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name, torch.full((BUCKET_BYTES // 4,), float(index))) for index, name in enumerate(names))
        self.passed = [threading.Event() for _ in range(len(self))]
        self.threads: set[str] = set()

    def __iter__(self):
        for item, passed in zip(super().__iter__(), self.passed, strict=True):
            self.threads.add(threading.current_thread().name)
            yield item
            passed.set()

    def wait_until_filled(self, bucket: int) -> None:
        """Wait until this bucket is in shared memory: its tensor is written before the stream passes the next one."""
        last = min(bucket + 1, len(self) - 1)
        assert self.passed[last].wait(WAIT_S), "the next bucket was not filled during the load"


def test_the_next_bucket_is_filled_while_one_is_loaded() -> None:
    """Each tensor fills a bucket; the one after it must be in its bucket before the load is over."""
    source = Signals("abcde")
    open_files = []

    def wait_for_the_next_filling() -> None:
        source.wait_until_filled(len(replica.bucket_sizes) + 1)
        open_files.append(len(set(left_behind()) - before))

    before = set(left_behind())
    replica = Replica(during_load=wait_for_the_next_filling)
    send(source, replica)
    assert replica.calls == ["start", *["load"] * 5, "finish"]
    assert [int(tensor[0]) for tensor in replica.received.values()] == [0, 1, 2, 3, 4]
    assert len(replica.paths) == 2
    assert max(open_files) <= 2
    assert source.threads == {threading.current_thread().name}, "collectives ran on two threads"
    assert set(left_behind()) == before


def test_a_load_that_fails_while_the_next_bucket_is_filled() -> None:
    source = Signals("abcd")
    before = set(left_behind())
    replica = Replica(
        fails_at=1, during_load=lambda: source.passed[len(replica.bucket_sizes) + 1].wait(WAIT_S) and None
    )
    with pytest.raises(WeightSyncError, match="gone"):
        send(source, replica)
    assert replica.calls == ["start", "load", "load"]
    assert all(passed.is_set() for passed in source.passed)
    assert set(left_behind()) == before


def test_an_interrupt_waits_for_no_replica() -> None:
    """Neither does the end of the interpreter, which joins all threads that are no daemons and all executors'."""
    loading, over, threads = threading.Event(), threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        loading.set()
        over.wait(WAIT_S)

    def interrupted() -> Iterable[tuple[str, torch.Tensor]]:
        yield from Signals("abc")
        assert loading.wait(WAIT_S)
        raise KeyboardInterrupt

    before = set(left_behind())
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        send(interrupted(), Replica(during_load=hang))
    assert time.monotonic() - started < WAIT_S / 2
    assert set(left_behind()) == before
    (thread,) = threads
    assert thread.is_alive()
    assert thread.daemon
    assert thread not in concurrent.futures.thread._threads_queues, "joined in spite of being a daemon"
    over.set()
    thread.join(WAIT_S)


def test_a_bucket_that_another_thread_unlinks_at_the_same_time() -> None:
    bucket = _Bucket(0)
    bucket.write("w", torch.zeros(4), limit=BUCKET_BYTES, verify=False)
    assert bucket._path is not None
    os.unlink(bucket._path)
    bucket.close()


def test_shared_memory_that_is_full_while_a_bucket_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, calls = os.posix_fallocate, []

    def reserve_once(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", reserve_once)
    source, before = Signals("abc"), set(left_behind())
    with pytest.raises(WeightSyncError, match=r"no room for a bucket .* in /dev/shm.*lower sync\.bucket_mib"):
        send(source, Replica())
    assert all(passed.is_set() for passed in source.passed)
    assert set(left_behind()) == before


def test_what_a_replica_still_holds_is_its_own_when_the_bucket_is_filled_again() -> None:
    """A decoder layer that is larger than the buckets: its first tensors wait for its last one."""
    names = [f"model.layers.0.part{index}" for index in range(6)]
    replica = assert_arrives([(name, torch.randn(BUCKET_BYTES // 4)) for name in names])
    assert len(replica.paths) == 2


def test_a_layer_is_in_one_bucket_where_it_fits() -> None:
    layers = [(f"model.layers.{layer}.w{i}", torch.randn(200)) for layer in range(3) for i in range(3)]
    assert assert_arrives(layers).bucket_sizes == [2400, 2400, 2400]  # 4096 would hold five tensors


def test_buckets_are_mapped_once_and_filled_again_by_the_next_update() -> None:
    class Copying(Replica):
        def keep(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

    weights = [(name, torch.zeros(BUCKET_BYTES // 4)) for name in "abc"]
    replica = Copying()
    sender = sender_of(weights, replica)
    for version in range(3):
        for _, tensor in weights:
            tensor.fill_(version)
        sender.send(replicas_changed=False)
        assert all(tensor.eq(version).all() for tensor in replica.received.values())
    assert len(replica.paths) == 2
    sender.send(replicas_changed=True)
    assert len(replica.paths) == 4, "a new replica has mapped nothing yet, and the old files are unlinked"


def delta_model() -> dict[str, torch.Tensor]:
    names = ["model.embed_tokens.weight", *(f"model.layers.{n}.{part}" for n in range(3) for part in ("q", "k"))]
    return {name: torch.randn(10, 10).to(torch.bfloat16) for name in [*names, "model.norm.weight"]}


def test_delta_sends_the_layers_that_changed_whole_and_nothing_else() -> None:
    weights, replica = delta_model(), Replica()
    sender = sender_of(weights.items(), replica, delta=True)
    assert sender.send(replicas_changed=True).tensors_frac == 1
    assert list(replica.received) == list(weights)

    weights["model.layers.1.k"][3, 3] += 1
    sent = sender.send(replicas_changed=False)
    assert list(replica.received) == ["model.layers.1.q", "model.layers.1.k"]
    assert torch.equal(replica.received["model.layers.1.k"], weights["model.layers.1.k"])
    assert sent == Sent(num_bytes=400, num_tensors=2, tensors_total=8)

    weights["model.norm.weight"].neg_()
    sender.send(replicas_changed=False)
    assert list(replica.received) == ["model.norm.weight"]


def test_delta_moves_nothing_where_nothing_changed() -> None:
    weights, replica = delta_model(), Replica()
    sender = sender_of(weights.items(), replica, delta=True)
    sender.send(replicas_changed=True)
    replica.calls.clear()
    assert sender.send(replicas_changed=False) == Sent(tensors_total=8)
    assert replica.calls == []


def test_delta_tells_the_bytes_apart_not_the_values() -> None:
    weights, replica = {"w": torch.zeros(4)}, Replica()
    sender = sender_of(weights.items(), replica, delta=True)
    sender.send(replicas_changed=True)
    weights["w"][0] = -0.0
    assert sender.send(replicas_changed=False).num_tensors == 1


def test_delta_sends_everything_to_a_new_replica_and_after_a_failure() -> None:
    weights, replica = delta_model(), Replica()
    sender = sender_of(weights.items(), replica, delta=True)
    sender.send(replicas_changed=True)
    assert sender.send(replicas_changed=True).tensors_frac == 1
    weights["model.norm.weight"].neg_()
    replica._fails_at = len(replica.bucket_sizes)
    with pytest.raises(WeightSyncError, match="gone"):
        sender.send(replicas_changed=False)
    replica._fails_at = None
    assert sender.send(replicas_changed=False).tensors_frac == 1
