"""Samples: the token sequences that a trajectory's steps were, each token trained once.

Steps that extend one another token by token become one sample; where history was rewritten a new sample starts
and carries only its own response tokens as trained.
"""

from dataclasses import dataclass

import numpy as np

from trajectory.steps import ContextChange, Step, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence of a trajectory; L tokens. Values sit at the index of the token they are about."""

    trajectory_index: int
    """Row of the trajectory in the batch."""
    token_ids: np.ndarray
    """int64 [L]."""
    loss_mask: np.ndarray
    """bool [L]; True where the model sampled the token."""
    step_index: np.ndarray
    """int32 [L]; the step that sampled the token; -1 where masked."""
    rollout_logprobs: np.ndarray
    """float32 [L]; 0 where masked."""
    advantages: np.ndarray
    """float32 [L]; 0 where masked."""
    loss_weights: np.ndarray
    """float32 [L]; factor of each token's loss term; 0 where masked."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


def merge_steps(
    trajectory: Trajectory, *, trajectory_index: int, step_advantages: np.ndarray, loss_weight: float = 1.0
) -> list[Sample]:
    """The trajectory's samples, in order. Every response token of every step is trained exactly once.

    `step_advantages` [T] holds one advantage per step, put on each of its trained tokens; `loss_weight` is the
    factor of every trained token's loss term.
    """
    samples: list[Sample] = []
    run: list[tuple[int, Step]] = []
    for index, step in enumerate(trajectory.steps):
        if run and not _extends(run[-1][1], step):
            samples.append(_sample(run, trajectory_index, step_advantages, loss_weight))
            run = []
        run.append((index, step))
    if run:
        samples.append(_sample(run, trajectory_index, step_advantages, loss_weight))
    return samples


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
    run: list[tuple[int, Step]], trajectory_index: int, step_advantages: np.ndarray, loss_weight: float
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
        token_ids=token_ids,
        loss_mask=loss_mask,
        step_index=step_index,
        rollout_logprobs=rollout_logprobs,
        advantages=np.where(loss_mask, step_advantages[step_index], 0.0).astype(np.float32),
        loss_weights=np.where(loss_mask, loss_weight, 0.0).astype(np.float32),
    )
