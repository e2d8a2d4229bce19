"""Attention over a prefix tree on CUDA: FlexAttention with a block mask that is made from the tree, not from [T, T].

In preorder a token at q attends to one at k exactly where k <= q < ends[k], `ends[k]` being the end of the subtree of
k's node. So which blocks of keys a block of queries needs at all, and which it needs whole, follows from the least and
the largest end in each block. Written against torch 2.13.

Shapes: T tokens, H query heads, G key-value heads, D head dimension.
"""

import functools
from typing import Any

import torch

BLOCK = 128


def tree_block_mask(ends: torch.Tensor) -> Any:
    """The BlockMask of a row whose tokens' subtrees end at `ends`, int [T] on the model's device.

    Costs (T / BLOCK) ** 2 bits of which block needs which, and no element of [T, T].
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens, device = len(ends), ends.device
    num_blocks = -(-num_tokens // BLOCK)
    padding = num_blocks * BLOCK - num_tokens
    ends = ends.to(torch.int32)
    # Padding keys end where they begin, so nothing attends to them, and no block with one is needed whole.
    by_block = torch.cat([ends, ends.new_zeros(padding)]).view(num_blocks, BLOCK)
    block = torch.arange(num_blocks, device=device)
    first_query = (block * BLOCK)[:, None]
    before = block[None] < block[:, None]
    needed = (before & (by_block.amax(dim=1)[None] > first_query)) | (block[None] == block[:, None])
    whole = before & (by_block.amin(dim=1)[None] >= first_query + BLOCK)

    def visible(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    partial_count, partial_blocks = _listed(needed & ~whole)
    whole_count, whole_blocks = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_count, partial_blocks, whole_count, whole_blocks,
        BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(num_tokens, num_tokens),
    )  # fmt: skip


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [Q, K] -> (how many of each row, int32 [1, 1, Q]; the numbers of those, then the others, int32
    [1, 1, Q, K])."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(dim=1).int()[None, None], order.int()[None, None].contiguous()


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any, *, scale: float | None
) -> torch.Tensor:
    """query [T, H, D], key and value [T, G, D] -> [T, H * D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    attend = _compiled() if query.is_cuda else _plain()
    output = attend(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return output[0].transpose(0, 1).flatten(1)


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as attend

    return attend


@functools.cache
def _compiled() -> Any:
    """Rows differ in length, which must not compile anew each time."""
    return torch.compile(_plain(), dynamic=True)
