"""Sums that run backwards through episodes, for all trajectories of the batch at once."""

import numpy as np

from trajectory.advantages.inputs import EstimatorInputs
from trajectory.advantages.needed import needed

CRITIC = "set algorithm.critic, the value model that gives it"


def discounted_sums(values: np.ndarray, discounts: np.ndarray | float, owner: np.ndarray) -> np.ndarray:
    """float64 [L]: y_i = x_i + d_i * y_{i+1} within each run of equal `owner`, where nothing follows the run's end.

    `discounts` is one number or one per value. Work is vectorised over the runs, the longest ones first, and goes
    from each run's end to its start.
    """
    ends = np.append(np.flatnonzero(owner[1:] != owner[:-1]), len(owner) - 1)
    lengths = np.diff(ends, prepend=-1)
    longest_first = np.argsort(-lengths, kind="stable")
    ends, lengths = ends[longest_first], lengths[longest_first]
    num_left = np.searchsorted(-lengths, -np.arange(lengths[0]))  # runs that have more than 0, 1, 2... values
    discounts = np.broadcast_to(np.asarray(discounts, dtype=np.float64), values.shape)
    sums = np.empty(len(values))
    following = np.zeros(len(ends))
    for back, left in enumerate(num_left.tolist()):
        at = ends[:left] - back
        following = values[at] + discounts[at] * following[:left]
        sums[at] = following
    return sums


def generalised_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    owner: np.ndarray,
    *,
    last_values: np.ndarray,
    gamma: np.ndarray | float,
    lam: np.ndarray | float,
) -> np.ndarray:
    """float64 [L]: generalised advantage estimates (Schulman et al. 2016) of the L decisions of the batch.

        delta_i = r_i + gamma_i V_{i+1} - V_i          A_i = delta_i + gamma_i lam_i A_{i+1}

    `owner` [L] is the trajectory of each decision, `last_values` [M] the value that follows each trajectory's last.
    """
    following = np.append(values[1:], 0.0)
    ends = np.append(np.flatnonzero(owner[1:] != owner[:-1]), len(owner) - 1)
    following[ends] = last_values[owner[ends]]
    return discounted_sums(rewards + gamma * following - values, np.multiply(gamma, lam), owner)


def critic_values(inputs: EstimatorInputs) -> tuple[np.ndarray, np.ndarray]:
    """float64 [K] and [M]: the value before each trained token, and the one after each trajectory.

    The latter is the critic's of the next observation where the last step is truncated, and 0 where it is terminated,
    or is neither: then nothing says that the episode would have gone on. Raises ValueError without a critic's values.
    """
    values = needed(inputs.token_values, "token_values", CRITIC)
    num_trajectories = len(inputs.trajectory_group)
    last_step = np.searchsorted(inputs.step_trajectory, np.arange(num_trajectories), side="right") - 1
    cut = inputs.step_truncated[last_step] & ~inputs.step_terminated[last_step]
    if not cut.any():
        return values, np.zeros(num_trajectories)
    return values, np.where(cut, needed(inputs.bootstrap_values, "bootstrap_values", CRITIC), 0.0)
