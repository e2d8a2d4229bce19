"""Every estimator against a plain loop over episodes, steps and tokens, on random batches."""

import numpy as np
import pytest
from credit_cases import BatchCase, EpisodeCase, StepCase, TokenCase

EPS = 1e-6


def random_batch(seed: int, *, penalties: bool = True) -> BatchCase:
    """Groups of 2 to 4 episodes of 1 to 4 steps of 0 to 3 trained tokens; groups are not neighbours in the batch."""
    rng = np.random.default_rng(seed)

    def a_token() -> TokenCase:
        value, penalty, old, teacher = rng.normal(size=4).tolist()
        return TokenCase(value=value, penalty=penalty / 10 if penalties else 0.0, old=old, teacher=teacher)

    def an_episode(group: int) -> EpisodeCase:
        counts = rng.integers(0, 4, size=rng.integers(1, 5))
        counts[rng.integers(len(counts))] += not counts.any()
        steps = [
            StepCase(
                reward=float(rng.normal()),
                tokens=[a_token() for _ in range(count)],
                observation=str(rng.choice(["left room", "left rooms", "cellar"])),
            )
            for count in counts.tolist()
        ]
        ending = str(rng.choice(["terminated", "truncated", "neither"]))
        return EpisodeCase(
            steps=steps, group=group, outcome=float(rng.integers(2)), ending=ending, bootstrap=float(rng.normal())
        )

    owners = np.repeat(np.arange(3), rng.integers(2, 5, size=3))
    return BatchCase(
        episodes=[an_episode(group) for group in rng.permutation(owners).tolist()], greedy=rng.normal(size=3).tolist()
    )


@pytest.fixture(params=range(8))
def batch(request) -> BatchCase:
    return random_batch(request.param)


