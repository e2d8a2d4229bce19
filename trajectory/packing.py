"""Packed rows: the record that the trainer's forward and backward pass consumes, and the plan that fills it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trajectory.advantages.inputs import Credit
from trajectory.row_plan import assign_rows
from trajectory.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatch:
    """One row of T tokens. Each per-token value sits at the index of the token it is about.

    The shift by one (the logits at t-1 predict token t) happens only in parallel/logprobs.py, and for values in
    parallel/value_head.py. All tensors are on CPU. Padding is the row's last segment; it is never trained.
    """

    token_ids: torch.Tensor
    """int64 [T]; 0 in the padding."""
    position_ids: torch.Tensor
    """int64 [T]; restarts at 0 in every segment."""
    cu_seqlens: torch.Tensor
    """int32 [S+1]; segment boundaries, first 0, last T. The padding, if any, is the last segment."""
    loss_mask: torch.Tensor
    """bool [T]; True where the token is trained. Never True on a segment's first token."""
    step_index: torch.Tensor
    """int32 [T]; which step of its trajectory sampled the token; -1 where loss_mask is False."""
    trajectory_index: torch.Tensor
    """int32 [T]; row of the token's trajectory in the batch; -1 in the padding."""
    advantages: torch.Tensor
    """float32 [T]; 0 where loss_mask is False, and everywhere until credit was given."""
    loss_weights: torch.Tensor
    """float32 [T]; factor of the token's loss term before the division by the batch's denominator; 0 where masked."""
    rollout_logprobs: torch.Tensor
    """float32 [T]; the engine's; 0 where loss_mask is False."""
    old_logprobs: torch.Tensor | None = None
    """float32 [T]; the trainer's before the update; 0 where masked; None until computed."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [T]; the reference model's; 0 where masked; None until computed."""
    teacher_top_ids: torch.Tensor | None = None
    """int32 [N, k], N trained tokens in order: the teacher's k likeliest tokens in the place of each; None until asked
    for. It stays on the ranks that found it, those of the last pipeline stage."""
    teacher_top_logprobs: torch.Tensor | None = None
    """float32 [N, k]; the teacher's of teacher_top_ids."""
    value_mask: torch.Tensor | None = None
    """bool [T]; True where a critic's value is asked for: the value at index t is that of the state before token t,
    read at t - 1 like the token's log-prob. True at the trained tokens and at the marker that stands behind a
    truncated trajectory's next observation; None without a critic."""
    old_values: torch.Tensor | None = None
    """float32 [T]; the critic's before its update; 0 where value_mask is False; None until computed."""
    value_targets: torch.Tensor | None = None
    """float32 [T]; what the critic is trained towards; None until computed."""
    value_weights: torch.Tensor | None = None
    """float32 [T]; factor of each value's loss term, 0 where the critic is not trained; None until computed."""
    num_padding: int = 0
    """Padding tokens at the row's end."""
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
        rows = [torch.zeros(row.num_tokens, dtype=torch.float32) for _ in values]
        for target, of_tokens in zip(rows, values, strict=True):
            target[row.loss_mask] = torch.from_numpy(of_tokens[token_index]).to(torch.float32)
        return cls(
            advantages=rows[0],
            value_targets=rows[1] if len(rows) > 1 else None,
            value_weights=rows[2] if len(rows) > 1 else None,
        )

    def put_on(self, row: PackedMicrobatch) -> PackedMicrobatch:
        """The row with this credit."""
        return replace(
            row, advantages=self.advantages, value_targets=self.value_targets, value_weights=self.value_weights
        )


def plan_microbatches(
    samples: Sequence[Sample], *, tokens_per_row: int, data_parallel_size: int, pad_multiple: int = 1
) -> list[list[PackedMicrobatch]]:
    """Packed rows for each data rank: `data_parallel_size` lists of one and the same length, at least 1.

    Rows are padded at their end to a multiple of `pad_multiple` (sequence parallelism wants the tensor-parallel
    size). A rank without samples gets a row of padding, so that it takes part in every collective.
    """
    rows = assign_rows(
        [sample.num_tokens for sample in samples],
        tokens_per_row=tokens_per_row,
        data_parallel_size=data_parallel_size,
    )
    # Neighbouring rows have similar lengths, so the data ranks finish each microbatch together.
    rows.sort(key=lambda row: -sum(samples[index].num_tokens for index in row))
    packed = [_pack([samples[index] for index in row], pad_multiple) for row in rows]
    return [packed[rank::data_parallel_size] for rank in range(data_parallel_size)]


def _pack(samples: Sequence[Sample], pad_multiple: int) -> PackedMicrobatch:
    used = sum(sample.num_tokens for sample in samples)
    num_padding = -used % pad_multiple if used else pad_multiple
    lengths = [sample.num_tokens for sample in samples] + ([num_padding] if num_padding else [])
    return PackedMicrobatch(
        token_ids=_row([s.token_ids for s in samples], num_padding, torch.int64, 0),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32),
        loss_mask=_row([s.loss_mask for s in samples], num_padding, torch.bool, False),
        step_index=_row([s.step_index for s in samples], num_padding, torch.int32, -1),
        trajectory_index=_row(
            [np.full(s.num_tokens, s.trajectory_index) for s in samples], num_padding, torch.int32, -1
        ),
        advantages=torch.zeros(used + num_padding, dtype=torch.float32),
        loss_weights=_row([s.loss_weights for s in samples], num_padding, torch.float32, 0),
        rollout_logprobs=_row([s.rollout_logprobs for s in samples], num_padding, torch.float32, 0),
        value_mask=_row([s.value_mask for s in samples], num_padding, torch.bool, False),
        num_padding=num_padding,
        trained_index=np.concatenate(
            [np.zeros(0, dtype=np.int64), *(s.first_trained + np.arange(s.loss_mask.sum()) for s in samples)]
        ),
    )


def _row(parts: list[np.ndarray], num_padding: int, dtype: torch.dtype, padding: float) -> torch.Tensor:
    tail = torch.full((num_padding,), padding, dtype=dtype)
    return torch.cat([*(torch.from_numpy(part).to(dtype) for part in parts), tail])
