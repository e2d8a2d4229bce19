"""Per-token estimators of KL(policy || reference) from samples of the policy.

Source: Schulman 2020, "Approximating KL divergence".

With d = log p - log p_ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.
As a *loss*, k1 has zero expected gradient on samples of the policy itself; k2 has the gradient of the KL.
"""

from collections.abc import Callable

import torch

from parallel.losses.base import MAX_LOG_RATIO


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Unbiased; a single token's value can be negative."""
    return logprobs - reference_logprobs


def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Biased, low variance, never negative."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Unbiased and never negative."""
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.expm1() - difference


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