def agree(batch: BatchCase, name: str, reference: list[list[float]], **options) -> None:
    """`reference` holds one list of trained tokens for each episode."""
    actual = batch.advantages(name, **options)
    for ours, theirs in zip(actual, reference, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def on_tokens(episode: EpisodeCase, of_steps: list[float]) -> list[float]:
    return [of_steps[t] for t in episode.token_steps]


def whitened(of_episodes: list[list[float]], eps: float) -> list[list[float]]:
    values = [value for tokens in of_episodes for value in tokens]
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return [[(value - mean) / (std + eps) for value in tokens] for tokens in of_episodes]


def grpo_of(batch: BatchCase, episode: EpisodeCase, *, std: bool) -> float:
    returns = [member.episode_return for member in batch.members(episode.group)]
    mean = sum(returns) / len(returns)
    deviation = (sum((value - mean) ** 2 for value in returns) / len(returns)) ** 0.5
    return (episode.episode_return - mean) / (deviation + EPS if std else 1.0)


def returns_to_go(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


@pytest.mark.parametrize("std", [True, False])
def test_grpo(batch, std):
    reference = [[grpo_of(batch, episode, std=std)] * len(episode.tokens) for episode in batch.episodes]
    agree(batch, "grpo", reference, std=std, eps=EPS)


def test_rloo(batch):
    reference = []
    for i, episode in enumerate(batch.episodes):
        others = [e.episode_return for j, e in enumerate(batch.episodes) if e.group == episode.group and j != i]
        reference.append([episode.episode_return - sum(others) / len(others)] * len(episode.tokens))
    agree(batch, "rloo", reference)


@pytest.mark.parametrize("baseline", ["none", "batch"])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce(batch, gamma, baseline):
    returns = [returns_to_go(episode.rewards, gamma) for episode in batch.episodes]
    every = [value for of_steps in returns for value in of_steps]
    less = sum(every) / len(every) if baseline == "batch" else 0.0
    reference = [
        on_tokens(episode, [value - less for value in of_steps])
        for episode, of_steps in zip(batch.episodes, returns, strict=True)
    ]
    agree(batch, "reinforce", reference, gamma=gamma, baseline=baseline)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(batch, gamma):
    returns = [returns_to_go(episode.token_rewards, gamma) for episode in batch.episodes]
    agree(batch, "reinforce_plus_plus", whitened(returns, EPS), gamma=gamma, eps=EPS)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_baseline(batch, gamma):
    raw = []
    for episode in batch.episodes:
        returns = [member.task_return for member in batch.members(episode.group)]
        above = episode.task_return - sum(returns) / len(returns)
        raw.append([above + later for later in returns_to_go([token.penalty for token in episode.tokens], gamma)])
    agree(batch, "reinforce_plus_plus_baseline", whitened(raw, EPS), gamma=gamma, eps=EPS)


def test_remax(batch):
    reference = [[e.episode_return - batch.greedy[e.group]] * len(e.tokens) for e in batch.episodes]
    agree(batch, "remax", reference)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_step(batch, gamma, lam):
    reference, targets, masks = [], [], []
    for episode in batch.episodes:
        rewards: list[float] = []
        values: list[float] = []
        owed = 0.0
        for step, reward in zip(episode.steps, episode.rewards, strict=True):
            if step.tokens:
                rewards.append(reward + owed)
                values.append(step.tokens[0].value)
                owed = 0.0
            elif rewards:
                rewards[-1] += reward
            else:
                owed += reward
        values.append(episode.last_value)
        advantages = [0.0] * (len(rewards) + 1)
        for t in reversed(range(len(rewards))):
            advantages[t] = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * advantages[t + 1]
        acting = [step for step in episode.steps if step.tokens]
        reference.append([advantages[t] for t, step in enumerate(acting) for _ in step.tokens])
        targets += [advantages[t] + values[t] for t in range(len(rewards))]
        masks += [i == 0 for step in acting for i in range(len(step.tokens))]
    agree(batch, "gae_step", reference, gamma=gamma, lam=lam)
    credit = batch.credit("gae_step", gamma=gamma, lam=lam)
    assert credit.value_mask is not None
    assert credit.value_targets is not None
    assert credit.value_mask.tolist() == masks
    np.testing.assert_allclose(credit.value_targets[credit.value_mask], targets, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("gamma_step", "lam_step"), [(0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 1.0)])
def test_gae_turn(batch, gamma, lam, gamma_step, lam_step):
    reference, targets = [], []
    for episode in batch.episodes:
        steps, rewards = [*episode.token_steps, -1], episode.token_rewards
        values = [*(token.value for token in episode.tokens), episode.last_value]
        advantages = [0.0] * len(values)
        for i in reversed(range(len(rewards))):
            g, x = (gamma, lam) if steps[i] == steps[i + 1] else (gamma_step, lam_step)
            advantages[i] = rewards[i] + g * values[i + 1] - values[i] + g * x * advantages[i + 1]
        reference.append(advantages[:-1])
        targets += [advantage + value for advantage, value in zip(advantages[:-1], values[:-1], strict=True)]
    options = {"gamma": gamma, "lam": lam, "gamma_step": gamma_step, "lam_step": lam_step}
    agree(batch, "gae_turn", reference, **options)
    np.testing.assert_allclose(batch.credit("gae_turn", **options).value_targets, targets, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_token(batch, gamma, lam):
    """As the sum over what follows, not as a recursion."""
    reference = []
    for episode in batch.episodes:
        rewards, values = episode.token_rewards, [*(token.value for token in episode.tokens), episode.last_value]
        deltas = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(rewards))]
        reference.append(returns_to_go(deltas, gamma * lam))
    agree(batch, "gae_token", reference, gamma=gamma, lam=lam)


@pytest.mark.parametrize(("similarity", "alike"), [(1.0, False), (0.5, True)])
@pytest.mark.parametrize("step_norm", ["mean_std", "mean"])
def test_gigpo(batch, step_norm, similarity, alike):
    """`left room` and `left rooms` are one state where one word of two is enough, whichever comes first."""
    gamma, weight = 0.9, 0.7
    found: dict[tuple[int, str], list[float]] = {}

    def state(episode: EpisodeCase, t: int) -> tuple[int, str]:
        observation = episode.steps[t].observation
        return episode.group, "left room" if alike and observation == "left rooms" else observation

    for episode in batch.episodes:
        for t, value in enumerate(returns_to_go(episode.rewards, gamma)):
            found.setdefault(state(episode, t), []).append(value)
    reference = []
    for episode in batch.episodes:
        of_steps = []
        for t, value in enumerate(returns_to_go(episode.rewards, gamma)):
            peers = found[state(episode, t)]
            mean = sum(peers) / len(peers)
            std = (sum((peer - mean) ** 2 for peer in peers) / len(peers)) ** 0.5
            local = (value - mean) / (std + EPS if step_norm == "mean_std" else 1.0)
            of_steps.append(grpo_of(batch, episode, std=True) + weight * local)
        reference.append(on_tokens(episode, of_steps))
    options = {"gamma": gamma, "step_weight": weight, "similarity": similarity}
    agree(batch, "gigpo", reference, step_norm=step_norm, eps=EPS, **options)


@pytest.mark.parametrize("std", [True, False])
def test_step_reward_group(batch, std):
    reference = []
    for episode in batch.episodes:
        rewards = [reward for member in batch.members(episode.group) for reward in member.rewards]
        mean = sum(rewards) / len(rewards)
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        own = [(reward - mean) / (deviation + EPS if std else 1.0) for reward in episode.rewards]
        reference.append(on_tokens(episode, [sum(own[t:]) for t in range(len(own))]))
    agree(batch, "step_reward_group", reference, std=std, eps=EPS)


@pytest.mark.parametrize("task_weight", [0.0, 0.3])
def test_opd(batch, task_weight):
    reference = [
        [token.teacher - token.old + task_weight * grpo_of(batch, episode, std=True) for token in episode.tokens]
        for episode in batch.episodes
    ]
    agree(batch, "opd", reference, task_weight=task_weight, eps=EPS)
