"""The weights' way into the fleet on CPU: buckets in shared memory, one filled while the other is loaded.

    main thread    fill A | fill B          | fill A          | drain the stream
    load thread           | replicas load A | replicas load B |

The main thread iterates the source and with it runs all collectives; the load thread only waits for the replicas. A
bucket is filled again once its load is over, so that two exist at most. An interrupt waits for no replica: the load
thread is a daemon. Both buckets stay mapped from one sync to the next:
a page of shared memory that is touched for the first time costs many times the copy that follows.
"""

import contextlib
import hashlib
import mmap
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from megatron_agent.errors import WeightSyncError
from megatron_agent.weight_buckets import FILE_PREFIX, SHARED_MEMORY_DIR, BucketEntry, aligned, byte_view, checksum

if TYPE_CHECKING:
    from parallel.weight_sender import SyncClient

Unit = list[tuple[str, torch.Tensor]]
_FIRST_NUMBER = re.compile(r"(.+?\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one update moved; zeros on ranks that send nothing."""

    num_bytes: int = 0
    num_tensors: int = 0
    tensors_total: int = 0
    """Tensors of the whole model."""

    @property
    def tensors_frac(self) -> float:
        return self.num_tensors / self.tensors_total if self.tensors_total else 0.0


class SharedMemorySender:
    """The transport on CPU.

    With `delta` a unit goes out only where its bytes are not those of the last update that the whole fleet committed,
    as a SHA-256 of them tells; a copy of them would be a second model in memory. A unit is a decoder layer, or a module
    outside the layers. It cannot be a single tensor: vLLM's layerwise reload leaves a module alone of which nothing
    comes, but one of which a part comes (`q_proj` of the fused `qkv_proj`) it builds anew, with the rest from
    uninitialised memory. Nor can the tensor be written in place, because on CPU vLLM keeps linear weights as packed
    copies only. What vLLM fuses never reaches beyond a decoder layer.
    """

    can_retry = True

    def __init__(
        self,
        source: Iterable[tuple[str, torch.Tensor]],
        client: "SyncClient | None",
        *,
        bucket_bytes: int,
        verify: bool,
        delta: bool = False,
    ) -> None:
        """`client` None: a rank that takes part in the source's collectives and sends nothing."""
        self._source = source
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._verify = verify
        self._delta = delta
        self._buckets: list[_Bucket] = []
        self._digests: dict[str, bytes] = {}
        """Of each unit that the fleet has, by its first tensor's name; only with `delta`."""

    def send(self, *, replicas_changed: bool) -> Sent:
        """One update; returns what was sent. Collective.

        `replicas_changed`: a replica may lack what was last sent, so everything is. Raises WeightSyncError where a
        replica fails or shared memory is full, after the stream was read to its end.
        """
        tensors = iter(self._source)
        if self._client is None:
            _drain(tensors)
            return Sent()
        if replicas_changed:
            self._forget()
        update = _Update(self._client, self._buckets, self._bucket_bytes, verify=self._verify, delta=self._delta)
        digests: dict[str, bytes] = {}
        done = False
        try:
            for unit in units(tensors):
                update.tensors_total += len(unit)
                if self._delta:
                    name = unit[0][0]
                    digests[name] = _digest(unit)
                    if digests[name] == self._digests.get(name):
                        continue
                update.add(unit)
            update.finish()
            done = True
        except WeightSyncError:
            update.abandon()
            _drain(tensors)  # the other ranks are in the stream's collectives to its end
            raise
        finally:
            if not done:
                self._forget()
        self._digests = digests
        return Sent(num_bytes=update.num_bytes, num_tensors=update.num_tensors, tensors_total=update.tensors_total)

    def _forget(self) -> None:
        """Start from nothing: a new replica has not mapped the buckets, which are unlinked, nor their contents."""
        for bucket in self._buckets:
            bucket.close()
        self._buckets = [_Bucket(slot) for slot in range(2)]
        self._digests = {}

    def __del__(self) -> None:
        for bucket in self._buckets:
            bucket.close()


class _Update:
    """One update from its first bucket to its end; opened at the replicas with the first bucket."""

    def __init__(
        self, client: "SyncClient", buckets: "list[_Bucket]", limit: int, *, verify: bool, delta: bool
    ) -> None:
        if not buckets:
            buckets.extend(_Bucket(slot) for slot in range(2))
        self._client = client
        self._filling, self._other = buckets
        self._limit = limit
        self._verify = verify
        self._delta = delta
        self._load: _Load | None = None
        self._is_open = False
        self.num_bytes = 0
        self.num_tensors = 0
        self.tensors_total = 0

    def add(self, unit: Unit) -> None:
        """Fill in one unit, whole in one bucket where it fits: vLLM holds on to the parts of an incomplete module."""
        self._make_room(unit)
        for name, tensor in unit:
            self._make_room([(name, tensor)])
            self._filling.write(name, tensor, limit=self._limit, verify=self._verify)
            self.num_tensors += 1

    def _make_room(self, unit: Unit) -> None:
        size = sum(aligned(tensor.numel() * tensor.element_size()) for _, tensor in unit)
        if self._filling.entries and self._filling.used + size > self._limit:
            self._announce()

    def _announce(self) -> None:
        """Have the replicas load the bucket that was filled, and fill the other one, whose load is over by then."""
        self._await_load()
        bucket = self._filling
        self.num_bytes += sum(entry.num_bytes for entry in bucket.entries)
        self._load = _Load(partial(self._load_bucket, bucket, bucket.take(partial=self._delta)))
        self._filling, self._other = self._other, bucket

    def _load_bucket(self, bucket: "_Bucket", info: dict[str, Any]) -> None:
        try:
            if not self._is_open:
                self._client.start_weight_update()
                self._is_open = True
            self._client.update_weights(info)
        finally:
            bucket.unlink()  # every replica has mapped it by now, or never will

    def _await_load(self) -> None:
        if self._load is not None:
            load, self._load = self._load, None
            if (error := load.wait()) is not None:
                raise error

    def finish(self) -> None:
        """Load what is left and close the update; nothing where nothing was added."""
        if self._filling.entries:
            self._announce()
        self._await_load()
        if self._is_open:
            self._client.finish_weight_update()

    def abandon(self) -> None:
        """Wait for the load in flight, whatever comes of it: the first failure is the one to tell."""
        if self._load is not None:
            self._load.wait()
            self._load = None


class _Load:
    """One load on a thread of its own, which keeps no interpreter from ending, as an executor's would."""

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="weight-load", daemon=True)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """What it raised. Bounded: the client gives up after sync.timeout_s."""
        self._thread.join()
        return self._error

    def _work(self) -> None:
        try:
            self._load()
        except BaseException as error:  # belongs to the main thread, which raises it where it waits
            self._error = error


