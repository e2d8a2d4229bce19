"""Per-token estimators of KL(policy || reference) from samples of the policy.

Source: Schulman 2020, "Approximating KL divergence".

With d = log p - log p_ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.

As *values* k1 and k3 are unbiased. As *losses*, whose gradient is taken through log p at tokens sampled from the
policy itself, they do something else:

    k1   gradient of mean 0: it regularises nothing
    k2   mean gradient of KL(policy || reference): unbiased
    k3   mean gradient of KL(reference || policy): zero at the same place, other elsewhere

`kl_term` with gradient `k2` has the value of the chosen estimator and the gradient of k2.
"""

from collections.abc import Callable

import torch

from parallel.losses.base import MAX_LOG_RATIO

K3_LIMIT = 10.0


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


def k3_clamped(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """k3 within [-10, 10]; no gradient beyond. A few tokens that the policy has all but given up cannot rule."""
    return k3(logprobs, reference_logprobs).clamp(-K3_LIMIT, K3_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_clamped": k3_clamped,
}


def kl_term(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, estimator: str, gradient: str) -> torch.Tensor:
    """[T]: the value of `estimator`, with its own gradient or, where `gradient` is `k2`, with k2's."""
    value = KL_ESTIMATORS[estimator](logprobs, reference_logprobs)
    if gradient != "k2":
        return value
    of_gradient = k2(logprobs, reference_logprobs)
    return value.detach() + (of_gradient - of_gradient.detach())
