"""REINFORCE++ (Hu et al. 2025): discounted returns of single tokens, whitened over the batch; no critic, no group.

    A_i = (G_i - mean) / (std + eps)          G_i = sum over trained tokens j >= i of gamma^(j-i) r_j

i and j count the trained tokens of the whole episode, so that the return carries across steps and past what the
environment said in between. A step's reward is that of its last trained token, penalties are each token's own. Mean
and population standard deviation are over all trained tokens of the batch.

The variant with a baseline replaces the task's part of the return by R - mean_G, the same on every token of the
episode and not discounted; only token penalties are. R and mean_G are without them.
"""

import numpy as np

from trajectory.advantages.groups import centre, whiten
from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.recursions import discounted_sums


def reinforce_plus_plus(inputs: EstimatorInputs, *, gamma: float = 1.0, eps: float = 1e-8) -> Credit:
    """An advantage for every trained token; gamma discounts from one trained token to the next."""
    returns = discounted_sums(inputs.token_rewards(), gamma, inputs.step_trajectory[inputs.token_step()])
    return Credit(advantages=whiten(returns, eps))


def reinforce_plus_plus_baseline(inputs: EstimatorInputs, *, gamma: float = 1.0, eps: float = 1e-8) -> Credit:
    """An advantage for every trained token; gamma discounts token penalties, which there may be none of."""
    owner = inputs.step_trajectory[inputs.token_step()]
    returns, penalties = inputs.returns(), inputs.token_penalties
    if penalties is None:
        return Credit(advantages=whiten(centre(returns, inputs.trajectory_group)[owner], eps))
    returns = returns - np.bincount(owner, weights=penalties, minlength=len(returns))
    advantages = centre(returns, inputs.trajectory_group)[owner] + discounted_sums(penalties, gamma, owner)
    return Credit(advantages=whiten(advantages, eps))
