"""Packed attention without Transformer Engine: rotary positions and causal attention inside each segment of a row.

A row holds many segments that must not see each other. No [T, T] mask is built: segments of similar length form
one padded batch, and a causal kernel never looks at padding that lies behind every real token.

Shapes: T tokens of the row, H query heads, G key-value heads of this tensor rank, D head dimension.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

# A batch takes in shorter segments until more than this share of its slots would be padding.
_MAX_PADDING_FRAC = 0.2


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments that run through one attention call."""

    num_segments: int
    longest: int
    """Slots per segment."""
    first_token: int | None
    """Where the batch starts in the row if its segments are equal in length and adjacent: then it is a view."""
    tokens: torch.Tensor | None = None
    """int64 [num_segments * longest]: the row index that fills each slot; padding repeats the segment's last token."""

    def to(self, device: torch.device) -> "SegmentBatch":
        tokens = None if self.tokens is None else self.tokens.to(device)
        return dataclasses.replace(self, tokens=tokens)


@dataclass
class PackedRow(PackedSeqParams):
    """Where a row's segments lie. Made once per row by `packed_row`; every layer reads it.

    Transformer Engine reads only what it inherits; the rest is worked out when PackedAttention first asks.
    """

    position_ids: torch.Tensor = field(default=None)  # type: ignore[assignment]
    """int64 [T]."""
    bounds: tuple[int, ...] = ()
    """cu_seqlens as numbers."""
    _rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    @functools.cached_property
    def plan(self) -> tuple[list[SegmentBatch], torch.Tensor | None]:
        """The batches, and each token's slot in the concatenated batches, int64 [T] (None: the identity)."""
        batches, slot_of_token = _plan_batches(self.bounds)
        device = self.position_ids.device
        return [batch.to(device) for batch in batches], None if slot_of_token is None else slot_of_token.to(device)

    def rotary(self, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, 1, D/2]; the same for all layers, so computed once."""
        if self._rotary is None:
            angles = torch.outer(self.position_ids.float(), inv_freq)[:, None]
            self._rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._rotary


def packed_row(position_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> PackedRow:
    """Describe a row for the model's forward pass.

    `position_ids` int64 [T] on the model's device; `cu_seqlens` int32 [S+1], first 0, last T, on any device.
    """
    bounds = tuple(cu_seqlens.tolist())
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    cu_seqlens = cu_seqlens.to(device=position_ids.device, dtype=torch.int32)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=position_ids,
        bounds=bounds,
    )


def _plan_batches(bounds: Sequence[int]) -> tuple[list[SegmentBatch], torch.Tensor | None]:
    """Group segments, longest first, so that little of each batch is padding."""
    starts, num_tokens = bounds[:-1], bounds[-1]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], starts[i]))
    batches: list[SegmentBatch] = []
    slot_of_token = torch.empty(num_tokens, dtype=torch.int64)
    num_slots = 0
    while order:
        longest = lengths[order[0]]
        real = size = 0
        while size < len(order):
            real_with_next = real + lengths[order[size]]
            if real_with_next < (1 - _MAX_PADDING_FRAC) * (size + 1) * longest:
                break
            real, size = real_with_next, size + 1
        members, order = order[:size], order[size:]
        start = torch.tensor([starts[i] for i in members])[:, None]
        length = torch.tensor([lengths[i] for i in members])[:, None]
        offset = torch.arange(longest)[None]
        tokens = start + torch.minimum(offset, length - 1)
        filled = offset < length
        slots = num_slots + torch.arange(size * longest).view(size, longest)
        slot_of_token[tokens[filled]] = slots[filled]
        num_slots += size * longest
        is_view = bool(torch.equal(tokens.flatten(), torch.arange(starts[members[0]], starts[members[0]] + real)))
        if is_view:
            batches.append(SegmentBatch(size, longest, first_token=starts[members[0]]))
        else:
            batches.append(SegmentBatch(size, longest, first_token=None, tokens=tokens.flatten()))
    is_identity = torch.equal(slot_of_token, torch.arange(num_slots))
    return batches, None if is_identity else slot_of_token


class PackedAttention(torch.nn.Module):
    """Megatron's core attention for packed rows; has no parameters.

    `inv_freq` [D/2] fp32 are the rotary frequencies; the model is built without rotary embeddings of its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        inv_freq: torch.Tensor,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "PackedAttention does not split a row over ranks"
        assert not config.attention_dropout, "PackedAttention has no dropout"
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.inv_freq = inv_freq

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **_unused: Any,
    ) -> torch.Tensor:
        """query [T, H, D], key and value [T, G, D] -> [T, H * D]."""
        cos, sin = packed_seq_params.rotary(self.inv_freq, query.dtype)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        batches, slot_of_token = packed_seq_params.plan
        outputs = [self._attend(batch, query, key, value) for batch in batches]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if slot_of_token is None else output.index_select(0, slot_of_token)

    def _attend(self, batch: SegmentBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One causal attention call -> [num_segments * longest, H * D]."""
        query, key, value = (_batch_of(batch, x) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output.transpose(1, 2).reshape(batch.num_segments * batch.longest, -1)


def _batch_of(batch: SegmentBatch, x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] -> [num_segments, heads, longest, D]."""
    if batch.tokens is not None:
        x = x.index_select(0, batch.tokens)
    else:
        x = x.narrow(0, batch.first_token or 0, batch.num_segments * batch.longest)
    return x.unflatten(0, (batch.num_segments, batch.longest)).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) of x [T, heads, D] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
