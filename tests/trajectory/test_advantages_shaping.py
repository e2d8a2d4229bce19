"""What is done to rewards before credit, and to advantages after it."""

import json
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from made_records import make_group, make_step, make_trajectory, one_step_group

from trajectory.advantages.inputs import Credit, estimator_inputs
from trajectory.advantages.registry import compute_credit
from trajectory.advantages.shaping import RunningReturns, finish_advantages, normalise_rewards, overlong_penalties


def two_steps(first: float, second: float):
    return make_trajectory(
        make_step([1], [2], reward=first), make_step([1, 2, 3], [4, 5], reward=second, terminated=True)
    )


def test_returns_of_each_group_get_mean_0_and_deviation_1():
    """Returns 3 and 1, deviation 1; returns 0 and 6, deviation 3. The mean leaves each trajectory once."""
    groups = [make_group(two_steps(1, 2), two_steps(0, 1)), make_group(two_steps(0, 0), two_steps(3, 3))]
    shaped = normalise_rewards(estimator_inputs(groups), "group", running=None, eps=0.0)
    assert shaped.step_rewards.tolist() == [1, 0, 0, -1, 0, -1, 1, 0]
    assert shaped.returns().tolist() == [1, -1, -1, 1]


def test_returns_of_the_batch_get_mean_0_and_deviation_1():
    groups = [one_step_group(1, 1), one_step_group(5, 5)]
    shaped = normalise_rewards(estimator_inputs(groups), "batch", running=None, eps=0.0)
    assert shaped.returns().tolist() == [-1, -1, 1, 1]


@pytest.mark.parametrize("kind", ["group", "batch"])
def test_equal_returns_become_exactly_0_and_keep_what_their_steps_differ_by(kind):
    groups = [make_group(two_steps(0.1, 0.2), two_steps(0.2, 0.1), two_steps(0.0, 0.3))]
    shaped = normalise_rewards(estimator_inputs(groups), kind, running=None)
    assert shaped.returns().tolist() == [0, 0, 0]
    assert shaped.step_rewards.tolist() == [0.1, -0.1, 0.2, -0.2, 0.0, 0.0]


def test_normalised_rewards_leave_grpo_as_it_is():
    inputs = estimator_inputs([make_group(two_steps(1, 2), two_steps(0, 1), two_steps(0.5, 0))])
    before = compute_credit("grpo", inputs, {}).advantages
    for kind in ("group", "batch"):
        shaped = normalise_rewards(inputs, kind, running=None)
        np.testing.assert_allclose(compute_credit("grpo", shaped, {}).advantages, before, rtol=1e-5)


def test_penalties_keep_their_scale():
    """Returns without penalties are 3 and 1 of deviation 1 around 2; -0.5 on the first token is then still -0.5."""
    inputs = estimator_inputs([make_group(two_steps(1, 2), two_steps(0, 1))])
    penalties = np.array([-0.5, 0, 0, 0, 0, 0])
    inputs = replace(inputs, token_penalties=penalties, step_rewards=inputs.step_rewards + np.array([-0.5, 0, 0, 0]))
    for kind in ("group", "batch"):
        shaped = normalise_rewards(inputs, kind, running=None, eps=0.0)
        assert shaped.step_rewards.tolist() == [0.5, 0, 0, -1]
        assert shaped.token_rewards().tolist() == [0.5, 0, 0, 0, 0, -1]
    shaped = normalise_rewards(inputs, "running_std", running=RunningReturns(), eps=0.0)
    assert shaped.step_rewards.tolist() == [0.5, 2, 0, 1]


@pytest.mark.parametrize("kind", ["group", "batch", "running_std"])
def test_greedy_returns_are_on_the_scale_of_the_others(kind):
    """What a sampled episode is better by than the greedy one is divided like its reward; deviation 1 and 3, or 2."""
    groups = [one_step_group(3, 1, num_tokens=1), one_step_group(0, 6, num_tokens=1)]
    inputs = replace(estimator_inputs(groups), greedy_returns=np.array([2.0, 3.0]))
    shaped = normalise_rewards(inputs, kind, running=RunningReturns(), eps=0.0)
    of_batch = sqrt((0.5**2 + 1.5**2 + 2.5**2 + 3.5**2) / 4)
    scale = np.array([1, 1, 3, 3]) if kind == "group" else of_batch
    expected = np.array([1, -1, -3, 3]) / scale
    np.testing.assert_allclose(compute_credit("remax", shaped, {}).advantages, expected, rtol=1e-12)


