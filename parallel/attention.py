"""Attention for packed rows: rotary positions, and each token attends to the path of its prefix tree and nothing else.

A row holds many sequences that must not see each other, and nodes that several of them begin with. No [T, T] mask is
built. On CPU nodes of similar shape form one padded batch for torch's fused attention: nodes that begin a
sequence under its causal kernel, which never looks at padding behind a real token, the others under a mask of
[queries, path] each. On CUDA the tree is a block mask of FlexAttention, and a row without shared nodes goes to
Transformer Engine's variable-length kernels where that is installed.

Shapes: T tokens of the row, H query heads, G key-value heads of this tensor rank, D head dimension.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch.utils.checkpoint import checkpoint

from parallel.flex_attention import flex_attention, tree_block_mask
from trajectory.prefix_tree import subtree_ends

# A batch takes in smaller nodes until more than this share of its query-key slots would be padding.
_MAX_PADDING_FRAC = 0.2
# Under a mask the half of a node's own square that is masked costs as much as the other, and a mask has an element for
# every pair: so many queries run at a time, and read only the keys up to their last one.
_MASKED_QUERIES = 256


@dataclass(frozen=True, slots=True)
class NodeBatch:
    """Nodes that run through one attention call."""

    num_nodes: int
    num_queries: int
    """Slots per node."""
    num_keys: int
    """Slots per node: its path, itself included."""
    first_token: int | None = None
    """Where the batch starts in the row if its nodes are equal in length and adjacent, and begin sequences: then
    queries and keys are views of the row."""
    queries: torch.Tensor | None = None
    """int64 [num_nodes * num_queries]: the row index that fills each slot; padding repeats the node's last token."""
    keys: torch.Tensor | None = None
    """int64 [num_nodes * num_keys], likewise; None: those of `queries`, and attention is causal."""
    num_before: torch.Tensor | None = None
    """int64 [num_nodes]: keys of the path before each node; None where `keys` is."""

    def to(self, device: torch.device) -> "NodeBatch":
        moved = {name: getattr(self, name) for name in ("queries", "keys", "num_before")}
        return dataclasses.replace(self, **{name: x.to(device) for name, x in moved.items() if x is not None})


@dataclass
class PackedRow(PackedSeqParams):
    """Where a row's nodes lie. Made once per row by `packed_row`; every layer reads it.

    Transformer Engine reads only what it inherits; the rest is worked out when it is first asked for.
    """

    position_ids: torch.Tensor = field(default=None)  # type: ignore[assignment]
    """int64 [T]."""
    node_bounds: np.ndarray = field(default=None)  # type: ignore[assignment]
    """int64 [K+1], on the host."""
    node_parents: np.ndarray = field(default=None)  # type: ignore[assignment]
    """int64 [K], on the host."""
    _rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def has_shared_nodes(self) -> bool:
        """Whether any node continues another; otherwise the nodes are plain segments."""
        return bool((self.node_parents >= 0).any())

    @functools.cached_property
    def plan(self) -> tuple[list[NodeBatch], torch.Tensor | None]:
        """The batches, and each token's slot in the concatenated batches, int64 [T] (None: the identity)."""
        batches, slot_of_token = _plan_batches(self.node_bounds, self.node_parents)
        device = self.position_ids.device
        return [batch.to(device) for batch in batches], None if slot_of_token is None else slot_of_token.to(device)

    @functools.cached_property
    def block_mask(self) -> Any:
        """FlexAttention's mask of the tree."""
        ends = np.repeat(subtree_ends(self.node_bounds, self.node_parents), np.diff(self.node_bounds))
        return tree_block_mask(torch.from_numpy(ends).to(self.position_ids.device))

    def rotary(self, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, 1, D/2]; the same for all layers, so computed once."""
        if self._rotary is None:
            angles = torch.outer(self.position_ids.float(), inv_freq)[:, None]
            self._rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._rotary


def packed_row(position_ids: torch.Tensor, node_bounds: torch.Tensor, node_parents: torch.Tensor) -> PackedRow:
    """Describe a row for the model's forward pass.

    `position_ids` int64 [T] on the model's device; `node_bounds` int32 [K+1], first 0, last T, and `node_parents`
    int32 [K] on any device.
    """
    bounds = node_bounds.cpu().numpy().astype(np.int64)
    cu_seqlens = node_bounds.to(device=position_ids.device, dtype=torch.int32)
    longest = int(np.diff(bounds).max())
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=position_ids,
        node_bounds=bounds,
        node_parents=node_parents.cpu().numpy().astype(np.int64),
    )


class _Node(NamedTuple):
    """Tokens `start` up to `end` of the row, and the row indices of the path before them."""

    start: int
    end: int
    ancestors: np.ndarray

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return len(self.ancestors) + self.end - self.start


def _nodes(bounds: np.ndarray, parents: np.ndarray) -> list[_Node]:
    """The row's nodes without empty ones."""
    paths: dict[int, np.ndarray] = {-1: np.zeros(0, dtype=np.int64)}
    nodes: list[_Node] = []
    children = np.bincount(parents[parents >= 0], minlength=len(parents)).tolist()
    for node, (start, end, parent) in enumerate(
        zip(bounds[:-1].tolist(), bounds[1:].tolist(), parents.tolist(), strict=True)
    ):
        ancestors = paths[parent]
        if children[node]:
            paths[node] = np.concatenate([ancestors, np.arange(start, end)])
        if end > start:
            nodes.append(_Node(start, end, ancestors))
    return nodes


