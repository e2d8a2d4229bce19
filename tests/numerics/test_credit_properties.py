"""What must hold of advantages whatever the batch: order, shifts and scales of rewards, equal rewards, finiteness."""

import time
from dataclasses import replace

import numpy as np
import pytest
from credit_cases import BatchCase, EpisodeCase, StepCase, TokenCase
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectory.advantages.inputs import EstimatorInputs
from trajectory.advantages.registry import ESTIMATORS, NEEDS, compute_credit

several = settings(deadline=None, max_examples=25)

GROUP_RELATIVE = sorted(name for name, need in NEEDS.items() if need == "group")
EXACT = {"eps": 1e-15}
INVARIANT_TO_OUTCOME_SHIFTS = [
    ("grpo", {}),
    ("grpo", {"std": False}),
    ("rloo", {}),
    ("remax", {}),
    ("gigpo", {}),
    ("reinforce_plus_plus_baseline", {}),
    ("reinforce", {"baseline": "batch"}),
    ("reinforce_plus_plus", {}),
    ("opd", {"task_weight": 1.0}),
]
"""With gamma 1 the constant reaches every step and token undiscounted, so that a batch baseline takes it out too."""
INVARIANT_TO_SCALES = [
    ("grpo", EXACT),
    ("gigpo", EXACT),
    ("step_reward_group", EXACT),
    ("reinforce_plus_plus", EXACT),
    ("reinforce_plus_plus_baseline", EXACT),
]
LINEAR_IN_SCALES = [
    ("grpo", {"std": False}),
    ("rloo", {}),
    ("reinforce", {}),
    ("reinforce", {"baseline": "batch", "gamma": 0.9}),
    ("remax", {}),
    ("gigpo", {"std": False, "step_norm": "mean"}),
    ("step_reward_group", {"std": False}),
    ("gae_step", {"gamma": 0.9, "lam": 0.9}),
    ("gae_token", {"gamma": 0.9, "lam": 0.9}),
    ("gae_turn", {"gamma": 0.9, "lam": 0.9}),
]

quarters = st.integers(-8, 8).map(lambda n: n / 4)
"""Rewards whose sums are exact: equal returns are equal, and unequal ones differ by more than rounding."""


@st.composite
def batches(draw, rewards=quarters, penalties=False) -> BatchCase:
    """1 to 3 groups of 2 to 4 episodes, shuffled; each of 1 to 4 steps, of which one at least has trained tokens."""

    def a_token() -> TokenCase:
        penalty = draw(quarters) if penalties else 0.0
        return TokenCase(value=draw(quarters), penalty=penalty, old=draw(quarters), teacher=draw(quarters))

    def an_episode(group: int) -> EpisodeCase:
        counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
        steps = [
            StepCase(
                reward=draw(rewards),
                tokens=[a_token() for _ in range(count)],
                observation=draw(st.sampled_from(["hall", "attic", "cellar"])),
            )
            for count in counts
        ]
        ending = draw(st.sampled_from(["terminated", "truncated", "neither"]))
        return EpisodeCase(steps=steps, group=group, outcome=draw(rewards), ending=ending, bootstrap=draw(quarters))

    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    owners = draw(st.permutations([group for group, size in enumerate(sizes) for _ in range(size)]))
    return BatchCase(episodes=[an_episode(group) for group in owners], greedy=[draw(rewards) for _ in sizes])


