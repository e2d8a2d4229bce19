"""Credit: the arrays that estimators read, one vote per trajectory, what the registry refuses."""

from dataclasses import replace

import numpy as np
import pytest
from made_records import make_group, make_step, make_trajectory, one_step_group

from trajectory.advantages.inputs import Credit, estimator_inputs
from trajectory.advantages.registry import ESTIMATORS, NEEDS, EstimatorOutputError, compute_credit
from trajectory.steps import ContextChange


def three_forked_steps():
    """Three steps whose history was rewritten each time: three samples."""
    return [
        make_step([1, 2], [3, 4]),
        make_step([1, 5], [6], context_change=ContextChange.FORK),
        make_step([1, 7], [8, 9, 10], forced=[11], context_change=ContextChange.FORK, terminated=True),
    ]


def won_and_lost():
    won = make_trajectory(*three_forked_steps(), reward=1.0)
    lost = make_trajectory(make_step([1, 2], [3], terminated=True), reward=0.0)
    return estimator_inputs([make_group(won, lost)])


def test_a_trajectory_in_three_samples_has_one_vote_in_the_baseline():
    """The baseline is 0.5; three votes would make it 0.75."""
    credit = compute_credit("grpo", won_and_lost(), {"std": False})
    assert set(credit.advantages[:6]) == {0.5}
    assert credit.advantages[6:].tolist() == [-0.5]


def test_the_same_scalar_is_on_every_trained_token_of_all_three_steps():
    """By each step's own mask: two tokens, one, and three with a forced one behind them that has no entry."""
    inputs = won_and_lost()
    credit = compute_credit("grpo", inputs, {"std": False})
    assert inputs.token_step().tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert credit.advantages.tolist() == [0.5] * 6 + [-0.5]
    assert credit.value_targets is None


def test_standard_deviation_is_the_groups():
    inputs = estimator_inputs([one_step_group(1, 0, 0, 0, num_tokens=1), one_step_group(3, 1, num_tokens=1)])
    deviation = np.sqrt(3) / 4
    expected = [0.75 / deviation, *[-0.25 / deviation] * 3, 1.0, -1.0]
    np.testing.assert_allclose(compute_credit("grpo", inputs, {"eps": 1e-12}).advantages, expected, rtol=1e-9)


def test_step_rewards_and_the_outcome_add_up_once():
    steps = [make_step([1], [2], reward=0.25), make_step([1, 2, 3], [4], reward=0.5, terminated=True)]
    inputs = estimator_inputs([make_group(make_trajectory(*steps, reward=1.0), make_trajectory(steps[1]))])
    assert inputs.step_rewards.tolist() == [0.25, 1.5, 0.5]
    assert inputs.returns().tolist() == [1.75, 0.5]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo", "step_reward_group", "reinforce_plus_plus_baseline"])
def test_equal_returns_give_exactly_zero(name, reward):
    """Rounding in the mean must not become an advantage of full size through the division."""
    assert not compute_credit(name, estimator_inputs([one_step_group(*[reward] * 7)]), {}).advantages.any()


def test_sums_in_another_order_are_equal_returns():
    split = make_trajectory(make_step([1], [2], reward=0.1), make_step([1, 2], [3], reward=0.2, terminated=True))
    whole = make_trajectory(make_step([1], [2], reward=0.3, terminated=True))
    assert 0.1 + 0.2 != 0.3
    assert not compute_credit("grpo", estimator_inputs([make_group(split, whole)]), {}).advantages.any()


def test_inputs_say_which_step_ended_how():
    steps = [make_step([1], [2, 3]), make_step([1, 2, 3, 4], [5], forced=[6], truncated=True)]
    inputs = estimator_inputs([make_group(make_trajectory(*steps)), one_step_group(0)])
    assert inputs.step_truncated.tolist() == [False, True, False]
    assert inputs.step_terminated.tolist() == [False, False, True]
    assert inputs.step_num_tokens.tolist() == [2, 1, 3]
    assert inputs.step_trajectory.tolist() == [0, 0, 1]
    assert inputs.trajectory_group.tolist() == [0, 1]


def test_a_steps_reward_is_on_its_last_trained_token_beside_the_penalties():
    """The first step has no trained token: its 8 goes to the first there is. The third one's 2 goes to the one before
    it. Penalties -1, -2, -4 are in the rewards of their steps."""
    steps = [
        make_step([1], [], forced=[2], reward=8.0),
        make_step([1, 2], [3, 4], reward=1.0),
        make_step([1, 2, 3, 4], [], forced=[5], reward=2.0),
        make_step([1, 6], [7], reward=0.5, terminated=True),
    ]
    inputs = replace(
        estimator_inputs([make_group(make_trajectory(*steps))]), token_penalties=np.array([-1.0, -2.0, -4.0])
    )
    inputs = replace(inputs, step_rewards=inputs.step_rewards + np.array([0.0, -3.0, 0.0, -4.0]))
    assert inputs.token_rewards().tolist() == [7.0, 1.0, -3.5]
    assert inputs.token_penalties is not None
    assert inputs.token_penalties.tolist() == [-1.0, -2.0, -4.0]