class _Bucket:
    """A file in shared memory that the replicas map once and the sender fills again and again."""

    def __init__(self, slot: int) -> None:
        self.entries: list[BucketEntry] = []
        self.used = 0
        self._slot = slot
        self._path: str | None = None
        self._file = -1
        self._is_linked = False
        self._map: mmap.mmap | None = None
        self._reserved = 0

    def write(self, name: str, tensor: torch.Tensor, *, limit: int, verify: bool) -> None:
        """Append a tensor; raises WeightSyncError where shared memory is full."""
        entry = BucketEntry(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=self.used,
            num_bytes=tensor.numel() * tensor.element_size(),
            checksum=checksum(tensor) if verify else None,
        )
        buffer = self._reserve(entry.offset + entry.num_bytes, limit)
        target = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=entry.offset)
        target.copy_(tensor.detach().reshape(-1))
        self.entries.append(entry)
        self.used = aligned(entry.offset + entry.num_bytes)

    def _reserve(self, end: int, limit: int) -> mmap.mmap:
        """The mapping, with memory behind its first `end` bytes.

        The file is at least `limit` long, but only as much of it takes memory as was ever used.
        """
        if self._path is None:
            self._file, self._path = tempfile.mkstemp(prefix=f"{FILE_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY_DIR)
            self._is_linked = True
        if self._map is None or len(self._map) < end:
            length = max(limit, end)
            os.truncate(self._file, length)
            self._map = mmap.mmap(self._file, length)
        if end > self._reserved:
            try:  # a write to a page that cannot be had would be a SIGBUS
                os.posix_fallocate(self._file, self._reserved, end - self._reserved)
            except OSError as error:
                raise WeightSyncError(
                    f"no room for a bucket of {end / 2**20:.0f} MiB in {SHARED_MEMORY_DIR}: {error.strerror}; "
                    "lower sync.bucket_mib or enlarge the shared memory of this machine or container"
                ) from error
            self._reserved = end
        return self._map

    def take(self, *, partial: bool) -> dict[str, Any]:
        """What the replicas need to load it (SharedMemoryUpdateInfo); empties it for the next filling."""
        entries, self.entries, self.used = self.entries, [], 0
        return {
            "slot": self._slot,
            "path": self._path,
            "entries": [entry.to_dict() for entry in entries],
            "partial": partial,
        }

    def unlink(self) -> None:
        if self._is_linked and self._path is not None:
            self._is_linked = False
            with contextlib.suppress(FileNotFoundError):  # after an interrupt both threads come here
                os.unlink(self._path)

    def close(self) -> None:
        self.unlink()
        self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def units(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Unit]:
    """Runs of tensors that belong together: a decoder layer's (`model.layers.3`), or one module's outside of them."""
    for _, members in groupby(tensors, key=lambda item: _unit_of(item[0])):
        yield list(members)


def _unit_of(name: str) -> str:
    numbered = _FIRST_NUMBER.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _digest(unit: Unit) -> bytes:
    digest = hashlib.sha256()
    for _, tensor in unit:
        digest.update(byte_view(tensor))
    return digest.digest()


def _drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in tensors:
        pass
