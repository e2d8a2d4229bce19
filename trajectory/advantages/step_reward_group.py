"""Process rewards against the group's (Shao et al. 2024, DeepSeekMath, process supervision).

    r'_k = (r_k - mean) / (std + eps)          A_t = sum over k >= t of r'_k

Mean and population standard deviation are over all step rewards of all trajectories of the group; the outcome reward
is part of the last step's. `std: false` leaves out the division. A group of equal step rewards gives exactly 0.
"""

import numpy as np

from trajectory.advantages.groups import normalise
from trajectory.advantages.inputs import EstimatorInputs
from trajectory.advantages.recursions import discounted_sums


def step_reward_group(inputs: EstimatorInputs, *, std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """float64 [N]: the advantage of every step."""
    step_group = inputs.trajectory_group[inputs.step_trajectory]
    rewards = normalise(inputs.step_rewards, step_group, std=std, eps=eps)
    return discounted_sums(rewards, 1.0, inputs.step_trajectory)
