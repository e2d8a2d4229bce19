"""Every estimator on one group of three episodes, against values worked out by hand.

    episode   ending       trained tokens   rewards (outcome in the last)   return   observations
    A         terminated   2, 1, 2          0, -1/2 (failed tool), 3/2      1        start, shop, cart
    B         terminated   1                0                               0        start
    C         truncated    1, 0, 1, 1       0, 1/4, 0, 1/4                  1/2      start, wait, shop, shop

Some steps end in forced tokens, which get nothing; all of step 2 of C is forced. The mean return is 1/2, its standard
deviation sqrt(1/6). Nine trained tokens: five of A, one of B, three of C.
"""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from made_records import make_group, make_step, make_trajectory

from trajectory.advantages.inputs import EstimatorInputs, estimator_inputs
from trajectory.advantages.registry import compute_credit
from trajectory.advantages.shaping import normalise_rewards
from trajectory.steps import StopReason

HALF_STEPS = {"gamma": 0.5, "lam": 0.5}


def shown(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def inputs() -> EstimatorInputs:
    a = make_trajectory(
        make_step([1], [2, 3], observation=shown("start")),
        make_step([1, 2, 3, 4], [5], forced=[6, 7], reward=-0.5, observation=shown("shop"), info={"tool_errors": 1}),
        make_step([1, 9], [2, 3], forced=[4], reward=0.5, observation=shown("cart"), terminated=True),
        reward=1.0,
    )
    b = make_trajectory(make_step([1], [2], forced=[3], observation=shown("start"), terminated=True))
    c = make_trajectory(
        make_step([1], [2], observation=shown("start")),
        make_step([1, 2, 3], [], forced=[4, 5], reward=0.25, observation=shown("wait")),
        make_step([1, 2, 3, 4, 5, 6], [7], observation=shown("shop")),
        make_step([1, 2], [3], observation=shown("shop"), truncated=True, stop_reason=StopReason.MAX_STEPS),
        reward=0.25,
    )
    return replace(
        estimator_inputs([make_group(a, b, c)]),
        token_values=np.array([0.5, 0.75, 0.25, 1.0, 0.5, 0.25, 0.5, 0.5, 0.25]),
        bootstrap_values=np.array([0.0, 0.0, 1.0]),
        greedy_returns=np.array([0.25]),
    )


def expect(credit, a, b, c):
    np.testing.assert_allclose(credit.advantages, [*a, *b, *c], rtol=1e-9, atol=1e-12)


def test_grpo(inputs):
    expect(compute_credit("grpo", inputs, {"std": False}), [0.5] * 5, [-0.5], [0] * 3)
    expect(compute_credit("grpo", inputs, {"eps": 1e-15}), [sqrt(1.5)] * 5, [-sqrt(1.5)], [0] * 3)


def test_rloo(inputs):
    """The others' means are 1/4, 3/4 and 1/2."""
    expect(compute_credit("rloo", inputs, {}), [0.75] * 5, [-0.75], [0] * 3)


def test_reinforce(inputs):
    """Discounted returns of A: 1/8, 1/4, 3/2; of C: 5/32, 5/16, 1/8, 1/4. The sum over the 8 steps is 87/32."""
    expect(compute_credit("reinforce", inputs, {}), [1, 1, 1, 1.5, 1.5], [0], [0.5, 0.25, 0.25])
    discounted = [0.125, 0.125, 0.25, 1.5, 1.5], [0], [5 / 32, 0.125, 0.25]
    expect(compute_credit("reinforce", inputs, {"gamma": 0.5}), *discounted)
    less = [[value - 87 / 256 for value in part] for part in discounted]
    expect(compute_credit("reinforce", inputs, {"gamma": 0.5, "baseline": "batch"}), *less)


def test_reinforce_plus_plus(inputs):
    """Returns 1, 1, 1, 3/2, 3/2 | 0 | 1/2, 1/4, 1/4: the mean is 7/9, the deviation sqrt(21.875) / 9."""
    deviation = sqrt(21.875)
    expect(
        compute_credit("reinforce_plus_plus", inputs, {"eps": 1e-15}),
        [2 / deviation, 2 / deviation, 2 / deviation, 6.5 / deviation, 6.5 / deviation],
        [-7 / deviation],
        [-2.5 / deviation, -4.75 / deviation, -4.75 / deviation],
    )


def test_reinforce_plus_plus_baseline(inputs):
    """1/2 five times, -1/2 once, 0 three times: the mean is 2/9, the deviation sqrt(9.5) / 9."""
    deviation = sqrt(9.5)
    expect(
        compute_credit("reinforce_plus_plus_baseline", inputs, {"eps": 1e-15}),
        [2.5 / deviation] * 5,
        [-6.5 / deviation],
        [-2 / deviation] * 3,
    )


def test_reinforce_plus_plus_baseline_with_penalties(inputs):
    """A penalty of -1 on A's last token: discounted by 1/2 a token it is -1/16, -1/8, -1/4, -1/2, -1 on A's five, each
    beside 1/2. R and its mean are without it."""
    penalties = np.zeros(9)
    penalties[4] = -1.0
    step_rewards = inputs.step_rewards.copy()
    step_rewards[2] -= 1.0
    inputs = replace(inputs, token_penalties=penalties, step_rewards=step_rewards)
    sixteenths = np.array([7, 6, 4, 0, -8, -8, 0, 0, 0])  # the sum is 1, that of squares 229
    deviation = sqrt(229 / 9 - 1 / 81)
    expected = (sixteenths - 1 / 9) / deviation
    credit = compute_credit("reinforce_plus_plus_baseline", inputs, {"gamma": 0.5, "eps": 1e-15})
    expect(credit, expected[:5], expected[5:6], expected[6:])


def test_remax(inputs):
    expect(compute_credit("remax", inputs, {}), [0.75] * 5, [-0.25], [0.25] * 3)


def test_gae_step(inputs):
    """Deltas of A: -3/8, -1/4, 1/2; of C, whose forced step pays into the one before it: 0, -3/8, 1/2."""
    credit = compute_credit("gae_step", inputs, HALF_STEPS)
    expect(credit, [-0.40625, -0.40625, -0.125, 0.5, 0.5], [-0.25], [-0.0625, -0.25, 0.5])
    assert credit.value_mask.tolist() == [True, False, True, True, False, True, True, True, True]
    assert credit.value_targets[credit.value_mask].tolist() == [0.09375, 0.125, 1.5, 0.0, 0.4375, 0.25, 0.75]


def test_gae_token(inputs):
    """Deltas of A: -1/8, -5/8, -1/4, -3/4, 1; of C: 0, -3/8, 1/2."""
    credit = compute_credit("gae_token", inputs, HALF_STEPS)
    expect(credit, [-0.3046875, -0.71875, -0.375, -0.5, 1.0], [-0.25], [-0.0625, -0.25, 0.5])
    assert credit.value_targets.tolist() == [0.1953125, 0.03125, -0.125, 0.5, 1.5, 0.0, 0.4375, 0.25, 0.75]
    assert credit.value_mask is None


def test_gae_turn(inputs):
    """Deltas of A, 1 within an action and 1/2 between steps: 1/4, -5/8, -1/4, -1/2, 1."""
    credit = compute_credit("gae_turn", inputs, {"gamma_step": 0.5, "lam_step": 0.5})
    expect(credit, [-0.40625, -0.65625, -0.125, 0.5, 1.0], [-0.25], [-0.0625, -0.25, 0.5])
    assert credit.value_targets.tolist() == [0.09375, 0.09375, 0.125, 1.5, 1.5, 0.0, 0.4375, 0.25, 0.75]


def test_gigpo(inputs):
    """Returns from `start` on: 1, 0, 1/2; from `shop` on: 1 of A, 1/4 and 1/4 of C; the other two states are alone."""
    options = {"std": False, "step_norm": "mean", "step_weight": 2.0}
    expect(compute_credit("gigpo", inputs, options), [1.5, 1.5, 1.5, 0.5, 0.5], [-1.5], [0, -0.5, -0.5])
    expect(
        compute_credit("gigpo", inputs, {"eps": 1e-15}),
        [2 * sqrt(1.5), 2 * sqrt(1.5), sqrt(1.5) + sqrt(2), sqrt(1.5), sqrt(1.5)],
        [-2 * sqrt(1.5)],
        [0, -sqrt(0.5), -sqrt(0.5)],
    )


def test_gigpo_of_observations_that_are_alike():
    """`room 10 is open` has three of four words in common with `room 12 is open`, and none with `a lobby`."""
    options = {"std": False, "step_norm": "mean"}
    texts = ["room 10 is open", "room 12 is open", "a lobby"]
    episodes = [
        make_trajectory(make_step([1], [2], observation=shown(text), terminated=True), reward=reward)
        for text, reward in zip(texts, [1, 0, 2], strict=True)
    ]
    inputs = replace(estimator_inputs([make_group(*episodes)]), step_observations=texts)
    expect(compute_credit("gigpo", inputs, {**options, "similarity": 0.75}), [0.5], [-1.5], [1])
    expect(compute_credit("gigpo", inputs, {**options, "similarity": 0.76}), [0], [-1], [1])
    expect(compute_credit("gigpo", inputs, options), [0], [-1], [1])


def test_step_reward_group(inputs):
    """The eight step rewards have mean 3/16 and deviation sqrt(75) / 16."""
    sums = np.array([7, 7, 10, 21, 21, -3, -4, -2, 1])
    credit = compute_credit("step_reward_group", inputs, {"std": False})
    expect(credit, sums[:5] / 16, sums[5:6] / 16, sums[6:] / 16)
    credit = compute_credit("step_reward_group", inputs, {"eps": 1e-15})
    expect(credit, sums[:5] / sqrt(75), sums[5:6] / sqrt(75), sums[6:] / sqrt(75))


def test_opd(inputs):
    inputs = replace(inputs, old_logprobs=np.full(9, -1.0), teacher_logprobs=-np.arange(9) / 2)
    distilled = np.array([1, 0.5, 0, -0.5, -1, -1.5, -2, -2.5, -3])
    expect(compute_credit("opd", inputs, {}), distilled[:5], distilled[5:6], distilled[6:])
    credit = compute_credit("opd", inputs, {"task_weight": 0.5, "std": False})
    expect(credit, distilled[:5] + 0.25, distilled[5:6] - 0.25, distilled[6:])


@pytest.mark.parametrize(
    ("ending", "expected"), [("truncated", 0.7), ("terminated", 0.0), ("neither", 0.0), ("both", 0.0)]
)
@pytest.mark.parametrize("name", ["gae_step", "gae_token", "gae_turn"])
def test_a_cut_return_goes_on_with_the_critics_value(name, ending, expected):
    """gamma 1, lambda 1, all rewards 0, the value of the next observation 0.7. A final state has no next one, even
    where it is reached at the limit."""
    fields = {"terminated": ending in ("terminated", "both"), "truncated": ending in ("truncated", "both")}
    trajectory = make_trajectory(make_step([1], [2, 3]), make_step([1, 2, 3, 4], [5], forced=[6], **fields))
    inputs = replace(
        estimator_inputs([make_group(trajectory)]),
        token_values=np.array([0.1, 0.2, 0.3]),
        bootstrap_values=np.array([0.7]),
    )
    credit = compute_credit(name, inputs, {})
    assert credit.value_targets[2] == pytest.approx(expected, abs=1e-15)
    assert credit.value_targets[0] == pytest.approx(expected, abs=1e-15)
    assert credit.advantages[2] == pytest.approx(expected - 0.3)


def test_the_limit_may_fall_on_a_step_without_trained_tokens():
    steps = make_step([1], [2]), make_step([1, 2], [], forced=[3], reward=1.0, truncated=True)
    inputs = replace(
        estimator_inputs([make_group(make_trajectory(*steps))]),
        token_values=np.array([0.25]),
        bootstrap_values=np.array([0.5]),
    )
    for name in ("gae_step", "gae_token", "gae_turn"):
        assert compute_credit(name, inputs, {}).value_targets.tolist() == [1.5]


def test_a_first_step_without_trained_tokens_pays_into_the_next():
    steps = make_step([1], [], forced=[2], reward=1.0), make_step([1, 2], [3], reward=0.5, terminated=True)
    inputs = replace(estimator_inputs([make_group(make_trajectory(*steps))]), token_values=np.array([0.25]))
    for name in ("gae_step", "gae_token", "gae_turn"):
        assert compute_credit(name, inputs, {"gamma": 0.5}).advantages.tolist() == [1.25]


def test_rewards_of_the_group_normalised(inputs):
    """Step rewards times sqrt(6); the last steps take the mean, so that the returns are sqrt(3/2), -sqrt(3/2), 0."""
    shaped = normalise_rewards(inputs, "group", running=None, eps=1e-15)
    root = sqrt(6)
    expected = [0, -root / 2, root, -root / 2, 0, root / 4, 0, -root / 4]
    np.testing.assert_allclose(shaped.step_rewards, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(shaped.returns(), [sqrt(1.5), -sqrt(1.5), 0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(shaped.greedy_returns, [-root / 4], rtol=1e-9)