def test_none_changes_nothing():
    inputs = estimator_inputs([one_step_group(0, 1)])
    assert normalise_rewards(inputs, "none", running=None) is inputs


def test_running_std_is_of_all_returns_so_far_and_shifts_nothing():
    """After 1 and 3 the deviation is 1; after 1, 3, 5, 7 it is sqrt(5)."""
    running = RunningReturns()
    first = normalise_rewards(estimator_inputs([one_step_group(1, 3)]), "running_std", running=running, eps=0.0)
    assert first.step_rewards.tolist() == [1, 3]
    second = normalise_rewards(estimator_inputs([one_step_group(5, 7)]), "running_std", running=running, eps=0.0)
    np.testing.assert_allclose(second.step_rewards, [sqrt(5), 7 / sqrt(5)])


def test_running_std_divides_nothing_while_all_returns_are_equal():
    running = RunningReturns()
    for _ in range(3):
        shaped = normalise_rewards(estimator_inputs([one_step_group(*[0.1] * 7)]), "running_std", running=running)
        assert shaped.step_rewards.tolist() == [0.1] * 7


def test_running_returns_of_batches_are_those_of_all_at_once():
    """Far from 0, where a sum of squares would lose the deviation; and through JSON in between, as on a resume."""
    values = 1e6 + np.random.default_rng(0).normal(size=103)
    running = RunningReturns()
    for part in np.split(values, [1, 1, 40]):
        running.update(part)
        resumed = RunningReturns()
        resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
        assert resumed.std == running.std
        running = resumed
    assert running.std == pytest.approx(values.std(), rel=1e-9)


def test_overlong_penalties():
    """100 tokens at most, 20 of them the buffer: from 80 tokens on each costs a twentieth of the penalty."""
    penalties = overlong_penalties(np.array([0, 80, 81, 90, 100, 120]), max_tokens=100, buffer_tokens=20, penalty=0.5)
    np.testing.assert_allclose(penalties, [0, 0, -0.025, -0.25, -0.5, -0.5])


def finished(advantages, **options):
    """Of two trajectories of two steps, 1 and 2 trained tokens, and of one step of 3."""
    long, short = two_steps(0, 0), make_trajectory(make_step([1], [2, 3, 4], terminated=True))
    inputs = estimator_inputs([make_group(long, short)])
    settings = {"whiten": False, "clip": None, "per_step": False, **options}
    credit = Credit(advantages=np.array(advantages, dtype=float), value_targets=np.arange(6.0))
    done = finish_advantages(credit, inputs, **settings)
    assert done.value_targets is credit.value_targets
    return done.advantages.tolist()


def test_nothing_asked_for_changes_nothing():
    assert finished([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]


def test_per_step_divides_by_the_number_of_steps():
    assert finished([2, 2, 2, 2, 2, 2], per_step=True) == [1, 1, 1, 2, 2, 2]


def test_whitening_is_over_all_trained_tokens():
    """Mean 1, deviation 2."""
    assert finished([3, 3, 3, -1, -1, -1], whiten=True, eps=0.0) == [1, 1, 1, -1, -1, -1]
    assert finished([0.1] * 6, whiten=True) == [0] * 6


def test_clipping():
    assert finished([-3, -1, 0, 1, 2, 3], clip=1.5) == [-1.5, -1, 0, 1, 1.5, 1.5]


def test_first_per_step_then_whitening_then_clipping():
    """4, 4, 4 of two steps become 2, 2, 2; beside 0, 0, 0 that is 1, 1, 1 and -1, -1, -1 whitened, then 0.5."""
    assert finished([4, 4, 4, 0, 0, 0], per_step=True, whiten=True, clip=0.5, eps=0.0) == [0.5] * 3 + [-0.5] * 3
    assert finished([2, 2, 2, 1, 1, 1], per_step=True, whiten=True, clip=0.5) == [0] * 6
