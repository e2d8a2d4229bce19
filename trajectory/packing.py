"""Packed rows: the record that the trainer's forward and backward pass consumes, and how samples become one.

A row has two sides. What the model reads is T tokens, laid out as a prefix tree: samples that begin alike share the
tokens of their beginning. What is trained is N entries, one for each token that each trajectory sampled, and each
says which of the row's outputs it is read from. Two trajectories that sampled the same token after the same history
have an entry each, with credit and rollout log-probs of their own, and the model computes what both need once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trajectory.advantages.inputs import Credit
from trajectory.prefix_tree import build_tree
from trajectory.row_plan import plan_rows
from trajectory.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatch:
    """One row of T tokens, and the N entries that are read from it. All tensors are on CPU.

    The output at a token says what follows it: the shift by one between a token and the output that its log-prob and
    the value of the state before it come from is in `asked`, which is made in `pack_row` and nowhere else. A row has
    at least one entry; where nothing is trained that one is masked.
    """

    token_ids: torch.Tensor
    """int64 [T]; 0 in the padding, which lies at the end and is never trained."""
    position_ids: torch.Tensor
    """int64 [T]; how many tokens stand on the token's path before it; restarts at 0 in the padding."""
    node_bounds: torch.Tensor
    """int32 [K+1]; the row's nodes in preorder, first 0, last T. The padding, if any, is the last node."""
    node_parents: torch.Tensor
    """int32 [K]; the node that each continues, -1 where a sequence begins. Without sharing all are -1, and
    node_bounds is what is called cu_seqlens elsewhere."""
    asked: torch.Tensor
    """int64 [R], rising: the tokens whose outputs are read."""
    asked_index: torch.Tensor
    """int64 [N]; which of the R outputs each entry is read from: that of the token before it."""
    target_ids: torch.Tensor
    """int64 [N]; the token that was sampled there."""
    loss_mask: torch.Tensor
    """bool [N]; True where the entry is a trained token, False for the markers that stand behind a truncated
    trajectory's next observation, where only a critic's value is read."""
    step_index: torch.Tensor
    """int32 [N]; which step of its trajectory sampled the token; -1 where loss_mask is False."""
    trajectory_index: torch.Tensor
    """int32 [N]; row of the entry's trajectory in the batch; -1 for a padding row's entry."""
    sample_index: torch.Tensor
    """int64 [N]; number of the entry's sample among those of the row that have entries, so below N."""
    advantages: torch.Tensor
    """float32 [N]; 0 where loss_mask is False, and everywhere until credit was given."""
    loss_weights: torch.Tensor
    """float32 [N]; factor of the entry's loss term before the division by the batch's denominator; 0 where masked."""
    rollout_logprobs: torch.Tensor
    """float32 [N]; the engine's; 0 where loss_mask is False."""
    old_logprobs: torch.Tensor | None = None
    """float32 [N]; the trainer's before the update; None until computed."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [N]; the reference model's; None until computed."""
    teacher_top_ids: torch.Tensor | None = None
    """int32 [R, k]: the k tokens that the teacher finds likeliest behind each token that is asked; None until asked
    for. It stays on the ranks that found it, those of the last pipeline stage."""
    teacher_top_logprobs: torch.Tensor | None = None
    """float32 [R, k]; the teacher's of teacher_top_ids."""
    old_values: torch.Tensor | None = None
    """float32 [N]; the critic's before its update, of the state before each entry's token; None until computed."""
    value_targets: torch.Tensor | None = None
    """float32 [N]; what the critic is trained towards; None until computed."""
    value_weights: torch.Tensor | None = None
    """float32 [N]; factor of each value's loss term, 0 where the critic is not trained; None until computed."""
    num_padding: int = 0
    """Padding tokens at the row's end."""
    num_unshared: int = 0
    """What the samples' lengths add up to: the row's tokens, without padding, had nothing been shared."""
    trained_index: np.ndarray | None = None
    """int64, one entry per trained token of the row, in order: which of its trajectory's trained tokens it is. Stays
    where the row was packed."""

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCredit:
    """The credit of one packed row: what PackedMicrobatch's fields of the same names hold."""

    advantages: torch.Tensor
    value_targets: torch.Tensor | None
    value_weights: torch.Tensor | None

    @classmethod
    def on_row(cls, row: PackedMicrobatch, credit: Credit, token_index: np.ndarray) -> "RowCredit":
        """Put the credit of the row's trained tokens where they are; `token_index` says which of the batch's tokens
        each of them is."""
        values = [credit.advantages]
        if credit.value_targets is not None:
            mask = credit.value_mask
            values += [credit.value_targets, np.ones(len(credit.value_targets)) if mask is None else mask]
        columns = [torch.zeros(len(row.loss_mask), dtype=torch.float32) for _ in values]
        for target, of_tokens in zip(columns, values, strict=True):
            target[row.loss_mask] = torch.from_numpy(of_tokens[token_index]).to(torch.float32)
        return cls(
            advantages=columns[0],
            value_targets=columns[1] if len(columns) > 1 else None,
            value_weights=columns[2] if len(columns) > 1 else None,
        )

    def put_on(self, row: PackedMicrobatch) -> PackedMicrobatch:
        """The row with this credit."""
        return replace(
            row, advantages=self.advantages, value_targets=self.value_targets, value_weights=self.value_weights
        )


