"""What a policy loss sees, and masked sums over it.

A loss is a pure function of one microbatch that gives one term per token; the objective adds the terms up, weighted,
and the caller divides by a denominator that is the same for the whole batch. So the gradient cannot depend on how the
batch was split.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: the clip decides long before, and inf times a zero gradient would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One microbatch's per-token values, all float32 [T] on one device, finite and 0 where masked."""

    mask: torch.Tensor
    """bool [T]; True where the token is trained."""
    weights: torch.Tensor
    """Factor of each token's term; 0 where masked."""
    advantages: torch.Tensor
    logprobs: torch.Tensor
    """Of the policy that is trained; carries the gradient."""
    old_logprobs: torch.Tensor
    """Denominator of the ratio; no gradient."""
    rollout_logprobs: torch.Tensor
    """The engine's; no gradient."""
    entropy: torch.Tensor
    sequence_ids: torch.Tensor
    """int64 [T]; number of the token sequence (packed segment) in the microbatch, 0..S-1; no sequence is split over
    microbatches."""
    step_ids: torch.Tensor
    """int64 [T]; number of the step in the microbatch, 0..; all trained tokens of a step, and nothing else, share one.
    What masked tokens have here means nothing."""
    reference_logprobs: torch.Tensor | None = None
    """Of the frozen reference model; None without a KL term."""


@dataclass(frozen=True, slots=True)
class MetricTerms:
    """What one microbatch contributes to the batch's metrics; scalars, adding up exactly over any split."""

    sums: dict[str, torch.Tensor]
    """`loss` and `policy_loss` are weighted like the loss and want the batch's denominator; the others are plain
    sums over trained tokens and want the number of tokens."""
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


def mean_over(ids: torch.Tensor, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[T]: at each trained token the mean of `values` over the trained tokens with the same id; 0 where masked.

    `ids` are `inputs.sequence_ids` or `inputs.step_ids`. Differentiable.
    """
    ids = torch.where(inputs.mask, ids, 0)
    size = int(ids.max()) + 1 if ids.numel() else 1
    sums = values.new_zeros(size).index_add(0, ids, select(inputs.mask, values))
    counts = values.new_zeros(size).index_add(0, ids, inputs.mask.to(values.dtype))
    return select(inputs.mask, (sums / counts.clamp(min=1))[ids])
