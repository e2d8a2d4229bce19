"""The whole reinforcement-learning objective of one microbatch: policy loss + KL penalty - entropy bonus."""

import torch

from megatron_agent.config import AlgorithmConfig
from parallel.losses.base import LossInputs, select, weighted_sum
from parallel.losses.kl import KL_ESTIMATORS
from parallel.losses.registry import get_policy_loss


def rl_objective(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss sum (scalar with gradient) and metric sums.

    The sums `loss` and `policy_loss` are weighted like the loss and want the batch's denominator; all
    others are plain sums over trained tokens and want the number of tokens.
    Raises ValueError where the KL term is on but the microbatch carries no reference log-probs.
    """
    loss, sums = get_policy_loss(algorithm.loss.name)(inputs, algorithm.loss)
    sums["policy_loss"] = loss.detach()
    sums["entropy"] = select(inputs.mask, inputs.entropy.detach()).sum()
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * weighted_sum(inputs, inputs.entropy)
    if algorithm.kl.coef > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("algorithm.kl.coef > 0 needs reference_logprobs on every microbatch; score them first")
        kl = KL_ESTIMATORS[algorithm.kl.estimator](inputs.logprobs, inputs.reference_logprobs)
        loss = loss + algorithm.kl.coef * weighted_sum(inputs, kl)
        sums["kl"] = select(inputs.mask, kl.detach()).sum()
    sums["loss"] = loss.detach()
    return loss, sums
