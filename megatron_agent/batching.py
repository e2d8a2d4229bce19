"""From trajectory groups to the minibatches of packed rows that the trainer consumes. Runs on rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_agent.config import ExperimentConfig
from trajectory.advantages.inputs import estimator_inputs
from trajectory.advantages.registry import compute_advantages
from trajectory.filters import filter_groups
from trajectory.packing import PackedMicrobatch, plan_microbatches
from trajectory.samples import Sample, merge_steps
from trajectory.steps import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The rows of one optimizer update."""

    per_data_rank: list[list[PackedMicrobatch]]
    """One list per data-parallel rank, all of one length."""
    denominator: float
    """What the sum of all loss terms is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """All updates of one rollout batch."""

    minibatches: list[Minibatch]
    """Empty where every trajectory was dropped or no advantage differs from 0."""
    untrained: Minibatch | None = None
    """Where nothing is trained: one row per data-parallel rank of what was sampled, to compare trainer and fleet on."""
    metrics: dict[str, float]
    """Counts of drops, tokens and padding, and the advantages' spread."""


def build_batch(
    groups: Sequence[TrajectoryGroup], config: ExperimentConfig, *, data_parallel_size: int, pad_multiple: int
) -> TrainingBatch:
    """Filter, give credit, pack.

    Where the loss has no KL and no entropy term, a trajectory whose advantages are all 0 adds exactly nothing to
    the gradient: it counts in the denominator but is not packed.
    """
    kept, drops = filter_groups(groups)
    metrics = {f"dropped_{reason}": float(count) for reason, count in drops.items()}
    if not kept:
        return TrainingBatch(minibatches=[], metrics=metrics)
    algorithm = config.algorithm
    inputs = estimator_inputs(kept)
    advantages = compute_advantages(
        algorithm.advantage.name, inputs, std=algorithm.advantage.std, eps=algorithm.advantage.eps
    )
    trajectories = [trajectory for group in kept for trajectory in group.trajectories]
    first_step = np.searchsorted(inputs.step_trajectory, np.arange(len(trajectories) + 1))
    num_tokens = np.bincount(inputs.step_trajectory, weights=inputs.step_num_tokens)
    per_token = algorithm.loss.denominator == "token"
    needs_all = algorithm.kl.coef > 0 or algorithm.entropy_coef > 0
    minibatches: list[Minibatch] = []
    num_packed = num_padding = num_rows = 0
    for members in np.array_split(np.arange(len(trajectories)), algorithm.minibatches):
        samples: list[Sample] = []
        for index in members.tolist():
            own = advantages[first_step[index] : first_step[index + 1]]
            if needs_all or np.any(own != 0.0):
                weight = 1.0 if per_token else 1.0 / float(num_tokens[index])
                samples += merge_steps(
                    trajectories[index], trajectory_index=index, step_advantages=own, loss_weight=weight
                )
        if not samples:
            continue
        per_data_rank = plan_microbatches(
            samples,
            tokens_per_row=config.packing.tokens_per_row,
            data_parallel_size=data_parallel_size,
            pad_multiple=pad_multiple,
        )
        denominator = float(num_tokens[members].sum()) if per_token else float(len(members))
        minibatches.append(Minibatch(per_data_rank=per_data_rank, denominator=denominator))
        rows = [row for shard in per_data_rank for row in shard]
        num_packed += sum(row.num_tokens for row in rows)
        num_padding += sum(row.num_padding for row in rows)
        num_rows += len(rows)
    metrics |= {
        "advantage_abs_mean": float(np.abs(advantages).mean()),
        "trained_tokens": float(num_tokens.sum()),
        "packed_tokens": float(num_packed),
        "packed_rows": float(num_rows),
        "padding_frac": num_padding / max(1, num_packed),
    }
    untrained = None
    if not minibatches:
        rows = _one_row_each(trajectories, config.packing.tokens_per_row, data_parallel_size, pad_multiple)
        untrained = Minibatch(per_data_rank=rows, denominator=1.0)
    return TrainingBatch(minibatches=minibatches, untrained=untrained, metrics=metrics)


def _one_row_each(
    trajectories: Sequence[Trajectory], tokens_per_row: int, data_parallel_size: int, pad_multiple: int
) -> list[list[PackedMicrobatch]]:
    """The first samples, as many as fill a row on every data-parallel rank, without any advantage."""
    samples: list[Sample] = []
    num_tokens = 0
    for index, trajectory in enumerate(trajectories):
        own = merge_steps(trajectory, trajectory_index=index, step_advantages=np.zeros(len(trajectory.steps)))
        samples += own
        num_tokens += sum(sample.num_tokens for sample in own)
        if num_tokens >= tokens_per_row * data_parallel_size:
            break
    return plan_microbatches(
        samples, tokens_per_row=tokens_per_row, data_parallel_size=data_parallel_size, pad_multiple=pad_multiple
    )
