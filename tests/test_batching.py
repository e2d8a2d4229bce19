"""From groups to minibatches: denominators, drops, splits."""

import json
import time

import numpy as np
import pytest
import torch
from made_records import make_group, make_step, make_trajectory, one_step_group

from megatron_agent.batching import BatchBuilder
from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError
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
    builder = BatchBuilder(config(**options), data_parallel_size=data_parallel_size, pad_multiple=pad_multiple)
    return builder.build(groups, step=1)


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


def test_an_estimator_that_gives_nan_ends_the_run_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "nan_credit.py").write_text("def credit(inputs):\n    return inputs.step_rewards * float('nan')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^algorithm\.advantage\.name: .*'nan_credit:credit' gave .* not finite"):
        build([one_step_group(1, 0)], advantage={"name": "nan_credit:credit"})


def test_shared_tokens_are_counted_as_often_as_they_are_trained():
    """Two episodes of 4 + 2 tokens with one prompt: 12 tokens, of which the model reads 8."""
    pair = [make_trajectory(make_step([1, 2, 3, 4], [5 + n, 6], terminated=True), reward=n) for n in range(2)]
    metrics = build([make_group(*pair)]).metrics
    assert (metrics["sample_tokens"], metrics["packed_tokens"]) == (12, 8)
    assert metrics["shared_frac"] == pytest.approx(1 / 3)
    nothing = build([one_step_group(1, 1)]).metrics
    assert nothing["sample_tokens"] == nothing["shared_frac"] == 0


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


@pytest.mark.parametrize(
    "option", [{"kl": {"coef": 0.1}}, {"entropy_coef": 0.1}, {"teacher": {"path": "t", "top_k": 4}}]
)
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


def test_step_group_and_constant_denominators():
    long = make_trajectory(
        make_step([1], range(6)), make_step([*range(1), *range(6), 9], [1, 2], terminated=True), reward=1
    )
    short = make_trajectory(make_step([1], range(2), terminated=True), reward=0)
    groups = [make_group(long, short), one_step_group(1, 0, num_tokens=5)]

    def built(**loss):
        (minibatch,) = build(groups, loss=loss).minibatches
        return minibatch.denominator, loss_weight(minibatch)

    assert built(denominator="step") == (5, pytest.approx(5))
    assert built(denominator="prompt_group") == (2, pytest.approx(2))
    assert built(denominator="constant", constant_tokens=100) == (400, 20)
    assert built(denominator="constant")[0] == 4 * 8 * 256  # agent.max_steps x agent.max_response_tokens


def test_a_minibatch_counts_its_own_part_of_a_group():
    groups = [one_step_group(1, 0, 1, num_tokens=4)]
    first, second = build(groups, minibatches=2, loss={"denominator": "prompt_group"}).minibatches
    assert (first.denominator, loss_weight(first)) == (1, pytest.approx(1))
    assert (second.denominator, loss_weight(second)) == (1, pytest.approx(1))


def with_critic(**options):
    return BatchBuilder(
        config(advantage={"name": "gae_token"}, critic={"lr": 1e-3}, **options),
        data_parallel_size=2,
        pad_multiple=2,
    )


def forked_and_truncated():
    """Values of the states before tokens 0, 1 | 2 | 3 of the first trajectory, 4, 5, 6 of the second."""
    forked = make_trajectory(
        make_step([1, 2], [3, 4]),
        make_step([1, 2, 3, 4, 5], [6]),
        make_step([7], [8], context_change=ContextChange.FORK, truncated=True),
    )
    return [make_group(forked, make_trajectory(make_step([1], [2, 3, 4], terminated=True), reward=1.0))]


def test_credit_that_needs_scores_waits_for_them():
    builder = with_critic(minibatches=2, tokens_per_row=6)
    batch = builder.build(forked_and_truncated(), step=1)
    assert len(batch.minibatches) == 2
    assert not any(row.advantages.any() for minibatch in batch.minibatches for row in rows(minibatch))
    value_of = {(0, 0, 2): 0.1, (0, 0, 3): 0.2, (0, 1, 5): 0.3, (0, 2, 1): 0.4, (0, -1, 2): 0.7}
    value_of |= {(1, 0, 1): 0.5, (1, 0, 2): 0.6, (1, 0, 3): 0.8}
    scores = [
        [[{"values": scored(row, value_of)} for row in shard] for shard in minibatch.per_data_rank]
        for minibatch in batch.minibatches
    ]
    credit, metrics = builder.give_credit(batch, scores)
    found = {}
    for minibatch, (shards, num_values) in zip(batch.minibatches, credit, strict=True):
        own = [
            (row, given)
            for shard, many in zip(minibatch.per_data_rank, shards, strict=False)
            for row, given in zip(shard, many, strict=False)
        ]
        assert num_values == sum(int(row.loss_mask.sum()) for row, _ in own)
        for row, given in own:
            for key, place in keys_of(row):
                if not row.loss_mask[place]:
                    assert given.value_weights[place] == 0, "the marker is not trained"
                    continue
                found[key] = (round(float(given.advantages[place]), 5), round(float(given.value_targets[place]), 5))
    assert found == {
        (0, 0, 2): (0.6, 0.7), (0, 0, 3): (0.5, 0.7), (0, 1, 5): (0.4, 0.7), (0, 2, 1): (0.3, 0.7),
        (1, 0, 1): (0.5, 1.0), (1, 0, 2): (0.4, 1.0), (1, 0, 3): (0.2, 1.0),
    }  # fmt: skip
    assert metrics["advantage_abs_max"] == pytest.approx(0.6)


def keys_of(row):
    """(trajectory, step, position in its sequence) of each entry that is about something, and its number."""
    positions = row.position_ids[row.asked][row.asked_index] + 1
    for place in (row.trajectory_index >= 0).nonzero().flatten().tolist():
        yield (int(row.trajectory_index[place]), int(row.step_index[place]), int(positions[place])), place


def scored(row, value_of):
    values = torch.full((len(row.loss_mask),), 99.0)
    for key, place in keys_of(row):
        values[place] = value_of[key]
    return values


def test_running_statistics_survive_a_restart():
    options = {"reward": {"normalise": "running_std"}}
    first = BatchBuilder(config(**options), data_parallel_size=1, pad_multiple=1)
    first.build([one_step_group(4, 0)], step=1)
    second = BatchBuilder(config(**options), data_parallel_size=1, pad_multiple=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for builder in (first, second):
        builder.build([one_step_group(1, 0)], step=2)
    assert first.state_dict() == second.state_dict()
