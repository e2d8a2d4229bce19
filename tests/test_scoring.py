"""Scores and credit of one rank whose models are made up: who is asked about which rows, and what comes back."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from made_records import make_group, make_step, make_trajectory

from megatron_agent import scoring
from megatron_agent.batching import BatchBuilder
from megatron_agent.config import ExperimentConfig
from megatron_agent.scoring import CreditedRows, SharedRows, score
from megatron_agent.session import Session
from trajectory.packing import PackedMicrobatch
from trajectory.steps import ContextChange, TrajectoryGroup

PREFIX = [900, 901, 902]
"""What the critic sees of each row; no other token is as large."""


class MadeUp:
    """Says of a token what follows from its episode, step and place in its sequence, counted behind the prefix."""

    def __init__(self, seed: float) -> None:
        self._seed = seed
        self.asked: list[PackedMicrobatch] = []

    def compute(self, rows: list[PackedMicrobatch]) -> list[torch.Tensor]:
        self.asked += rows
        return [
            torch.sin(self._seed + 7.0 * row.trajectory_index + 3.0 * row.step_index + places_behind_prefix(row))
            for row in rows
        ]

    compute_logprobs = compute_values = compute


def places_behind_prefix(row: PackedMicrobatch) -> torch.Tensor:
    """[N]: the place of each entry's token in its sequence."""
    has_prefix = bool((row.token_ids >= PREFIX[0]).any())
    return row.position_ids[row.asked][row.asked_index] + 1 - len(PREFIX) * has_prefix


def groups() -> list[TrajectoryGroup]:
    forked = make_trajectory(
        make_step([1, 2], [3, 4]),
        make_step([7], [8], context_change=ContextChange.FORK, truncated=True),
        privileged_ids=np.array(PREFIX, dtype=np.int32),
    )
    ended = make_trajectory(make_step([1], [2, 3, 4], terminated=True), reward=1.0, privileged_ids=np.array(PREFIX))
    return [make_group(forked, ended, replace(ended, outcome_reward=0.5))]


def scored(monkeypatch: pytest.MonkeyPatch, **critic: Any) -> tuple[dict[str, MadeUp], list[CreditedRows]]:
    """The models of a session of one rank that scored the groups, in two minibatches, and what it gave."""
    monkeypatch.setattr(scoring, "gather_shards", lambda shard: [shard])
    monkeypatch.setattr(scoring, "scatter_shards", lambda shards: shards[0])
    monkeypatch.setattr(scoring, "broadcast_object", lambda value: value)
    config = ExperimentConfig.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "nowhere"},
            "data": {"train": "rows.jsonl"},
            "packing": {"tokens_per_row": 12},
            "algorithm": {
                "advantage": {"name": "gae_token", "gamma": 0.9, "lam": 0.9},
                "critic": critic,
                "kl": {"coef": 0.1, "placement": "reward"},
                "minibatches": 2,
            },
        }
    )
    unused: Any = None
    models = {name: MadeUp(seed) for seed, name in enumerate(("policy", "reference", "critic"))}
    parts: dict[str, Any] = dict(models)
    batches = BatchBuilder(config, data_parallel_size=1, pad_multiple=2)
    session = Session(config=config, model_chunks=[], rollout=unused, sender=unused, batches=batches, **parts)
    batch = batches.build(groups(), step=1)
    shared = [
        SharedRows(part.per_data_rank[0], part.denominator, part.critic_rows[0] if part.critic_rows else None)
        for part in batch.minibatches
    ]
    credited, _ = score(session, shared, batch, on_policy=False)
    return models, credited


def columns(rows: list[PackedMicrobatch], *names: str) -> dict[tuple[int, int, int], list[float]]:
    """What stands in the columns at each trained token: (episode, step, place behind the prefix)."""
    found = {}
    for row in rows:
        places = places_behind_prefix(row)
        for index in row.loss_mask.nonzero().flatten().tolist():
            key = (int(row.trajectory_index[index]), int(row.step_index[index]), int(places[index]))
            found[key] = [float(getattr(row, name)[index]) for name in names]
    return found


def test_critic_rows_of_its_own_give_the_credit_of_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shared = scored(monkeypatch)
    _, separate = scored(monkeypatch, privileged="answer")
    assert len(shared) == len(separate) == 2
    for one, other in zip(shared, separate, strict=True):
        assert one.critic_rows is one.rows
        assert (other.denominator, other.num_values) == (one.denominator, one.num_values)
        of_policy = ("advantages", "old_logprobs", "reference_logprobs", "loss_weights", "rollout_logprobs")
        assert columns(other.rows, *of_policy) == columns(one.rows, *of_policy)
        of_critic = ("value_targets", "value_weights", "old_values")
        assert columns(other.critic_rows, *of_critic) == columns(one.rows, *of_critic)
        assert all(row.value_targets is None and row.old_values is None for row in other.rows)
    advantages = [value for part in separate for (value,) in columns(part.rows, "advantages").values()]
    assert len(advantages) == len(set(advantages)) == 9, "every token has a credit of its own"


def test_only_the_critic_sees_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    models, credited = scored(monkeypatch, privileged="answer")
    asked_of_policy = models["policy"].asked + models["reference"].asked
    for row in [*asked_of_policy, *(row for part in credited for row in part.rows)]:
        assert row.token_ids.max() < PREFIX[0]
        assert row.loss_mask.all(), "a marker stands only in the critic's rows"
    markers = 0
    for row in [*models["critic"].asked, *(row for part in credited for row in part.critic_rows)]:
        starts = row.node_bounds[:-1][row.node_parents < 0].tolist()[: -1 if row.num_padding else None]
        assert all(row.token_ids[start : start + 3].tolist() == PREFIX for start in starts)
        assert (row.position_ids[row.asked] >= len(PREFIX) - 1).all(), "nothing is read inside the prefix"
        markers += int((~row.loss_mask).sum())
    assert markers == 2, "one in the rows asked about, and the same in those trained"
