"""Rows on their way from rank 0 to the updates: shared out, scored by the models, given credit for.

    rank 0 --rows--> data ranks --scores--> rank 0 --credit--> data ranks      the last two where credit needs scores

Every function is collective.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_agent.batching import BatchBuilder, Minibatch, TrainingBatch
from megatron_agent.config_algorithm import TeacherConfig
from megatron_agent.credit import TokenScores, scores_for_credit
from megatron_agent.session import Session
from parallel.distribute import broadcast_object, gather_shards, scatter_microbatches, scatter_shards
from parallel.reference import FrozenModel
from trajectory.packing import PackedMicrobatch


class SharedRows(NamedTuple):
    """This data rank's rows of a minibatch."""

    rows: list[PackedMicrobatch]
    denominator: float
    """Of the policy's loss, for the whole minibatch."""
    critic_rows: list[PackedMicrobatch] | None
    """The critic's own rows; None where it reads `rows`, or there is none."""


class CreditedRows(NamedTuple):
    """This data rank's rows of a minibatch, ready for its updates."""

    rows: list[PackedMicrobatch]
    denominator: float
    """Of the policy's loss, for the whole minibatch."""
    num_values: float
    """Values that the critic is trained on, in the whole minibatch."""
    critic_rows: list[PackedMicrobatch]
    """What a critic is trained on: `rows`, or its own."""


def share(batch: TrainingBatch | None) -> tuple[list[SharedRows], list[PackedMicrobatch]]:
    """What this data rank trains of each minibatch; and what it only compares.

    Collective; rank 0 passes the batch.
    """
    count, compares = broadcast_object((len(batch.minibatches), batch.untrained is not None) if batch else None)
    minibatches = [share_minibatch(batch.minibatches[index] if batch else None) for index in range(count)]
    untrained = share_minibatch(batch.untrained if batch else None).rows if compares else []
    return minibatches, untrained


def share_minibatch(minibatch: Minibatch | None) -> SharedRows:
    """This data rank's part of the minibatch. Collective; rank 0 passes the minibatch."""
    denominator, critic_has_own = broadcast_object(
        (minibatch.denominator, minibatch.critic_rows is not None) if minibatch else None
    )
    rows = scatter_microbatches(minibatch.per_data_rank if minibatch else None)
    critic_rows = scatter_microbatches(minibatch.critic_rows if minibatch else None) if critic_has_own else None
    return SharedRows(rows, denominator, critic_rows)


def score(
    session: Session, minibatches: list[SharedRows], batch: TrainingBatch | None, *, on_policy: bool
) -> tuple[list[CreditedRows], dict[str, float]]:
    """The minibatches with what the updates need beside the rows, credit included, and the credit's metrics.

    `on_policy` says that there is one update: its own pass is by the weights whose log-probs are the old ones. Rank
    0 passes the batch; the metrics are there only.
    """
    assert session.policy is not None
    wanted = scores_for_credit(session.config)
    scored: list[list[PackedMicrobatch]] = []
    scores: list[list[TokenScores]] = []
    for rows, _, critic_rows in minibatches:
        own_rows = critic_rows or []
        found: dict[str, list[torch.Tensor]] = {}
        found_on_own: dict[str, list[torch.Tensor]] = {}
        if "old" in wanted or (not on_policy and session.config.algorithm.old_logprobs == "recompute"):
            found["old"] = session.policy.compute_logprobs(rows)
        if session.reference:
            found["reference"] = session.reference.compute_logprobs(rows)
        if session.teacher:
            found |= _ask_teacher(session.teacher, rows, session.config.algorithm.teacher)
        if session.critic:
            target = found_on_own if own_rows else found
            target["values"] = session.critic.compute_values(own_rows or rows)
        per_row = _by_row(found, len(rows)) + _by_row(found_on_own, len(own_rows))
        scored.append([_with_scores(row, own) for row, own in zip([*rows, *own_rows], per_row, strict=True)])
        scores.append([{name: own[name] for name in wanted & own.keys()} for own in per_row])
    if not wanted or not minibatches:
        return [
            CreditedRows(rows, shared.denominator, 0.0, rows) for rows, shared in zip(scored, minibatches, strict=True)
        ], {}
    return _give_credit(session.batches, scored, minibatches, scores, batch)


def _give_credit(
    batches: BatchBuilder | None,
    scored: list[list[PackedMicrobatch]],
    minibatches: list[SharedRows],
    scores: list[list[TokenScores]],
    batch: TrainingBatch | None,
) -> tuple[list[CreditedRows], dict[str, float]]:
    """Scores to rank 0, credit back to the ranks whose rows were scored."""
    gathered = [gather_shards(own) for own in scores]
    credit, metrics = None, {}
    if batches and batch:
        credit, metrics = batches.give_credit(batch, [own for own in gathered if own is not None])
    credited = []
    for index, (rows, shared) in enumerate(zip(scored, minibatches, strict=True)):
        own = scatter_shards(credit[index][0] if credit else None)
        num_values = broadcast_object(credit[index][1] if credit else None)
        filled = [row_credit.put_on(row) for row, row_credit in zip(rows, own, strict=True)]
        of_policy, of_critic = filled[: len(shared.rows)], filled[len(shared.rows) :]
        credited.append(CreditedRows(of_policy, shared.denominator, num_values, of_critic or of_policy))
    return credited, metrics


def _ask_teacher(
    teacher: FrozenModel, rows: list[PackedMicrobatch], options: TeacherConfig | None
) -> dict[str, list[torch.Tensor]]:
    """What estimator or loss want to know of it, one tensor per row. Top tokens are found on the last stage only,
    and stay there."""
    assert options is not None, "there is a teacher where there are options for it"
    if options.top_k == 0:
        return {"teacher": teacher.compute_logprobs(rows)}
    top = teacher.compute_top_tokens(rows, k=options.top_k)
    if not top:
        return {}
    return {"teacher_top_ids": [one.ids for one in top], "teacher_top_logprobs": [one.logprobs for one in top]}


def _by_row(found: dict[str, list[torch.Tensor]], num_rows: int) -> list[TokenScores]:
    return [{name: values[index] for name, values in found.items()} for index in range(num_rows)]


def _with_scores(row: PackedMicrobatch, scores: TokenScores) -> PackedMicrobatch:
    return replace(
        row,
        old_logprobs=scores.get("old"),
        reference_logprobs=scores.get("reference"),
        teacher_top_ids=scores.get("teacher_top_ids"),
        teacher_top_logprobs=scores.get("teacher_top_logprobs"),
        old_values=scores.get("values"),
    )
