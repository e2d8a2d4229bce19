"""What an advantage estimator sees and gives: plain arrays, one entry per trained token, step or trajectory."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajectory.steps import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorInputs:
    """K trained tokens of N steps of M trajectories of the batch, in order: a trajectory's steps are neighbours, and a
    step's tokens are."""

    step_rewards: np.ndarray
    """float64 [N]; the trajectory's outcome reward is in its last step's, once, and each step's token penalties are."""
    step_trajectory: np.ndarray
    """int64 [N]; the trajectory of each step, 0..M-1."""
    step_terminated: np.ndarray
    """bool [N]; the return ends here."""
    step_truncated: np.ndarray
    """bool [N]; the return was cut here by a limit."""
    step_num_tokens: np.ndarray
    """int64 [N]; trained tokens of each step; may be 0."""
    trajectory_group: np.ndarray
    """int64 [M]; the group (prompt) of each trajectory, 0..G-1."""
    step_observations: Sequence[str] = ()
    """[N]; what the environment showed before each step, as one text."""
    token_penalties: np.ndarray | None = None
    """float64 [K]; what is added to each token's reward (a KL penalty); None for none."""
    token_values: np.ndarray | None = None
    """float64 [K]; the critic's value of the state before each trained token; None without a critic. That of a step's
    first token is the value of the step: it is read at the last token of the step's prompt."""
    bootstrap_values: np.ndarray | None = None
    """float64 [M]; the critic's value of what the agent would have seen next; 0 where the last step is not
    truncated."""
    old_logprobs: np.ndarray | None = None
    """float64 [K]; the policy's, before the update."""
    reference_logprobs: np.ndarray | None = None
    """float64 [K]; the reference model's, of the same tokens."""
    teacher_logprobs: np.ndarray | None = None
    """float64 [K]; the teacher's, of the same tokens."""
    greedy_returns: np.ndarray | None = None
    """float64 [G]; the return of the greedy episode of each group's prompt."""

    @property
    def num_tokens(self) -> int:
        """K."""
        return int(self.step_num_tokens.sum())

    def returns(self) -> np.ndarray:
        """float64 [M]: the undiscounted sum of each trajectory's rewards."""
        return np.bincount(self.step_trajectory, weights=self.step_rewards, minlength=len(self.trajectory_group))

    def token_step(self) -> np.ndarray:
        """int64 [K]: the step of each trained token."""
        return np.repeat(np.arange(len(self.step_num_tokens)), self.step_num_tokens)

    def on_tokens(self, of_steps: np.ndarray) -> np.ndarray:
        """float64 [K]: each step's value on each of its trained tokens."""
        return np.repeat(np.asarray(of_steps, dtype=np.float64), self.step_num_tokens)

    def token_rewards(self) -> np.ndarray:
        """float64 [K]: each token's penalty, and the rest of its step's reward on the step's last trained token.

        The reward of a step without trained tokens goes to the trained token before it in the trajectory, and where
        there is none to the first one after it.
        """
        rewards = np.zeros(self.num_tokens) if self.token_penalties is None else self.token_penalties.copy()
        own = np.bincount(self.token_step(), weights=rewards, minlength=len(self.step_rewards))
        tokens_before = np.concatenate([[0], np.cumsum(self.step_num_tokens)])
        first_step = np.searchsorted(self.step_trajectory, np.arange(len(self.trajectory_group)))
        first_token = tokens_before[first_step][self.step_trajectory]
        last_token = np.maximum(tokens_before[1:] - 1, first_token)
        np.add.at(rewards, last_token, self.step_rewards - own)
        return rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What an estimator gives: one advantage per trained token, and what the critic should have said."""

    advantages: np.ndarray
    """float64 [K]."""
    value_targets: np.ndarray | None = None
    """float64 [K]; the returns that the critic is trained towards, at the index of `EstimatorInputs.token_values`."""
    value_mask: np.ndarray | None = None
    """bool [K]; True where the critic is trained; None with targets means everywhere."""


def estimator_inputs(groups: Sequence[TrajectoryGroup]) -> EstimatorInputs:
    """The arrays of all trajectories of `groups`, in order. Every trajectory needs at least one trained token."""
    trajectories = [(index, t) for index, group in enumerate(groups) for t in group.trajectories]
    rewards, owner, terminated, truncated, num_tokens, observations = [], [], [], [], [], []
    for row, (_, trajectory) in enumerate(trajectories):
        for step in trajectory.steps:
            rewards.append(step.reward)
            owner.append(row)
            terminated.append(step.terminated)
            truncated.append(step.truncated)
            num_tokens.append(step.num_trained_tokens)
            observations.append(json.dumps(step.observation, sort_keys=True, default=str))
        rewards[-1] += trajectory.outcome_reward
    return EstimatorInputs(
        step_rewards=np.array(rewards, dtype=np.float64),
        step_trajectory=np.array(owner, dtype=np.int64),
        step_terminated=np.array(terminated, dtype=bool),
        step_truncated=np.array(truncated, dtype=bool),
        step_num_tokens=np.array(num_tokens, dtype=np.int64),
        trajectory_group=np.array([index for index, _ in trajectories], dtype=np.int64),
        step_observations=observations,
        greedy_returns=_greedy_returns(groups),
    )


def _greedy_returns(groups: Sequence[TrajectoryGroup]) -> np.ndarray | None:
    if any(group.greedy is None for group in groups):
        return None
    return np.array([group.greedy.episode_return for group in groups if group.greedy], dtype=np.float64)
