"""GRPO (Shao et al. 2024, DeepSeekMath): the return against the group's, one scalar for every step of a trajectory.

    A = (R - mean_G) / (std_G + eps)          `std: false` leaves out the division (Dr. GRPO, Liu et al. 2025)

std_G is the population standard deviation over the group's trajectories, one vote each however many samples a
trajectory was split into. A group of equal returns gives exactly 0, whatever rounding says.
"""

import numpy as np

from trajectory.advantages.inputs import EstimatorInputs

EQUAL_RETURNS = 1e-9
"""Returns whose spread is below this share of their size are equal: 0.1 added up in another order differs by less."""


def grpo(inputs: EstimatorInputs, *, std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """float64 [N]: the advantage of every step."""
    returns, group = inputs.returns(), inputs.trajectory_group
    num_groups = int(group.max()) + 1
    size = np.bincount(group, minlength=num_groups)
    mean = np.bincount(group, weights=returns, minlength=num_groups) / np.maximum(size, 1)
    centred = returns - mean[group]
    scale = np.zeros(num_groups)
    np.maximum.at(scale, group, np.abs(returns))
    spread = np.zeros(num_groups)
    np.maximum.at(spread, group, np.abs(centred))
    centred[(spread <= EQUAL_RETURNS * np.maximum(scale, 1.0))[group]] = 0.0
    if std:
        deviation = np.sqrt(np.bincount(group, weights=centred**2, minlength=num_groups) / np.maximum(size, 1))
        centred = centred / (deviation[group] + eps)
    return centred[inputs.step_trajectory]
