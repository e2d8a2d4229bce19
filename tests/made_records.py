"""Steps, trajectories and groups made by hand for tests of what comes after the rollout."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trajectory.steps import Step, Trajectory, TrajectoryGroup


def make_step(
    prompt: Sequence[int], response: Sequence[int], *, forced: Sequence[int] = (), logprob: float = -0.5, **fields: Any
) -> Step:
    """A step that sampled `response`; the system appended `forced`."""
    sampled = [True] * len(response) + [False] * len(forced)
    return Step(
        **{
            "prompt_ids": np.array(prompt, dtype=np.int32),
            "response_ids": np.array([*response, *forced], dtype=np.int32),
            "rollout_logprobs": np.where(sampled, logprob, 0.0).astype(np.float32),
            "response_mask": np.array(sampled, dtype=bool),
            "policy_version": 0,
            **fields,
        }
    )


def make_trajectory(*steps: Step, reward: float = 0.0, name: str = "t", **fields: Any) -> Trajectory:
    """An episode with an outcome reward."""
    return Trajectory(**{"trajectory_id": name, "group_id": "g", "steps": steps, "outcome_reward": reward, **fields})


def make_group(*trajectories: Trajectory, name: str = "g") -> TrajectoryGroup:
    """The trajectories of one prompt."""
    return TrajectoryGroup(group_id=name, trajectories=trajectories)


def one_step_group(*rewards: float, name: str = "g", num_tokens: int = 3) -> TrajectoryGroup:
    """One trajectory with one step for each reward."""
    return make_group(
        *(
            make_trajectory(make_step([1, 2], range(3, 3 + num_tokens), terminated=True), reward=reward)
            for reward in rewards
        ),
        name=name,
    )
