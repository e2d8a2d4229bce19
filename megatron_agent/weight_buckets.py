"""The layout of one bucket of weights in shared memory: what the trainer writes and every replica reads.

A bucket is a file in the host's shared memory. Tensors lie one after another, each at a 64-byte boundary, and are
described by entries that travel with the update request. All replicas of the host read the one copy. The writer unlinks
the file once they have mapped it, and fills it anew as soon as they have loaded it: a reader that needs a tensor for
longer must have made it its own by the time it answers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BACKEND = "shared_memory"
"""The engine's name in vLLM's weight-transfer registry."""
SHARED_MEMORY_DIR = "/dev/shm"
FILE_PREFIX = "megatron-agent-weights-"
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """One tensor of a bucket."""

    name: str
    dtype: str
    """torch's name without `torch.`, for example `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int
    checksum: int | None = None
    """`checksum` of the sender's tensor, where sync.verify asks for it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as vLLM's update requests carry them."""
        return {name: getattr(self, name) for name in self.__slots__}


def aligned(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def byte_view(tensor: "torch.Tensor") -> memoryview:
    """The tensor's bytes, in host memory; without a copy where they lie there one after another."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data


def checksum(tensor: "torch.Tensor") -> int:
    """A CRC-32 of the tensor's bytes; equal on both sides exactly where the bytes are, up to one chance in 2**32."""
    import zlib

    return zlib.crc32(byte_view(tensor))