def test_an_unknown_estimator_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown advantage estimator 'grp'; known: .*grpo"):
        compute_credit("grp", estimator_inputs([one_step_group(0, 1)]), {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gae_step", r"reads token_values, and there is none: set algorithm\.critic"),
        ("gae_token", r"reads token_values, and there is none: set algorithm\.critic"),
        ("gae_turn", r"reads token_values, and there is none: set algorithm\.critic"),
        ("opd", r"reads teacher_logprobs, and there is none: set algorithm\.teacher"),
        ("remax", r"reads greedy_returns, and there is none: every prompt needs a greedy episode"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(name, message):
    with pytest.raises(ValueError, match=message):
        compute_credit(name, estimator_inputs([one_step_group(0, 1)]), {})


def test_a_truncated_episode_needs_the_value_of_what_came_next():
    cut = make_trajectory(make_step([1], [2], truncated=True))
    inputs = replace(estimator_inputs([make_group(cut)]), token_values=np.zeros(1))
    with pytest.raises(ValueError, match=r"reads bootstrap_values, and there is none: set algorithm\.critic"):
        compute_credit("gae_token", inputs, {})


def test_needs_are_of_estimators_there_are():
    assert set(NEEDS) <= set(ESTIMATORS)
    assert set(NEEDS.values()) == {"group", "critic", "teacher", "greedy"}


@pytest.fixture
def own_estimator(tmp_path, monkeypatch):
    """A function to write one's own estimator with; gives the name to call it by."""

    def write(body: str) -> str:
        (tmp_path / "own_credit.py").write_text(f"import numpy as np\n\n\ndef own(inputs, *, k=1.0):\n    {body}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "own_credit", raising=False)
        return "own_credit:own"

    return write


def test_an_estimator_of_ones_own(own_estimator):
    credit = compute_credit(own_estimator("return k * inputs.step_rewards"), won_and_lost(), {"k": 3.0})
    assert isinstance(credit, Credit)
    assert credit.advantages.tolist() == [0, 0, 0, 3, 3, 3, 0]


def test_an_own_estimators_array_is_of_steps(own_estimator):
    """One of tokens could not be told from it where there are as many steps as tokens."""
    name = own_estimator("return np.zeros(inputs.num_tokens)")
    with pytest.raises(ValueError, match=r"one advantage per step \(4\), and those of single tokens .* Credit"):
        compute_credit(name, won_and_lost(), {})


def test_credit_has_one_entry_for_each_trained_token(own_estimator):
    name = own_estimator("from trajectory.advantages.inputs import Credit; return Credit(advantages=np.zeros(3))")
    with pytest.raises(ValueError, match=r"advantages of shape \(3,\); there is one per trained token \(7\)"):
        compute_credit(name, won_and_lost(), {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "return np.array([0, 0, np.nan, np.inf])",
            "advantages that are not finite: 2 of 4, one per step; the first is nan, in step 2 of episode 0 of the",
        ),
        (
            "from trajectory.advantages.inputs import Credit; "
            "return Credit(advantages=np.where(np.arange(7) == 4, -np.inf, 0.0))",
            "advantages that are not finite: 1 of 7, one per trained token; the first is -inf, in step 2 of episode 0",
        ),
        (
            "from trajectory.advantages.inputs import Credit; a = np.zeros(7); "
            "return Credit(advantages=a, value_targets=np.where(np.arange(7) == 4, np.nan, a))",
            "value_targets that are not finite: 1 of 7, one per trained token; the first is nan, in step 2 of",
        ),
    ],
)
def test_credit_is_finite(own_estimator, body, said):
    """The tokens 3 to 5 are those of the third step of the first episode."""
    name = own_estimator(body)
    with pytest.raises(EstimatorOutputError, match=f"estimator '{name}' gave {said}"):
        compute_credit(name, won_and_lost(), {})


def test_targets_that_no_critic_learns_may_be_anything(own_estimator):
    name = own_estimator(
        "from trajectory.advantages.inputs import Credit; a = np.zeros(7); "
        "return Credit(advantages=a, value_targets=a + np.nan, value_mask=a > 0)"
    )
    assert not compute_credit(name, won_and_lost(), {}).advantages.any()
