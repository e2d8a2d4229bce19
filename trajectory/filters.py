"""What leaves a batch before training, each drop counted by its reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trajectory.steps import TrajectoryGroup, TrajectoryStatus

EMPTY = "empty"
"""The trajectory has no trained token."""
ENV_FAILED = "env_failed"
"""The environment failed, so its reward says nothing about the policy."""
GROUP_OF_ONE = "group_of_one"
"""A group-relative baseline needs at least two trajectories."""


def filter_groups(groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """The trajectories that take part in credit assignment, and how many trajectories were dropped for what.

    A failed trajectory is left out of its group; the rest of the group still trains.
    """
    drops: Counter[str] = Counter()
    kept = []
    for group in groups:
        trajectories = []
        for trajectory in group.trajectories:
            if trajectory.status is TrajectoryStatus.ENV_FAILED:
                drops[ENV_FAILED] += 1
            elif not any(step.num_trained_tokens for step in trajectory.steps):
                drops[EMPTY] += 1
            else:
                trajectories.append(trajectory)
        if len(trajectories) == 1:
            drops[GROUP_OF_ONE] += 1
        elif trajectories:
            kept.append(replace(group, trajectories=tuple(trajectories)))
    return kept, drops
