"""What a policy loss sees, and masked sums over it.

A loss is a pure function of one microbatch that gives one term per token; the objective adds the terms up, weighted,
and the caller divides by a denominator that is the same for the whole batch. So the gradient cannot depend on how the
batch was split.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: the clip decides long before, and inf times a zero gradient would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What one microbatch's T entries (PackedMicrobatch) hold, all float32 [T] on one device.

    The objectives put 0 where masked (`zero_masked`) before a loss sees anything, so no loss meets a NaN there.
    """

    mask: torch.Tensor
    """bool [T]; True where the token is trained."""
    weights: torch.Tensor
    """Factor of each token's term."""
    advantages: torch.Tensor
    logprobs: torch.Tensor
    """Of the policy that is trained; carries the gradient."""
    old_logprobs: torch.Tensor
    """Denominator of the ratio; no gradient."""
    rollout_logprobs: torch.Tensor
    """The engine's; no gradient."""
    entropy: torch.Tensor
    sequence_ids: torch.Tensor
    """int64 [T]; number of the token sequence (packed sample) in the microbatch, below T; no sequence is split over
    microbatches."""
    step_ids: torch.Tensor
    """int64 [T]; number of the step in the microbatch, below T; all trained tokens of a step, and nothing else, share
    one. What masked tokens have here means nothing."""
    reference_logprobs: torch.Tensor | None = None
    """Of the frozen reference model; None without a KL term."""
    divergence: torch.Tensor | None = None
    """From the teacher's distribution in the place of each token; carries a gradient of its own; None without a teacher
    that is asked for its likeliest tokens."""


PER_TOKEN_VALUES = (
    "weights", "advantages", "logprobs", "old_logprobs", "rollout_logprobs", "entropy", "reference_logprobs",
    "divergence",
)  # fmt: skip
"""Fields of LossInputs that `zero_masked` puts 0 into."""


@dataclass(frozen=True, slots=True)
class MetricTerms:
    """What one microbatch contributes to the batch's metrics; scalars, adding up exactly over any split."""

    sums: dict[str, torch.Tensor]
    """What each of them is divided by in the end, `metrics.batch_metrics` says."""
    maxima: dict[str, torch.Tensor]
    """Largest value over trained tokens; 0 where there is none."""


class PolicyLoss(Protocol):
    """(inputs, **options) -> the loss term of every token, [T] with gradient, and metric sums over trained tokens."""

    def __call__(self, inputs: LossInputs, **options: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


def select(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` where trained and 0 elsewhere. A NaN at a masked position is gone, forward and backward."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def weighted_sum(inputs: LossInputs, terms: torch.Tensor) -> torch.Tensor:
    """Scalar: sum of weights * terms over trained tokens."""
    return (inputs.weights * select(inputs.mask, terms)).sum()


def zero_masked(inputs: LossInputs) -> LossInputs:
    """The same with 0 at every masked position. A NaN there is gone before any arithmetic: in the backward pass even
    a factor of 0 would spread it."""
    values = {name: getattr(inputs, name) for name in PER_TOKEN_VALUES}
    return replace(inputs, **{name: select(inputs.mask, value) for name, value in values.items() if value is not None})


def token_ratio(inputs: LossInputs) -> torch.Tensor:
    """[T]: policy / old policy of each token, with gradient."""
    return (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def totals(ids: torch.Tensor, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[T]: at index i the sum of `values` over the trained tokens with id i; 0 where there is none. Differentiable.

    `ids` are `inputs.sequence_ids` or `inputs.step_ids`. Added up in float64: the order differs between GPU runs.
    """
    summed = torch.zeros(len(ids), dtype=torch.float64, device=values.device).index_add(
        0, torch.where(inputs.mask, ids, 0), select(inputs.mask, values).to(torch.float64)
    )
    return summed.to(values.dtype)


def sum_over(ids: torch.Tensor, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[T]: at each trained token the sum of `values` over the trained tokens with the same id; 0 where masked."""
    return select(inputs.mask, totals(ids, inputs, values)[torch.where(inputs.mask, ids, 0)])


def mean_over(ids: torch.Tensor, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[T]: at each trained token the mean of `values` over the trained tokens with the same id; 0 where masked."""
    counts = sum_over(ids, inputs, torch.ones_like(values))
    return sum_over(ids, inputs, values) / counts.clamp(min=1.0)
