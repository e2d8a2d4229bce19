"""The whole objective of one microbatch: policy loss + KL penalty - entropy bonus, or the supervised one."""

import torch

from megatron_agent.config import AlgorithmConfig
from parallel.losses.base import MAX_LOG_RATIO, LossInputs, MetricTerms, select, weighted_sum
from parallel.losses.kl import KL_ESTIMATORS
from parallel.losses.registry import get_policy_loss
from parallel.losses.sft import negative_log_likelihood


def rl_objective(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, MetricTerms]:
    """Loss sum (scalar with gradient) and what it adds to the metrics.

    Raises ValueError where the KL term is on but the microbatch carries no reference log-probs.
    """
    loss, sums = get_policy_loss(algorithm.loss.name)(inputs, algorithm.loss)
    ratio = (inputs.logprobs.detach() - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = select(inputs.mask, ratio)
    sums |= {
        "policy_loss": loss.detach(),
        "entropy": select(inputs.mask, inputs.entropy.detach()).sum(),
        "ratio_mean": ratio.sum(),
        "num_tokens": inputs.mask.sum(),
    }
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * weighted_sum(inputs, inputs.entropy)
    if algorithm.kl.coef > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("algorithm.kl.coef > 0 needs reference_logprobs on every microbatch; score them first")
        kl = KL_ESTIMATORS[algorithm.kl.estimator](inputs.logprobs, inputs.reference_logprobs)
        loss = loss + algorithm.kl.coef * weighted_sum(inputs, kl)
        sums["kl"] = select(inputs.mask, kl.detach()).sum()
    sums["loss"] = loss.detach()
    return loss, MetricTerms(sums, {"ratio_max": ratio.max()})


def sft_objective(inputs: LossInputs) -> tuple[torch.Tensor, MetricTerms]:
    """Negative log-likelihood sum (scalar with gradient) and what it adds to the metrics."""
    loss = negative_log_likelihood(inputs)
    sums = {
        "loss": loss.detach(),
        "entropy": select(inputs.mask, inputs.entropy.detach()).sum(),
        "num_tokens": inputs.mask.sum(),
    }
    return loss, MetricTerms(sums, {})
