"""From trajectory groups to the minibatches of packed rows that the trainer consumes. Runs on rank 0.

groups -> filters -> rewards -> credit -> packed rows -> ranks
                        |         ^
                        +- rows without credit -> ranks score them -+      where credit needs what models say
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from megatron_agent.config import ExperimentConfig
from megatron_agent.credit import CreditGiver, TokenScores
from megatron_agent.errors import DataError
from trajectory.advantages.inputs import Credit, EstimatorInputs, estimator_inputs
from trajectory.filters import Filters, filter_groups
from trajectory.packing import PackedMicrobatch, RowCredit, plan_microbatches, row_cost
from trajectory.samples import Sample, merge_steps, with_prefix
from trajectory.steps import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The rows of one optimizer update."""

    per_data_rank: list[list[PackedMicrobatch]]
    """One list per data-parallel rank, all of one length."""
    denominator: float
    """What the sum of all loss terms is divided by."""
    critic_rows: list[list[PackedMicrobatch]] | None = None
    """The critic's own rows, with what only it sees in front; laid out like per_data_rank. None: it reads those."""

    def scored_rows(self) -> list[list[PackedMicrobatch]]:
        """All rows that models are asked about, by data rank: the policy's, then those of the critic's own."""
        if self.critic_rows is None:
            return self.per_data_rank
        return [[*rows, *own] for rows, own in zip(self.per_data_rank, self.critic_rows, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """All updates of one rollout batch."""

    minibatches: list[Minibatch]
    """Empty where every trajectory was dropped or no advantage differs from 0."""
    untrained: Minibatch | None = None
    """Where nothing is trained: one row per data-parallel rank of what was sampled, to compare trainer and fleet on."""
    inputs: EstimatorInputs | None = None
    """What credit is given from; None where it has been given or nothing is left."""
    metrics: dict[str, float]
    """Counts of drops, tokens and padding, and the advantages' spread."""


class SequenceScorer(Protocol):
    """Log-probs of given tokens, as rollout.teacher.TeacherFleet gives them."""

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each sequence of ids [L] the log-probs [L] of its tokens."""
        ...


class BatchBuilder:
    """Makes the training batch of each step; keeps what credit remembers from one step to the next."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        data_parallel_size: int,
        pad_multiple: int,
        pair_cost: float = 0.0,
        teacher: SequenceScorer | None = None,
    ) -> None:
        """`teacher` scores tokens where it is not the trainer's ranks that do; for the rest see
        `trajectory.packing.plan_microbatches`."""
        self._config = config
        self._teacher = teacher
        self._data_parallel_size = data_parallel_size
        self._pair_cost = pair_cost
        self._plan_rows = partial(
            plan_microbatches,
            tokens_per_row=config.packing.tokens_per_row,
            data_parallel_size=data_parallel_size,
            pad_multiple=pad_multiple,
            share=config.packing.prefix_tree,
            pair_cost=pair_cost,
        )
        self._credit = CreditGiver(config)
        filters = config.algorithm.filters
        self._filters = Filters(
            zero_variance=filters.zero_variance, overlong=filters.overlong, max_staleness=filters.max_staleness
        )

    def kept(self, groups: Sequence[TrajectoryGroup], *, step: int) -> tuple[list[TrajectoryGroup], Counter[str]]:
        """The groups that `build` would train on, and how many trajectories it would drop for what."""
        return filter_groups(groups, self._filters, need=self._credit.need, step=step)

    def build(self, groups: Sequence[TrajectoryGroup], *, step: int) -> TrainingBatch:
        """Filter, give credit where nothing has to be scored for it, pack. `step` is the training step.

        Where the loss has no KL, no entropy and no teacher's term, a trajectory whose advantages are all 0 adds exactly
        nothing to the gradient: it counts in the denominator but is not packed.
        """
        kept, drops = self.kept(groups, step=step)
        metrics = {f"dropped_{reason}": float(count) for reason, count in drops.items()}
        if not kept:
            return TrainingBatch(minibatches=[], metrics=metrics)
        trajectories = [trajectory for group in kept for trajectory in group.trajectories]
        inputs = self._credit.shape_rewards(estimator_inputs(kept))
        if self._teacher:
            inputs = replace(inputs, teacher_logprobs=_teacher_logprobs(self._teacher, trajectories))
        credit = None if self._credit.scores else self._credit.give(inputs)
        packed = np.ones(len(trajectories), dtype=bool)
        if credit and not self._needs_every_token():
            packed = np.bincount(_trajectory_of_token(inputs), weights=credit.advantages != 0.0) > 0
        minibatches = []
        for members in np.array_split(np.arange(len(trajectories)), self._config.algorithm.minibatches):
            if packed[members].any():
                minibatches.append(self._minibatch(members, packed, trajectories, inputs))
        if credit:
            metrics |= advantage_metrics(credit)
            minibatches = [
                replace(minibatch, per_data_rank=_with_credit(minibatch.per_data_rank, rows))
                for minibatch, (rows, _) in zip(minibatches, spread_credit(minibatches, inputs, credit), strict=True)
            ]
        metrics |= _packing_metrics(minibatches, self._pair_cost) | {"trained_tokens": float(inputs.num_tokens)}
        untrained = None
        if not minibatches:
            rows = self._one_row_each(trajectories)
            untrained = Minibatch(per_data_rank=rows, denominator=1.0)
        return TrainingBatch(
            minibatches=minibatches,
            untrained=untrained,
            inputs=None if credit else inputs,
            metrics=metrics,
        )

    def give_credit(
        self, batch: TrainingBatch, scores: Sequence[Sequence[Sequence[TokenScores]]]
    ) -> tuple[list[tuple[list[list[RowCredit]], float]], dict[str, float]]:
        """Credit of a batch whose rows were scored: for each minibatch the rows' credit, by data rank, and the number
        of values that the critic is trained on; and the metrics.

        `scores` holds, for each minibatch, data rank and row of `scored_rows`, what the models said of the row's
        tokens; the credit is in the same order.
        """
        assert batch.inputs is not None, "credit of this batch has been given"
        inputs = collect_scores(batch.minibatches, batch.inputs, scores)
        credit = self._credit.give(inputs)
        metrics = advantage_metrics(credit) | self._credit.kl_metrics(inputs)
        return spread_credit(batch.minibatches, inputs, credit), metrics

    def state_dict(self) -> dict[str, Any]:
        return self._credit.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._credit.load_state_dict(state)

    def _needs_every_token(self) -> bool:
        algorithm = self._config.algorithm
        distils = algorithm.teacher is not None and algorithm.teacher.top_k > 0
        return (algorithm.kl.coef > 0 and algorithm.kl.placement == "loss") or algorithm.entropy_coef > 0 or distils

    def _minibatch(
        self, members: np.ndarray, packed: np.ndarray, trajectories: Sequence[Trajectory], inputs: EstimatorInputs
    ) -> Minibatch:
        weights, denominator = self._loss_weights(members, inputs)
        first_step = np.searchsorted(inputs.step_trajectory, np.arange(len(trajectories) + 1))
        critic = self._config.algorithm.critic
        privileged = critic.privileged if critic else None
        samples: list[Sample] = []
        critic_samples: list[Sample] = []
        for index in members[packed[members]].tolist():
            trajectory = trajectories[index]
            step_weights = weights[first_step[index] : first_step[index + 1]]
            merge = partial(merge_steps, trajectory, trajectory_index=index, step_weights=step_weights)
            samples += merge(mark_next="values" in self._credit.scores and privileged is None)
            if privileged is not None:
                prefix_ids = _privileged_ids(trajectory, privileged)
                critic_samples += [with_prefix(sample, prefix_ids) for sample in merge(mark_next=True)]

        def plan(own: Sequence[Sample]) -> list[list[PackedMicrobatch]]:
            return self._plan_rows(own, families=inputs.trajectory_group[[s.trajectory_index for s in own]])

        return Minibatch(
            per_data_rank=plan(samples),
            denominator=denominator,
            critic_rows=None if privileged is None else plan(critic_samples),
        )

    def _loss_weights(self, members: np.ndarray, inputs: EstimatorInputs) -> tuple[np.ndarray, float]:
        """float64 [N], the factor of each step's tokens, and the denominator of a minibatch of these trajectories."""
        loss = self._config.algorithm.loss
        kind = loss.resolved_denominator()
        if kind == "token":
            own = np.isin(inputs.step_trajectory, members)
            return np.ones(len(own)), float(inputs.step_num_tokens[own].sum())
        if kind == "constant":
            agent = self._config.agent
            tokens = loss.constant_tokens or agent.max_steps * agent.max_response_tokens
            return np.ones(len(inputs.step_trajectory)), float(tokens) * len(members)
        unit = {
            "step": np.arange(len(inputs.step_trajectory)),
            "trajectory": inputs.step_trajectory,
            "prompt_group": inputs.trajectory_group[inputs.step_trajectory],
        }[kind]
        own = np.isin(inputs.step_trajectory, members) & (inputs.step_num_tokens > 0)
        num_tokens = np.bincount(unit[own], weights=inputs.step_num_tokens[own], minlength=int(unit.max()) + 1)
        return 1.0 / np.maximum(num_tokens, 1.0)[unit], float((num_tokens > 0).sum())

    def _one_row_each(self, trajectories: Sequence[Trajectory]) -> list[list[PackedMicrobatch]]:
        """The first samples, as many as fill a row on every data-parallel rank, without any advantage."""
        tokens_per_row = self._config.packing.tokens_per_row
        samples: list[Sample] = []
        num_tokens = 0
        for index, trajectory in enumerate(trajectories):
            own = merge_steps(trajectory, trajectory_index=index)
            samples += own
            num_tokens += sum(sample.num_tokens for sample in own)
            if num_tokens >= tokens_per_row * self._data_parallel_size:
                break
        return self._plan_rows(samples)


def _privileged_ids(trajectory: Trajectory, name: str) -> np.ndarray:
    if trajectory.privileged_ids is None:
        raise DataError(
            f"episode {trajectory.trajectory_id} was recorded without what algorithm.critic.privileged {name} names; "
            "replay a run that had it, or unset it"
        )
    return trajectory.privileged_ids


def collect_scores(
    minibatches: Sequence[Minibatch], inputs: EstimatorInputs, scores: Sequence[Sequence[Sequence[TokenScores]]]
) -> EstimatorInputs:
    """`inputs` with what the models said of each trained token, and of each truncated trajectory's next observation."""
    first_token = _first_tokens(inputs)
    found: dict[str, np.ndarray] = {}
    bootstrap = np.zeros(len(inputs.trajectory_group))
    for minibatch, shards in zip(minibatches, scores, strict=True):
        for rows, row_scores in zip(minibatch.scored_rows(), shards, strict=True):
            for row, own in zip(rows, row_scores, strict=True):
                trained, index = row.loss_mask.numpy(), _token_index(row, first_token)
                for name, values in own.items():
                    target = found.setdefault(name, np.zeros(inputs.num_tokens))
                    target[index] = values.numpy()[trained]
                    if name == "values":
                        markers = ~trained & (row.trajectory_index.numpy() >= 0)
                        bootstrap[row.trajectory_index.numpy()[markers]] = values.numpy()[markers]
    return replace(
        inputs,
        old_logprobs=found.get("old"),
        reference_logprobs=found.get("reference"),
        teacher_logprobs=found.get("teacher", inputs.teacher_logprobs),
        token_values=found.get("values"),
        bootstrap_values=bootstrap if "values" in found else None,
    )


def spread_credit(
    minibatches: Sequence[Minibatch], inputs: EstimatorInputs, credit: Credit
) -> list[tuple[list[list[RowCredit]], float]]:
    """For each minibatch the credit of its `scored_rows`, by data rank, and the number of values the critic is trained
    on. Where the critic has rows of its own, the policy's get no value targets."""
    first_token = _first_tokens(inputs)
    spread = []
    for minibatch in minibatches:
        of_policy = credit if minibatch.critic_rows is None else replace(credit, value_targets=None, value_mask=None)
        rows = [
            [
                RowCredit.on_row(row, of_policy if place < len(own) else credit, _token_index(row, first_token))
                for place, row in enumerate(shard)
            ]
            for own, shard in zip(minibatch.per_data_rank, minibatch.scored_rows(), strict=True)
        ]
        weights = [own.value_weights for shard in rows for own in shard if own.value_weights is not None]
        num_values = sum(float(own.sum()) for own in weights)
        spread.append((rows, num_values))
    return spread


def advantage_metrics(credit: Credit) -> dict[str, float]:
    """Spread of the advantages over trained tokens."""
    return {
        "advantage_mean": float(credit.advantages.mean()),
        "advantage_abs_mean": float(np.abs(credit.advantages).mean()),
        "advantage_abs_max": float(np.abs(credit.advantages).max()),
    }


def _with_credit(
    per_data_rank: list[list[PackedMicrobatch]], credit: list[list[RowCredit]]
) -> list[list[PackedMicrobatch]]:
    return [
        [own.put_on(row) for row, own in zip(rows, row_credit, strict=True)]
        for rows, row_credit in zip(per_data_rank, credit, strict=True)
    ]


def _teacher_logprobs(teacher: SequenceScorer, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """float64 [K]: the teacher's log-prob of each trained token."""
    samples = [s for index, one in enumerate(trajectories) for s in merge_steps(one, trajectory_index=index)]
    scored = teacher.score([sample.token_ids for sample in samples])
    trained = [logprobs[sample.loss_mask] for sample, logprobs in zip(samples, scored, strict=True)]
    return np.concatenate(trained).astype(np.float64)


def _trajectory_of_token(inputs: EstimatorInputs) -> np.ndarray:
    return np.repeat(inputs.step_trajectory, inputs.step_num_tokens)


def _first_tokens(inputs: EstimatorInputs) -> np.ndarray:
    """int64 [M]: the number of each trajectory's first trained token in the batch."""
    counts = np.bincount(inputs.step_trajectory, weights=inputs.step_num_tokens).astype(np.int64)
    return np.cumsum(counts) - counts


def _token_index(row: PackedMicrobatch, first_token: np.ndarray) -> np.ndarray:
    """int64: which of the batch's trained tokens each trained token of the row is."""
    assert row.trained_index is not None, "the row was not packed here"
    return first_token[row.trajectory_index.numpy()[row.loss_mask.numpy()]] + row.trained_index


def _packing_metrics(minibatches: Sequence[Minibatch], pair_cost: float) -> dict[str, float]:
    """Counts of the policy's rows; `sample_tokens` are those of the samples one by one, `shared_frac` is the share of
    them that a prefix tree saved, `rank_balance` what the busiest data rank has to do over the mean, in the worst
    minibatch."""
    rows = [row for minibatch in minibatches for shard in minibatch.per_data_rank for row in shard]
    num_packed, num_padding = sum(row.num_tokens for row in rows), sum(row.num_padding for row in rows)
    num_unshared = sum(row.num_unshared for row in rows)
    balances = [1.0]
    for minibatch in minibatches:
        costs = [sum(row_cost(row, pair_cost=pair_cost) for row in shard) for shard in minibatch.per_data_rank]
        balances.append(max(costs) * len(costs) / max(1.0, sum(costs)))
    return {
        "packed_tokens": float(num_packed),
        "sample_tokens": float(num_unshared),
        "packed_rows": float(len(rows)),
        "padding_frac": num_padding / max(1, num_packed),
        "shared_frac": 1.0 - (num_packed - num_padding) / num_unshared if num_unshared else 0.0,
        "rank_balance": max(balances),
    }