def pack_row(samples: Sequence[Sample], *, pad_multiple: int = 1, share: bool = True) -> PackedMicrobatch:
    """The samples as one row, padded at its end to a multiple of `pad_multiple` (sequence parallelism wants the
    tensor-parallel size). With `share` beginnings that samples have in common are laid out once.
    """
    tree = build_tree([sample.token_ids for sample in samples], share=share)
    num_padding = -tree.num_tokens % pad_multiple if samples else pad_multiple
    num_tokens = tree.num_tokens + num_padding
    # An entry for each token that has a log-prob or a value: never a sample's first one, which follows nothing.
    places = [np.flatnonzero(sample.value_mask) for sample in samples]
    before = _column([path[place - 1] for path, place in zip(tree.paths, places, strict=True)], np.int64, 0)
    asked, asked_index = np.unique(before, return_inverse=True)

    def entries(name: str, dtype: type, masked: float) -> torch.Tensor:
        of_samples = [getattr(sample, name)[place] for sample, place in zip(samples, places, strict=True)]
        return torch.from_numpy(_column(of_samples, dtype, masked))

    def numbers(of_samples: Sequence[int], dtype: type, masked: int) -> torch.Tensor:
        repeated = [np.full(len(place), number) for number, place in zip(of_samples, places, strict=True)]
        return torch.from_numpy(_column(repeated, dtype, masked))

    last_node = None if num_padding else -1
    return PackedMicrobatch(
        token_ids=torch.from_numpy(np.pad(tree.token_ids, (0, num_padding))),
        position_ids=torch.from_numpy(np.concatenate([tree.position_ids, np.arange(num_padding)])),
        node_bounds=torch.from_numpy(np.append(tree.node_bounds, num_tokens)[:last_node]).int(),
        node_parents=torch.from_numpy(np.append(tree.node_parents, -1)[:last_node]).int(),
        asked=torch.from_numpy(asked),
        asked_index=torch.from_numpy(asked_index),
        target_ids=entries("token_ids", np.int64, 0),
        loss_mask=entries("loss_mask", np.bool_, False),
        step_index=entries("step_index", np.int32, -1),
        trajectory_index=numbers([sample.trajectory_index for sample in samples], np.int32, -1),
        sample_index=numbers((np.cumsum([len(place) > 0 for place in places]) - 1).tolist(), np.int64, 0),
        advantages=torch.zeros(len(before), dtype=torch.float32),
        loss_weights=entries("loss_weights", np.float32, 0),
        rollout_logprobs=entries("rollout_logprobs", np.float32, 0),
        num_padding=num_padding,
        num_unshared=sum(sample.num_tokens for sample in samples),
        trained_index=np.concatenate(
            [np.zeros(0, dtype=np.int64), *(s.first_trained + np.arange(s.loss_mask.sum()) for s in samples)]
        ),
    )


def _column(parts: Sequence[np.ndarray], dtype: type, masked: float) -> np.ndarray:
    """The parts one after another; one masked entry where they hold none."""
    column = np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)
    return column if len(column) else np.full(1, masked, dtype=dtype)


def plan_microbatches(
    samples: Sequence[Sample],
    *,
    tokens_per_row: int,
    data_parallel_size: int,
    pad_multiple: int = 1,
    families: Sequence[int] | np.ndarray | None = None,
    share: bool = True,
    pair_cost: float = 0.0,
) -> list[list[PackedMicrobatch]]:
    """Packed rows for each data rank: `data_parallel_size` lists of one and the same length, at least 1.

    `families` numbers the samples' prompt groups, for planning. Without `share` samples are laid out apart. See
    `row_plan.plan_rows` and `pack_row` for the rest. A rank without samples gets a row of padding, so that it takes
    part in every collective.
    """
    plan = plan_rows(
        [sample.token_ids for sample in samples],
        families if share else None,
        tokens_per_row=tokens_per_row,
        data_parallel_size=data_parallel_size,
        pair_cost=pair_cost,
    )
    return [
        [pack_row([samples[index] for index in row], pad_multiple=pad_multiple, share=share) for row in rank]
        for rank in plan.rows
    ]


def row_cost(row: PackedMicrobatch, *, pair_cost: float) -> float:
    """What the row costs, in tokens: see `row_plan.plan_rows`."""
    return row.num_tokens + pair_cost * float((row.position_ids + 1).sum())
