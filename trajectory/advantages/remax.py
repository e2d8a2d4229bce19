"""ReMax (Li et al. 2024): the return against that of an episode of the same prompt played greedily.

    A = R - R_greedy

The baseline is of the policy itself and depends on the prompt only, so one sampled episode of a prompt is enough.
Token penalties are in R and not in R_greedy, which is not sampled from the policy.
"""

import numpy as np

from trajectory.advantages.inputs import EstimatorInputs
from trajectory.advantages.needed import needed


def remax(inputs: EstimatorInputs) -> np.ndarray:
    """float64 [N]: the advantage of every step. Raises ValueError without greedy returns."""
    greedy = needed(
        inputs.greedy_returns,
        "greedy_returns",
        "every prompt needs a greedy episode, which is played where algorithm.advantage.name is remax",
    )
    return (inputs.returns() - greedy[inputs.trajectory_group])[inputs.step_trajectory]
