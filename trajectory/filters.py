"""What leaves a batch before training, each drop counted by its reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trajectory.advantages.groups import EQUAL_RETURNS
from trajectory.steps import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus

EMPTY = "empty"
"""The trajectory has no trained token."""
ENV_FAILED = "env_failed"
"""The environment failed, so its reward says nothing about the policy."""
OVERLONG = "overlong"
"""A token limit cut the trajectory off, so its reward says little about what it would have come to."""
STALE = "stale"
"""Weights that are too old sampled one of its steps."""
GROUP_OF_ONE = "group_of_one"
"""A group-relative baseline needs at least two trajectories."""
NO_BASELINE = "no_baseline"
"""The greedy episode that is the group's baseline failed."""
ZERO_VARIANCE = "zero_variance"
"""All returns of the group are equal: nothing to learn from."""

TOKEN_LIMITS = (StopReason.RESPONSE_LENGTH, StopReason.PROMPT_LENGTH, StopReason.EPISODE_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which drops are asked for beside those that credit cannot do without."""

    zero_variance: bool = False
    overlong: bool = False
    max_staleness: int | None = None
    """In training steps."""


def filter_groups(
    groups: Sequence[TrajectoryGroup], filters: Filters, *, need: str | None, step: int
) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """The trajectories that take part in credit assignment, and how many trajectories were dropped for what.

    A dropped trajectory is left out of its group; the rest of the group still trains. `need` is what the advantage
    estimator cannot do without (see `trajectory.advantages.registry.NEEDS`), `step` the training step.
    """
    drops: Counter[str] = Counter()
    kept = []
    for group in groups:
        trajectories = []
        for trajectory in group.trajectories:
            reason = _reason(trajectory, filters, step)
            if reason:
                drops[reason] += 1
            else:
                trajectories.append(trajectory)
        reason = _group_reason(replace(group, trajectories=tuple(trajectories)), filters, need)
        if reason:
            drops[reason] += len(trajectories)
        elif trajectories:
            kept.append(replace(group, trajectories=tuple(trajectories)))
    return kept, drops


def equal_returns(trajectories: Sequence[Trajectory]) -> bool:
    """True where a group-relative baseline leaves nothing to learn from."""
    returns = [trajectory.episode_return for trajectory in trajectories]
    return not returns or bool(np.ptp(returns) <= EQUAL_RETURNS * max(1.0, np.abs(returns).max()))


def _reason(trajectory: Trajectory, filters: Filters, step: int) -> str | None:
    if trajectory.status is TrajectoryStatus.ENV_FAILED:
        return ENV_FAILED
    if not any(s.num_trained_tokens for s in trajectory.steps):
        return EMPTY
    if filters.overlong and trajectory.steps[-1].stop_reason in TOKEN_LIMITS:
        return OVERLONG
    oldest = min(s.policy_version for s in trajectory.steps)
    if filters.max_staleness is not None and step - 1 - oldest > filters.max_staleness:
        return STALE
    return None


def _group_reason(group: TrajectoryGroup, filters: Filters, need: str | None) -> str | None:
    if need == "group" and len(group.trajectories) == 1:
        return GROUP_OF_ONE
    if need == "greedy" and (group.greedy is None or group.greedy.status is TrajectoryStatus.ENV_FAILED):
        return NO_BASELINE
    if filters.zero_variance and equal_returns(group.trajectories):
        return ZERO_VARIANCE
    return None
