"""Bi-level GAE: one discount and lambda between the tokens of an action, another from one step to the next.

    delta_i = r_i + g_i V_{i+1} - V_i          A_i = delta_i + g_i l_i A_{i+1}          target_i = A_i + V_i
    (g_i, l_i) = (gamma_step, lam_step) where token i is the last trained one of its step, else (gamma, lam)

i counts the trained tokens of the whole episode. A step's reward is that of its last trained token. The last token of
the episode ends its step: the value of the next observation, where a limit cut the episode, is discounted by
gamma_step. Long actions then do not discount what later steps bring, and credit of a step can decay over steps only.

After the bi-level GAE of VAGEN (Wang et al. 2025), as one recursion. With equal pairs it is gae_token; with gamma and
lam 1 the advantage of each step's first token is that of gae_step with gamma_step and lam_step.
"""

import numpy as np

from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.recursions import critic_values, generalised_advantages


def gae_turn(
    inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0, gamma_step: float = 1.0, lam_step: float = 1.0
) -> Credit:
    """An advantage and a target for the critic at every trained token. Raises ValueError without a critic's values."""
    values, last_values = critic_values(inputs)
    step = inputs.token_step()
    ends_step = np.append(step[1:] != step[:-1], True)
    advantages = generalised_advantages(
        inputs.token_rewards(),
        values,
        inputs.step_trajectory[step],
        last_values=last_values,
        gamma=np.where(ends_step, gamma_step, gamma),
        lam=np.where(ends_step, lam_step, lam),
    )
    return Credit(advantages=advantages, value_targets=advantages + values)
