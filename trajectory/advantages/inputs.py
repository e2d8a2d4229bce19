"""What an advantage estimator sees: plain arrays, one entry per step or per trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajectory.steps import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """N steps of M trajectories of the batch, in order: a trajectory's steps are neighbours."""

    step_rewards: np.ndarray
    """float64 [N]; the trajectory's outcome reward is in its last step's, once."""
    step_trajectory: np.ndarray
    """int64 [N]; the trajectory of each step, 0..M-1."""
    step_terminated: np.ndarray
    """bool [N]; the return ends here."""
    step_truncated: np.ndarray
    """bool [N]; the return was cut here by a limit."""
    step_num_tokens: np.ndarray
    """int64 [N]; trained tokens of each step."""
    trajectory_group: np.ndarray
    """int64 [M]; the group (prompt) of each trajectory."""

    def returns(self) -> np.ndarray:
        """float64 [M]: the undiscounted sum of each trajectory's rewards."""
        return np.bincount(self.step_trajectory, weights=self.step_rewards, minlength=len(self.trajectory_group))


def estimator_inputs(groups: Sequence[TrajectoryGroup]) -> EstimatorInputs:
    """The arrays of all trajectories of `groups`, in order. Every trajectory needs at least one step."""
    trajectories = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    rewards, owner, terminated, truncated, num_tokens = [], [], [], [], []
    for row, (_, trajectory) in enumerate(trajectories):
        for step in trajectory.steps:
            rewards.append(step.reward)
            owner.append(row)
            terminated.append(step.terminated)
            truncated.append(step.truncated)
            num_tokens.append(step.num_trained_tokens)
        rewards[-1] += trajectory.outcome_reward
    return EstimatorInputs(
        step_rewards=np.array(rewards, dtype=np.float64),
        step_trajectory=np.array(owner, dtype=np.int64),
        step_terminated=np.array(terminated, dtype=bool),
        step_truncated=np.array(truncated, dtype=bool),
        step_num_tokens=np.array(num_tokens, dtype=np.int64),
        trajectory_group=np.array([index for index, _ in trajectories], dtype=np.int64),
    )
