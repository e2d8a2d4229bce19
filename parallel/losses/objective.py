"""The whole objective of one microbatch: policy loss + KL penalty + divergence from a teacher - entropy bonus, or the
supervised one."""

import torch

from megatron_agent.config import AlgorithmConfig
from parallel.losses.base import LossInputs, MetricTerms, select, token_ratio, weighted_sum, zero_masked
from parallel.losses.correction import correction_weights
from parallel.losses.kl import k3, kl_term
from parallel.losses.registry import policy_loss
from parallel.losses.sft import negative_log_likelihood


def rl_objective(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, MetricTerms]:
    """Loss sum (scalar with gradient) and what it adds to the metrics.

    The off-policy correction weighs the policy loss only; all other terms are of all trained tokens. Raises ValueError
    where a term is on but the microbatch does not carry what it needs.
    """
    inputs = zero_masked(inputs)
    terms, sums = policy_loss(algorithm.loss)(inputs)
    maxima: dict[str, torch.Tensor] = {}
    if algorithm.correction.is_on():
        assert algorithm.old_logprobs == "recompute", "with the rollout's log-probs as old ones all weights are 1"
        weights, corrected = correction_weights(inputs, algorithm.correction)
        terms = terms * weights
        sums, maxima = sums | corrected.sums, corrected.maxima
    loss = weighted_sum(inputs, terms)
    current = inputs.logprobs.detach()
    ratio = select(inputs.mask, token_ratio(inputs).detach())
    sums = sums | {
        "policy_loss": loss.detach(),
        "entropy": select(inputs.mask, inputs.entropy.detach()).sum(),
        "ratio_mean": ratio.sum(),
        "approx_kl": select(inputs.mask, k3(inputs.old_logprobs, current)).sum(),
        "num_tokens": inputs.mask.sum(),
    }
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * weighted_sum(inputs, inputs.entropy)
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "loss":
        if inputs.reference_logprobs is None:
            raise ValueError("algorithm.kl.coef > 0 needs reference_logprobs on every microbatch; score them first")
        kl = kl_term(
            inputs.logprobs,
            inputs.reference_logprobs,
            estimator=algorithm.kl.estimator,
            gradient=algorithm.kl.gradient,
        )
        loss = loss + algorithm.kl.coef * weighted_sum(inputs, kl)
        sums["kl"] = select(inputs.mask, kl.detach()).sum()
    if algorithm.teacher and algorithm.teacher.top_k > 0:
        if inputs.divergence is None:
            raise ValueError("algorithm.teacher.top_k > 0 needs teacher_top_ids on every microbatch; score them first")
        loss = loss + algorithm.teacher.coef * weighted_sum(inputs, inputs.divergence)
        sums["distill"] = select(inputs.mask, inputs.divergence.detach()).sum()
    sums["loss"] = loss.detach()
    return loss, MetricTerms(sums, maxima | {"ratio_max": ratio.max()})


def sft_objective(inputs: LossInputs) -> tuple[torch.Tensor, MetricTerms]:
    """Negative log-likelihood sum (scalar with gradient) and what it adds to the metrics."""
    inputs = zero_masked(inputs)
    loss = negative_log_likelihood(inputs)
    sums = {
        "loss": loss.detach(),
        "entropy": select(inputs.mask, inputs.entropy.detach()).sum(),
        "num_tokens": inputs.mask.sum(),
    }
    return loss, MetricTerms(sums, {})
