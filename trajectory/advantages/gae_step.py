"""GAE (Schulman et al. 2016) with the step as the unit of time: one value and one advantage per step.

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}          target_t = A_t + V_t

V_t is the critic's value at the step's first trained token, what is known before anything of the action is. After the
last step stands 0 where it is terminated and the value of the next observation where a limit cut the episode.

A step without trained tokens is no decision of the policy and has no value: it is no unit of time, and its reward is
that of the step before it which has some (before the first such step, of that one), as in `token_rewards`.
"""

import numpy as np

from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.recursions import critic_values, generalised_advantages


def gae_step(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Credit:
    """A step's advantage on each of its tokens, a target for the critic at the first; 0 and masked at the others.

    gamma and lam are per step. Raises ValueError without a critic's values.
    """
    token_values, last_values = critic_values(inputs)
    acting = inputs.step_num_tokens > 0
    owner = inputs.step_trajectory[acting]
    first_token = np.cumsum(inputs.step_num_tokens)[acting] - inputs.step_num_tokens[acting]
    first_acting = np.searchsorted(owner, inputs.step_trajectory)
    paid_step = np.maximum(np.cumsum(acting) - 1, first_acting)
    rewards = np.bincount(paid_step, weights=inputs.step_rewards, minlength=len(owner))
    values = token_values[first_token]
    advantages = generalised_advantages(rewards, values, owner, last_values=last_values, gamma=gamma, lam=lam)
    targets, mask = np.zeros(inputs.num_tokens), np.zeros(inputs.num_tokens, dtype=bool)
    targets[first_token], mask[first_token] = advantages + values, True
    return Credit(
        advantages=np.repeat(advantages, inputs.step_num_tokens[acting]), value_targets=targets, value_mask=mask
    )
