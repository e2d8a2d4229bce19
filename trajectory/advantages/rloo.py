"""RLOO (Ahmadian et al. 2024, Back to Basics; Kool et al. 2019): the return against the mean of the group's others.

    A = R - mean of the n - 1 other returns = n / (n - 1) * (R - mean_G)

A trajectory that is alone in its group has no baseline and gets 0, as a group of equal returns does.
"""

import numpy as np

from trajectory.advantages.groups import centre
from trajectory.advantages.inputs import EstimatorInputs


def rloo(inputs: EstimatorInputs) -> np.ndarray:
    """float64 [N]: the advantage of every step."""
    group = inputs.trajectory_group
    size = np.bincount(group)[group]
    return (centre(inputs.returns(), group) * size / np.maximum(size - 1, 1))[inputs.step_trajectory]
