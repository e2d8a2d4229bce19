"""GRPO (Shao et al. 2024, DeepSeekMath): the return against the group's, one scalar for every step of a trajectory.

    A = (R - mean_G) / (std_G + eps)          `std: false` leaves out the division (Dr. GRPO, Liu et al. 2025)

std_G is the population standard deviation over the group's trajectories, one vote each however many samples a
trajectory was split into. A group of equal returns gives exactly 0, whatever rounding says.
"""

import numpy as np

from trajectory.advantages.groups import normalise
from trajectory.advantages.inputs import EstimatorInputs


def grpo(inputs: EstimatorInputs, *, std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """float64 [N]: the advantage of every step."""
    return normalise(inputs.returns(), inputs.trajectory_group, std=std, eps=eps)[inputs.step_trajectory]
