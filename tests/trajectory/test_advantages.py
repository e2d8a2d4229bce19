"""Credit: hand-computed advantages, one vote per trajectory."""

import numpy as np
import pytest
from made_records import make_group, make_step, make_trajectory, one_step_group

from trajectory.advantages.inputs import estimator_inputs
from trajectory.advantages.registry import compute_advantages
from trajectory.samples import merge_steps
from trajectory.steps import ContextChange


def three_forked_steps():
    """Three steps whose history was rewritten each time: three samples."""
    return [
        make_step([1, 2], [3, 4]),
        make_step([1, 5], [6], context_change=ContextChange.FORK),
        make_step([1, 7], [8, 9, 10], forced=[11], context_change=ContextChange.FORK, terminated=True),
    ]


def test_a_trajectory_in_three_samples_has_one_vote_in_the_baseline():
    won = make_trajectory(*three_forked_steps(), reward=1.0)
    lost = make_trajectory(make_step([1, 2], [3], terminated=True), reward=0.0)
    inputs = estimator_inputs([make_group(won, lost)])
    advantages = compute_advantages("grpo", inputs, std=False)
    assert advantages.tolist() == [0.5, 0.5, 0.5, -0.5]  # baseline 0.5; 0.75 would give 0.25 and -0.75


def test_the_same_scalar_is_on_every_trained_token_of_all_steps():
    won = make_trajectory(*three_forked_steps(), reward=1.0)
    lost = make_trajectory(make_step([1, 2], [3], terminated=True), reward=0.0)
    advantages = compute_advantages("grpo", estimator_inputs([make_group(won, lost)]), std=False)
    samples = merge_steps(won, trajectory_index=0, step_advantages=advantages[:3])
    assert [sample.advantages.tolist() for sample in samples] == [
        [0, 0, 0.5, 0.5],
        [0, 0, 0.5],
        [0, 0, 0.5, 0.5, 0.5, 0],
    ]


def test_standard_deviation_is_the_groups():
    inputs = estimator_inputs([one_step_group(1, 0, 0, 0), one_step_group(3, 1)])
    deviation = np.sqrt(3) / 4
    expected = [0.75 / deviation, *[-0.25 / deviation] * 3, 1.0, -1.0]
    np.testing.assert_allclose(compute_advantages("grpo", inputs, eps=1e-12), expected, rtol=1e-9)


def test_step_rewards_and_the_outcome_add_up_once():
    steps = [make_step([1], [2], reward=0.25), make_step([1, 2, 3], [4], reward=0.5, terminated=True)]
    inputs = estimator_inputs([make_group(make_trajectory(*steps, reward=1.0), make_trajectory(steps[1]))])
    assert inputs.step_rewards.tolist() == [0.25, 1.5, 0.5]
    assert inputs.returns().tolist() == [1.75, 0.5]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_returns_give_exactly_zero(reward):
    """Rounding in the mean must not become an advantage of full size through the division."""
    assert not compute_advantages("grpo", estimator_inputs([one_step_group(*[reward] * 7)])).any()


def test_sums_in_another_order_are_equal_returns():
    split = make_trajectory(make_step([1], [2], reward=0.1), make_step([1, 2], [3], reward=0.2, terminated=True))
    whole = make_trajectory(make_step([1], [2], reward=0.3, terminated=True))
    assert 0.1 + 0.2 != 0.3
    assert not compute_advantages("grpo", estimator_inputs([make_group(split, whole)])).any()


def test_inputs_say_which_step_ended_how():
    steps = [make_step([1], [2, 3]), make_step([1, 2, 3, 4], [5], forced=[6], truncated=True)]
    inputs = estimator_inputs([make_group(make_trajectory(*steps)), one_step_group(0)])
    assert inputs.step_truncated.tolist() == [False, True, False]
    assert inputs.step_terminated.tolist() == [False, False, True]
    assert inputs.step_num_tokens.tolist() == [2, 1, 3]
    assert inputs.step_trajectory.tolist() == [0, 0, 1]
    assert inputs.trajectory_group.tolist() == [0, 1]


def test_an_unknown_estimator_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown advantage estimator 'grp'; known: .*grpo"):
        compute_advantages("grp", estimator_inputs([one_step_group(0, 1)]))