def _plan_batches(bounds: np.ndarray, parents: np.ndarray) -> tuple[list[NodeBatch], torch.Tensor | None]:
    """Group nodes, those with most keys first, so that little of each batch is padding."""
    nodes = _nodes(bounds, parents)
    nodes.sort(key=lambda node: (len(node.ancestors) > 0, -node.num_keys, -node.num_queries))
    batches: list[NodeBatch] = []
    slot_of_token = np.empty(int(bounds[-1]), dtype=np.int64)
    num_slots = first = 0
    while first < len(nodes):
        members = nodes[first : first + _batch_size(nodes, first)]
        first += len(members)
        batch, queries = _batch(members)
        batches.append(batch)
        # Padding repeats a node's last token in the slots behind its own, so the first slot of each token counts.
        slots = np.arange(num_slots, num_slots + len(queries))
        slot_of_token[queries[::-1]] = slots[::-1]
        num_slots += len(queries)
    is_identity = num_slots == len(slot_of_token) and bool((slot_of_token == np.arange(num_slots)).all())
    return batches, None if is_identity else torch.from_numpy(slot_of_token)


def _batch_size(nodes: list[_Node], first: int) -> int:
    """How many nodes from `first` on share a batch: those behind others never with those that begin sequences."""
    begins, real, size, longest = not len(nodes[first].ancestors), 0, 0, 0
    most_keys = nodes[first].num_keys
    for node in nodes[first:]:
        if begins == bool(len(node.ancestors)):
            break
        longest = max(longest, node.num_queries)
        with_next = real + node.num_queries * (node.num_queries if begins else node.num_keys)
        if with_next < (1 - _MAX_PADDING_FRAC) * (size + 1) * longest * (longest if begins else most_keys):
            break
        real, size = with_next, size + 1
    return size


def _batch(members: list[_Node]) -> tuple[NodeBatch, np.ndarray]:
    """The batch, and the row index that fills each of its query slots."""
    starts, ends = (np.array([getattr(node, name) for node in members])[:, None] for name in ("start", "end"))
    num_queries = int((ends - starts).max())
    queries = np.minimum(starts + np.arange(num_queries), ends - 1).ravel()
    if not len(members[0].ancestors):
        if len(queries) == int((ends - starts).sum()) and bool((np.diff(queries) == 1).all()):
            return NodeBatch(len(members), num_queries, num_queries, first_token=int(queries[0])), queries
        return NodeBatch(len(members), num_queries, num_queries, queries=torch.from_numpy(queries)), queries
    num_keys = max(node.num_keys for node in members)
    keys = np.empty((len(members), num_keys), dtype=np.int64)
    for filled, node in zip(keys, members, strict=True):
        before = len(node.ancestors)
        filled[:before] = node.ancestors
        filled[before:] = np.minimum(node.start + np.arange(num_keys - before), node.end - 1)
    batch = NodeBatch(
        len(members), num_queries, num_keys, queries=torch.from_numpy(queries), keys=torch.from_numpy(keys.ravel()),
        num_before=torch.tensor([len(node.ancestors) for node in members]),
    )  # fmt: skip
    return batch, queries