def close(actual: list[list[float]], expected: list[list[float]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@several
@given(batch=batches(penalties=True), data=st.data())
def test_the_order_of_episodes_and_groups_is_nothing(name, batch, data):
    order = data.draw(st.permutations(range(len(batch.episodes))))
    group_order = data.draw(st.permutations(range(len(batch.greedy))))
    before = batch.advantages(name)
    close(batch.permuted(order, group_order).advantages(name), [before[i] for i in order])


@pytest.mark.parametrize(("name", "options"), INVARIANT_TO_OUTCOME_SHIFTS)
@several
@given(batch=batches(), added=quarters)
def test_a_constant_on_all_outcomes_is_nothing(name, options, batch, added):
    close(batch.with_outcome(added).advantages(name, **options), batch.advantages(name, **options))


@several
@given(batch=batches(), added=quarters)
def test_a_constant_on_all_step_rewards_is_nothing_to_process_rewards(batch, added):
    """An outcome is one of the rewards that are compared, so there it is a constant on all of them that drops out."""
    inputs = batch.inputs()
    before = compute_credit("step_reward_group", inputs, {}).advantages
    after = compute_credit("step_reward_group", replace(inputs, step_rewards=inputs.step_rewards + added), {})
    np.testing.assert_allclose(after.advantages, before, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "options"), INVARIANT_TO_SCALES)
@several
@given(batch=batches(), factor=st.sampled_from([0.25, 2.0, 3.0, 100.0]))
def test_a_scale_of_the_rewards_divides_out(name, options, batch, factor):
    close(batch.scaled(factor).advantages(name, **options), batch.advantages(name, **options))


@pytest.mark.parametrize(("name", "options"), LINEAR_IN_SCALES)
@several
@given(batch=batches(), factor=st.sampled_from([0.25, 2.0, 3.0, 100.0]))
def test_a_scale_of_the_rewards_is_one_of_the_advantages(name, options, batch, factor):
    scaled = [[factor * value for value in tokens] for tokens in batch.advantages(name, **options)]
    close(batch.scaled(factor).advantages(name, **options), scaled)


@pytest.mark.parametrize("name", [*GROUP_RELATIVE, "remax", "reinforce_plus_plus"])
@several
@given(batch=batches(), reward=st.floats(-1e6, 1e6), num_steps=st.integers(1, 4))
def test_equal_rewards_give_exactly_zero(name, batch, reward, num_steps):
    """Rounding of sums and means must not become an advantage of full size through a division."""
    steps = [StepCase(reward=0.0 if t < num_steps - 1 else reward, observation=str(t)) for t in range(num_steps)]
    if name == "step_reward_group":
        steps = [replace(step, reward=reward) for step in steps]
    episodes = [EpisodeCase(steps=steps, group=episode.group) for episode in batch.episodes]
    equal = BatchCase(episodes=episodes, greedy=[reward] * len(batch.greedy))
    assert not equal.credit(name).advantages.any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo"])
@several
@given(batch=batches(rewards=st.sampled_from([0.1, 0.2, 0.3, 1 / 3])))
def test_equal_returns_of_one_group_give_exactly_zero_there(name, batch):
    """Whatever the other groups' are."""
    episodes = [
        episode if episode.group else EpisodeCase(steps=[StepCase(reward=0.1), StepCase(reward=0.2, observation="b")])
        for episode in batch.episodes
    ]
    advantages = BatchCase(episodes=episodes, greedy=batch.greedy).advantages(name)
    assert all(not any(a) for a, episode in zip(advantages, episodes, strict=True) if episode.group == 0)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@several
@given(batch=batches(rewards=st.floats(-1e300, 1e300)))
def test_group_relative_advantages_are_finite(name, batch):
    assert np.isfinite(batch.credit(name).advantages).all()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@several
@given(batch=batches(penalties=True))
def test_there_is_one_finite_advantage_for_each_trained_token(name, batch):
    advantages = batch.credit(name).advantages
    assert advantages.shape == (sum(len(episode.tokens) for episode in batch.episodes),)
    assert np.isfinite(advantages).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo", "remax", "opd"])
@several
@given(batch=batches())
def test_inputs_stay_as_they_were(name, batch):
    inputs = batch.inputs()
    compute_credit(name, inputs, {})
    for field in ("step_rewards", "token_penalties", "token_values", "old_logprobs", "teacher_logprobs"):
        np.testing.assert_array_equal(getattr(inputs, field), getattr(batch.inputs(), field))


@several
@given(batch=batches(penalties=True), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_turn_with_one_pair_is_gae_token(batch, gamma, lam):
    pairs = {"gamma": gamma, "lam": lam, "gamma_step": gamma, "lam_step": lam}
    turn, token = batch.credit("gae_turn", **pairs), batch.credit("gae_token", gamma=gamma, lam=lam)
    np.testing.assert_array_equal(turn.advantages, token.advantages)
    np.testing.assert_array_equal(turn.value_targets, token.value_targets)


@several
@given(batch=batches(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_turn_without_token_discounts_starts_each_step_as_gae_step(batch, gamma, lam):
    """The values between the first token of a step and the first of the next cancel."""
    turn = batch.credit("gae_turn", gamma_step=gamma, lam_step=lam)
    step = batch.credit("gae_step", gamma=gamma, lam=lam)
    first = step.value_mask
    np.testing.assert_allclose(turn.advantages[first], step.advantages[first], rtol=1e-9, atol=1e-12)


@several
@given(batch=batches())
def test_monte_carlo_gae_gives_the_returns(batch):
    """gamma and lambda 1: the critic's targets are what the episode still brought."""
    batch = BatchCase(episodes=[replace(episode, ending="terminated") for episode in batch.episodes])
    credit = batch.credit("gae_token")
    assert credit.value_targets is not None
    for targets, episode in zip(batch.per_episode(credit.value_targets), batch.episodes, strict=True):
        np.testing.assert_allclose(targets, np.cumsum(episode.token_rewards[::-1])[::-1], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def large() -> EstimatorInputs:
    """4,096 trajectories of 8 steps of 200 trained tokens."""
    num_trajectories, num_steps, num_tokens = 4096, 8, 200
    steps, tokens = num_trajectories * num_steps, num_trajectories * num_steps * num_tokens
    rng = np.random.default_rng(0)
    values = rng.normal(size=tokens)
    return EstimatorInputs(
        step_rewards=rng.normal(size=steps),
        step_trajectory=np.repeat(np.arange(num_trajectories), num_steps),
        step_terminated=np.zeros(steps, dtype=bool),
        step_truncated=np.arange(steps) % num_steps == num_steps - 1,
        step_num_tokens=np.full(steps, num_tokens),
        trajectory_group=np.repeat(np.arange(num_trajectories // 8), 8),
        step_observations=[str(number) for number in rng.integers(0, 5, size=steps)],
        token_penalties=values,
        token_values=values,
        bootstrap_values=rng.normal(size=num_trajectories),
        old_logprobs=values,
        teacher_logprobs=-values,
        greedy_returns=rng.normal(size=num_trajectories // 8),
    )


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_large_batch_takes_seconds_at_most(name, large):
    """A loop over single tokens would take longer than this; what was measured is 0.01 to 0.6 s on one core."""
    start = time.perf_counter()
    compute_credit(name, large, {})
    assert time.perf_counter() - start < 5.0
