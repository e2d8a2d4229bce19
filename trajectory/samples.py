"""Samples: the token sequences that a trajectory's steps were, each token trained once.

Steps that extend one another token by token become one sample; where history was rewritten a new sample starts
and carries only its own response tokens as trained. The trained tokens of a sample are neighbours among those of its
trajectory, so where the first of them stands says where all do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trajectory.steps import ContextChange, Step, Trajectory

MARKER_ID = 0
"""Token id of the marker behind a next observation; nothing attends to it, and its own id is never read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence of a trajectory; L tokens. Values sit at the index of the token they are about."""

    trajectory_index: int
    """Row of the trajectory in the batch."""
    first_trained: int
    """Number of the sample's first trained token among those of its trajectory."""
    token_ids: np.ndarray
    """int64 [L]."""
    loss_mask: np.ndarray
    """bool [L]; True where the model sampled the token."""
    value_mask: np.ndarray
    """bool [L]; loss_mask, and True at the marker, whose value is that of the next observation."""
    step_index: np.ndarray
    """int32 [L]; the step that sampled the token; -1 where masked."""
    rollout_logprobs: np.ndarray
    """float32 [L]; 0 where masked."""
    loss_weights: np.ndarray
    """float32 [L]; factor of each token's loss term; 0 where masked."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


def merge_steps(
    trajectory: Trajectory,
    *,
    trajectory_index: int,
    step_weights: np.ndarray | None = None,
    mark_next: bool = False,
) -> list[Sample]:
    """The trajectory's samples, in order. Every response token of every step is trained exactly once.

    `step_weights` [T] holds the factor of the loss terms of each step's tokens (default 1). With `mark_next` a
    truncated trajectory is followed by what the agent would have seen next and a marker, for a critic to read there.
    """
    steps = list(trajectory.steps)
    weights = np.ones(len(steps)) if step_weights is None else step_weights
    if mark_next and steps and steps[-1].truncated:
        steps.append(_marker_step(steps[-1]))
        weights = np.append(weights, 0.0)
    samples: list[Sample] = []
    run: list[tuple[int, Step]] = []
    first_trained = 0
    for index, step in enumerate(steps):
        if run and not _extends(run[-1][1], step):
            samples.append(_sample(run, trajectory_index, first_trained, weights))
            first_trained += int(samples[-1].loss_mask.sum())
            run = []
        run.append((index, step))
    if run:
        samples.append(_sample(run, trajectory_index, first_trained, weights))
    if len(steps) > len(trajectory.steps):
        samples[-1].value_mask[-1] = True
    return samples


def with_prefix(sample: Sample, prefix_ids: np.ndarray) -> Sample:
    """The sample behind `prefix_ids` (int [P]), which are neither trained nor valued: P + L tokens, those of the sample
    as they were."""
    num_prefix = len(prefix_ids)

    def behind(column: np.ndarray, filler: int) -> np.ndarray:
        return np.concatenate([np.full(num_prefix, filler, dtype=column.dtype), column])

    return replace(
        sample,
        token_ids=np.concatenate([prefix_ids.astype(np.int64), sample.token_ids]),
        loss_mask=behind(sample.loss_mask, 0),
        value_mask=behind(sample.value_mask, 0),
        step_index=behind(sample.step_index, -1),
        rollout_logprobs=behind(sample.rollout_logprobs, 0),
        loss_weights=behind(sample.loss_weights, 0),
    )


def _marker_step(last: Step) -> Step:
    """A step in which nothing was sampled: the next prompt, or the last prompt with its response, and the marker."""
    prompt_ids = last.next_prompt_ids
    if prompt_ids is None:
        prompt_ids = np.concatenate([last.prompt_ids, last.response_ids])
    return Step(
        prompt_ids=prompt_ids,
        response_ids=np.array([MARKER_ID], dtype=np.int32),
        rollout_logprobs=np.zeros(1, dtype=np.float32),
        response_mask=np.zeros(1, dtype=bool),
        policy_version=last.policy_version,
        context_change=ContextChange.CLEAN,
    )


def _extends(previous: Step, step: Step) -> bool:
    """True where the step's prompt begins with all that the previous step saw and said."""
    split = len(previous.prompt_ids)
    end = split + len(previous.response_ids)
    return (
        step.context_change is not ContextChange.FORK
        and len(step.prompt_ids) >= end
        and np.array_equal(step.prompt_ids[:split], previous.prompt_ids)
        and np.array_equal(step.prompt_ids[split:end], previous.response_ids)
    )


def _sample(
    run: Sequence[tuple[int, Step]], trajectory_index: int, first_trained: int, step_weights: np.ndarray
) -> Sample:
    last = run[-1][1]
    token_ids = np.concatenate([last.prompt_ids, last.response_ids]).astype(np.int64)
    loss_mask = np.zeros(len(token_ids), dtype=bool)
    step_index = np.full(len(token_ids), -1, dtype=np.int32)
    rollout_logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for index, step in run:
        span = slice(len(step.prompt_ids), len(step.prompt_ids) + len(step.response_ids))
        loss_mask[span] = step.response_mask
        step_index[span] = np.where(step.response_mask, index, -1)
        rollout_logprobs[span] = np.where(step.response_mask, step.rollout_logprobs, 0.0)
    return Sample(
        trajectory_index=trajectory_index,
        first_trained=first_trained,
        token_ids=token_ids,
        loss_mask=loss_mask,
        value_mask=loss_mask.copy(),
        step_index=step_index,
        rollout_logprobs=rollout_logprobs,
        loss_weights=np.where(loss_mask, step_weights[step_index], 0.0).astype(np.float32),
    )
