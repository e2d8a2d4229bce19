"""Made-up episodes in the form that a run records, for runs that replay them instead of starting a fleet."""

from pathlib import Path

import numpy as np

from rollout.recorder import TrajectoryRecorder
from trajectory.steps import ContextChange, Step, StopReason, Trajectory, TrajectoryGroup


def record_episodes(folder: Path, *, steps: int, outcomes: tuple[float, ...] = (0.0, 1.0, 2.0)) -> None:
    """`folder`/trajectories.jsonl: 3 groups of 4 two-step episodes and a greedy one for each training step; every
    fourth episode is truncated."""
    recorder = TrajectoryRecorder(folder)
    generator = np.random.default_rng(0)
    for step in range(1, steps + 1):
        recorder.write(
            [_group(generator, f"train-{step}-{place}", outcomes) for place in range(3)], step=step, phase="train"
        )


def _group(generator: np.random.Generator, group_id: str, outcomes: tuple[float, ...]) -> TrajectoryGroup:
    members = [_trajectory(generator, group_id, f"{group_id}-{index}", outcomes) for index in range(5)]
    return TrajectoryGroup(group_id=group_id, trajectories=tuple(members[:4]), greedy=members[4])


def _trajectory(
    generator: np.random.Generator, group_id: str, trajectory_id: str, outcomes: tuple[float, ...]
) -> Trajectory:
    ids = generator.integers(3, 250, size=24).astype(np.int32)
    is_truncated = trajectory_id.endswith("-3")
    ending = StopReason.MAX_STEPS if is_truncated else StopReason.TERMINATED
    steps = []
    for prompt_length, is_last in ((8, False), (15, True)):
        steps.append(
            Step(
                prompt_ids=ids[:prompt_length],
                response_ids=ids[prompt_length : prompt_length + 4],
                rollout_logprobs=-generator.random(4).astype(np.float32),
                response_mask=np.ones(4, dtype=bool),
                policy_version=0,
                terminated=is_last and not is_truncated,
                truncated=is_last and is_truncated,
                stop_reason=ending if is_last else StopReason.NONE,
                next_prompt_ids=ids if is_last and is_truncated else None,
                context_change=ContextChange.CLEAN if steps else ContextChange.FIRST,
            )
        )
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        steps=tuple(steps),
        outcome_reward=float(generator.choice(outcomes)),
        privileged_ids=ids[:2],
    )
