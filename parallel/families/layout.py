"""How a Megatron weight is cut from Hugging Face weights: one description for load, export and sync.

A Megatron weight is Hugging Face rows (or columns) in another order: Q, K and V interleave by head group, gate and
up projection alternate by tensor rank, the vocabulary gets padding. Each weight is described by its runs: which
source, from where, how many. Loading copies source to run, export and sync copy run to source, so the two
directions cannot disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_agent.errors import ModelFolderError


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows (columns where dim is 1) of one source; `source` None is padding."""

    source: int | None
    """Index into Weight.sources."""
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the Hugging Face model."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One Megatron parameter and the Hugging Face tensors that it consists of."""

    megatron_name: str
    """With the global layer index, as in the spec without Transformer Engine."""
    sources: tuple[Source, ...]
    dim: int | None
    """The dimension that is split over tensor ranks; None where each rank holds the whole tensor."""
    runs: tuple[Run, ...]
    """The whole weight, all tensor ranks one after another, along `dim`."""

    def runs_of_rank(self, rank: int, size: int) -> list[Run]:
        """The runs of tensor rank `rank` of `size`."""
        if self.dim is None:
            return list(self.runs)
        total = sum(run.length for run in self.runs)
        if total % size:
            raise ModelFolderError(
                f"{self.sources[0].name}: {total} rows or columns cannot be split over parallel.tensor {size}; "
                f"choose a tensor-parallel size that divides {total}"
            )
        begin, end = rank * total // size, (rank + 1) * total // size
        return _cut(self.runs, begin, end)


def _cut(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The part of `runs` between two positions."""
    part: list[Run] = []
    position = 0
    for run in runs:
        first, last = max(begin, position), min(end, position + run.length)
        if first < last:
            part.append(Run(run.source, run.start + first - position, last - first))
        position += run.length
    return part


def whole(megatron_name: str, source: Source) -> Weight:
    """Every tensor rank holds the whole tensor (norms)."""
    return Weight(megatron_name=megatron_name, sources=(source,), dim=None, runs=(Run(0, 0, source.shape[0]),))


def split_columns(megatron_name: str, source: Source) -> Weight:
    """Row-parallel linear layers: the input dimension (1) is split."""
    return Weight(megatron_name=megatron_name, sources=(source,), dim=1, runs=(Run(0, 0, source.shape[1]),))


def split_vocabulary(megatron_name: str, source: Source, padded_size: int) -> Weight:
    """Embedding and output layer: rows are split, the last ranks hold the padding."""
    vocab_size = source.shape[0]
    runs = [Run(0, 0, vocab_size)]
    if padded_size > vocab_size:
        runs.append(Run(None, 0, padded_size - vocab_size))
    return Weight(megatron_name=megatron_name, sources=(source,), dim=0, runs=tuple(runs))


def interleave_qkv(megatron_name: str, query: Source, key: Source, value: Source, *, num_groups: int) -> Weight:
    """Megatron's QKV: for each key-value head its query heads, then the key head, then the value head."""
    query_rows, kv_rows = query.shape[0] // num_groups, key.shape[0] // num_groups
    runs: list[Run] = []
    for group in range(num_groups):
        runs.append(Run(0, group * query_rows, query_rows))
        runs.append(Run(1, group * kv_rows, kv_rows))
        runs.append(Run(2, group * kv_rows, kv_rows))
    return Weight(megatron_name=megatron_name, sources=(query, key, value), dim=0, runs=tuple(runs))


def alternate_gate_up(megatron_name: str, gate: Source, up: Source, *, tensor_size: int) -> Weight:
    """Megatron's gated linear unit: each tensor rank holds its slice of gate, then the same slice of up."""
    if gate.shape[0] % tensor_size:
        raise ModelFolderError(
            f"{gate.name}: intermediate size {gate.shape[0]} cannot be split over parallel.tensor {tensor_size}; "
            f"choose a tensor-parallel size that divides {gate.shape[0]}"
        )
    rows = gate.shape[0] // tensor_size
    runs = tuple(Run(source, rank * rows, rows) for rank in range(tensor_size) for source in (0, 1))
    return Weight(megatron_name=megatron_name, sources=(gate, up), dim=0, runs=runs)


def assemble(weight: Weight, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the tensor ranks' shards to the Hugging Face tensors: name -> contiguous tensor. Padding is dropped.

    A tensor that lies in one shard in one piece comes back as a view of it.
    """
    if weight.dim is None:
        return {weight.sources[0].name: shards[0].contiguous()}
    pieces: list[list[tuple[int, torch.Tensor]]] = [[] for _ in weight.sources]
    for rank, shard in enumerate(shards):
        position = 0
        for run in weight.runs_of_rank(rank, len(shards)):
            if run.source is not None:
                pieces[run.source].append((run.start, shard.narrow(weight.dim, position, run.length)))
            position += run.length
    tensors = {}
    for source, parts in zip(weight.sources, pieces, strict=True):
        ordered = [part for _, part in sorted(parts, key=lambda item: item[0])]
        tensors[source.name] = (ordered[0] if len(ordered) == 1 else torch.cat(ordered, weight.dim)).contiguous()
    return tensors
