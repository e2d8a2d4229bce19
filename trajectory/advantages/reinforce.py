"""REINFORCE (Williams 1992) over steps: what each step's action was followed by.

    A_t = sum over k >= t of gamma^(k-t) r_k  - b

b is 0, or with `baseline: batch` the mean of these discounted returns over all steps of the batch.
"""

from typing import Literal

import numpy as np

from trajectory.advantages.groups import centre
from trajectory.advantages.inputs import EstimatorInputs
from trajectory.advantages.recursions import discounted_sums


def reinforce(
    inputs: EstimatorInputs, *, gamma: float = 1.0, baseline: Literal["none", "batch"] = "none"
) -> np.ndarray:
    """float64 [N]: the advantage of every step; gamma discounts from one step to the next."""
    returns = discounted_sums(inputs.step_rewards, gamma, inputs.step_trajectory)
    return centre(returns, np.zeros(len(returns), dtype=np.int64)) if baseline == "batch" else returns
