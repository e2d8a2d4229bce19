"""GAE (Schulman et al. 2016) with the trained token as the unit of time, carried across the steps of the episode.

    delta_i = r_i + gamma V_{i+1} - V_i          A_i = delta_i + gamma lam A_{i+1}          target_i = A_i + V_i

i counts the trained tokens of the whole episode: the next token after a step's last one is the first of the next step,
so that what the environment said in between takes no time. A step's reward is that of its last trained token,
penalties are each token's own. After the last token stands 0 where the episode is terminated and the value of the next
observation where a limit cut it.
"""

from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.recursions import critic_values, generalised_advantages


def gae_token(inputs: EstimatorInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Credit:
    """An advantage and a target for the critic at every trained token; gamma and lam are per trained token.

    Raises ValueError without a critic's values.
    """
    values, last_values = critic_values(inputs)
    owner = inputs.step_trajectory[inputs.token_step()]
    rewards = inputs.token_rewards()
    advantages = generalised_advantages(rewards, values, owner, last_values=last_values, gamma=gamma, lam=lam)
    return Credit(advantages=advantages, value_targets=advantages + values)
