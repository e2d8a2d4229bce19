"""From groups to minibatches: denominators, drops, splits."""

import time

import numpy as np
import pytest
from made_records import make_group, make_step, make_trajectory, one_step_group

from megatron_agent.batching import build_batch
from megatron_agent.config import ExperimentConfig
from trajectory.steps import ContextChange, TrajectoryStatus


def config(tokens_per_row: int = 64, **algorithm) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "nowhere"},
            "data": {"train": "rows.jsonl"},
            "packing": {"tokens_per_row": tokens_per_row},
            "algorithm": algorithm,
        }
    )


def build(groups, *, data_parallel_size: int = 1, pad_multiple: int = 1, **options):
    return build_batch(groups, config(**options), data_parallel_size=data_parallel_size, pad_multiple=pad_multiple)


def rows(minibatch):
    return [row for shard in minibatch.per_data_rank for row in shard]


def loss_weight(minibatch) -> float:
    return sum(float(row.loss_weights.sum()) for row in rows(minibatch))


def test_the_denominator_counts_the_trained_tokens():
    """A response of 12 tokens of which 9 were sampled."""
    step = make_step([1, 2], range(9), forced=[7, 8, 9], terminated=True)
    batch = build([make_group(make_trajectory(step, reward=1), make_trajectory(step, reward=0))])
    (minibatch,) = batch.minibatches
    assert minibatch.denominator == 18
    assert sum(int(row.loss_mask.sum()) for row in rows(minibatch)) == 18
    assert batch.metrics["trained_tokens"] == 18


def test_token_and_trajectory_denominators():
    long = make_trajectory(make_step([1], range(6), terminated=True), reward=1)
    short = make_trajectory(make_step([1], range(2), terminated=True), reward=0)
    groups = [make_group(long, short)]
    (per_token,) = build(groups, loss={"denominator": "token"}).minibatches
    assert (per_token.denominator, loss_weight(per_token)) == (8, 8)
    (per_trajectory,) = build(groups, loss={"denominator": "trajectory"}).minibatches
    assert per_trajectory.denominator == 2
    assert loss_weight(per_trajectory) == pytest.approx(2)  # each trajectory's tokens weigh 1 together
    weights = {
        int(index): float(row.loss_weights[row.trajectory_index == index].sum())
        for row in rows(per_trajectory)
        for index in (0, 1)
    }
    assert weights == pytest.approx({0: 1, 1: 1})


def test_a_trajectory_of_several_samples_still_weighs_one():
    forked = [make_step([1], [2, 3]), make_step([4], [5], context_change=ContextChange.FORK, terminated=True)]
    groups = [make_group(make_trajectory(*forked, reward=1), *one_step_group(0).trajectories)]
    (minibatch,) = build(groups, loss={"denominator": "trajectory"}).minibatches
    assert loss_weight(minibatch) == pytest.approx(2)


def test_equal_rewards_count_in_the_denominator_without_being_packed():
    groups = [one_step_group(1, 1), one_step_group(1, 0)]
    batch = build(groups)
    (minibatch,) = batch.minibatches
    assert minibatch.denominator == 12
    assert sum(int(row.loss_mask.sum()) for row in rows(minibatch)) == 6
    assert {int(index) for row in rows(minibatch) for index in row.trajectory_index} == {2, 3}


@pytest.mark.parametrize("option", [{"kl": {"coef": 0.1}}, {"entropy_coef": 0.1}])
def test_equal_rewards_are_packed_where_other_terms_want_them(option):
    (minibatch,) = build([one_step_group(1, 1), one_step_group(1, 0)], **option).minibatches
    assert sum(int(row.loss_mask.sum()) for row in rows(minibatch)) == 12


def test_nothing_to_learn_is_no_update():
    batch = build([one_step_group(1, 1), one_step_group(0, 0)])
    assert batch.minibatches == []
    assert batch.untrained is not None, "trainer and fleet are compared all the same"
    (row,) = batch.untrained.per_data_rank[0]
    assert row.loss_mask.any()
    assert not row.advantages.any()
    failed = make_trajectory(make_step([1], [2]), status=TrajectoryStatus.ENV_FAILED)
    batch = build([make_group(failed, failed)])
    assert batch.minibatches == []
    assert batch.metrics == {"dropped_env_failed": 2}


@pytest.mark.parametrize("denominator", ["token", "trajectory"])
def test_minibatches_split_whole_trajectories_and_share_nothing(denominator):
    groups = [one_step_group(1, 0, num_tokens=2 + index) for index in range(5)]
    batch = build(groups, minibatches=3, loss={"denominator": denominator}, tokens_per_row=8)
    assert len(batch.minibatches) == 3
    members = [
        {int(index) for row in rows(minibatch) for index in row.trajectory_index} - {-1}
        for minibatch in batch.minibatches
    ]
    assert [sorted(part) for part in members] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    whole = build(groups, loss={"denominator": denominator}, tokens_per_row=8).minibatches[0]
    assert sum(part.denominator for part in batch.minibatches) == whole.denominator


def test_more_minibatches_than_trajectories():
    assert len(build([one_step_group(1, 0)], minibatches=4).minibatches) == 2


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3])
@pytest.mark.parametrize("tokens_per_row", [5, 16, 1000])
def test_any_split_has_the_same_terms(data_parallel_size, tokens_per_row):
    """What the loss sums over depends on neither rows nor ranks."""
    groups = [one_step_group(1, 0, num_tokens=2 + index) for index in range(5)]
    (minibatch,) = build(
        groups, data_parallel_size=data_parallel_size, tokens_per_row=tokens_per_row, pad_multiple=2
    ).minibatches
    terms = sorted(
        (int(index), float(advantage))
        for row in rows(minibatch)
        for index, advantage, mask in zip(row.trajectory_index, row.advantages, row.loss_mask, strict=True)
        if mask
    )
    expected = [(index, 1.0 if index % 2 == 0 else -1.0) for index in range(10) for _ in range(2 + index // 2)]
    assert [index for index, _ in terms] == [index for index, _ in expected]
    np.testing.assert_allclose([a for _, a in terms], [a for _, a in expected], rtol=1e-4)
    assert minibatch.denominator == len(expected)


def test_4096_trajectories_take_seconds():
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(256):
        trajectories = []
        for _ in range(16):
            context, steps = list(range(200)), []
            for number in range(4):
                said = list(range(int(rng.integers(20, 120))))
                steps.append(make_step(context, said, terminated=number == 3))
                context = [*context, *said, *range(30)]
            trajectories.append(make_trajectory(*steps, reward=float(rng.integers(2))))
        groups.append(make_group(*trajectories))
    started = time.process_time()
    batch = build(groups, data_parallel_size=8, tokens_per_row=4096)
    assert time.process_time() - started < 5
    assert batch.metrics["packed_tokens"] > 1_000_000
    assert batch.metrics["padding_frac"] < 0.01