class PackedAttention(torch.nn.Module):
    """Megatron's core attention for packed rows; has no parameters.

    `inv_freq` [D/2] fp32 are the rotary frequencies; the model is built without rotary embeddings of its own.
    `varlen`, on CUDA: Transformer Engine's core attention, for rows without shared nodes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        inv_freq: torch.Tensor,
        varlen: Callable[..., torch.nn.Module] | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "PackedAttention does not split a row over ranks"
        assert not config.attention_dropout, "PackedAttention has no dropout"
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.inv_freq = inv_freq
        self.varlen = None
        if varlen is not None:
            self.varlen = varlen(config=config, layer_number=layer_number, softmax_scale=softmax_scale, **options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedRow,
        **options: Any,
    ) -> torch.Tensor:
        """query [T, H, D], key and value [T, G, D] -> [T, H * D]."""
        cos, sin = packed_seq_params.rotary(self.inv_freq, query.dtype)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        if self.varlen is not None and not packed_seq_params.has_shared_nodes:
            return self.varlen(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options)
        if query.is_cuda:
            return flex_attention(query, key, value, packed_seq_params.block_mask, scale=self.softmax_scale)
        batches, slot_of_token = packed_seq_params.plan
        outputs = [self._run(batch, query, key, value) for batch in batches]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if slot_of_token is None else output.index_select(0, slot_of_token)

    def _run(self, batch: NodeBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`_attend`, with paths that are long beside their nodes gathered again for the backward pass: kept, they would
        be a copy of the prompt for each of its answers, in every layer."""
        attend = functools.partial(self._attend, batch)
        return (
            _again(attend, query, key, value) if batch.num_keys > 2 * batch.num_queries else attend(query, key, value)
        )

    def _attend(self, batch: NodeBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One attention call -> [num_nodes * num_queries, H * D]."""
        query = _slots(query, batch.queries, batch.first_token, batch.num_nodes, batch.num_queries)
        of_keys = batch.queries if batch.keys is None else batch.keys
        key, value = (_slots(x, of_keys, batch.first_token, batch.num_nodes, batch.num_keys) for x in (key, value))
        attend = functools.partial(
            F.scaled_dot_product_attention, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        if batch.num_before is None:
            output = attend(query, key, value, is_causal=True)
        else:
            output = _attend_to_paths(attend, query, key, value, batch.num_before)
        return output.transpose(1, 2).reshape(batch.num_nodes * batch.num_queries, -1)


def _attend_to_paths(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_before: torch.Tensor,
) -> torch.Tensor:
    """query [n, H, Q, D] of n nodes, key and value [n, G, K, D] of their paths, on which `num_before` [n] stand before
    each node -> [n, H, Q, D]. A query sees its path up to itself: as many keys as stand before it, and one."""
    outputs = []
    most_before, slots = int(num_before.max()), torch.arange(key.shape[2], device=key.device)
    for number, part in enumerate(query.split(_MASKED_QUERIES, dim=2)):
        first = number * _MASKED_QUERIES
        num_keys = min(key.shape[2], most_before + first + part.shape[2])
        places = first + torch.arange(part.shape[2], device=key.device)
        last_key = num_before[:, None, None] + places[:, None]

        def one_part(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last_key: torch.Tensor = last_key
        ) -> torch.Tensor:
            return attend(query, key, value, attn_mask=(slots[: key.shape[2]] <= last_key)[:, None])

        is_only = part.shape[2] == query.shape[2]
        run = one_part if is_only else functools.partial(_again, one_part)
        outputs.append(run(part, key[:, :, :num_keys], value[:, :, :num_keys]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _again(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """function(*tensors), which keeps nothing for the backward pass but the tensors, and runs once more there. A mask
    kept for every part of a long node would be memory by the square of its length."""
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _slots(
    x: torch.Tensor, tokens: torch.Tensor | None, first_token: int | None, num_nodes: int, per_node: int
) -> torch.Tensor:
    """[T, heads, D] -> [num_nodes, heads, per_node, D]."""
    x = x.narrow(0, first_token or 0, num_nodes * per_node) if tokens is None else x.index_select(0, tokens)
    return x.unflatten(0, (num_nodes, per_node)).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) of x [T, heads, D] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
