"""Batches of made-up episodes: as plain records that a reference loop reads, and as the arrays of an estimator."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.registry import compute_credit


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    """A trained token."""

    value: float = 0.0
    penalty: float = 0.0
    old: float = 0.0
    teacher: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A step; `reward` is without the penalties of its tokens."""

    reward: float
    tokens: Sequence[TokenCase] = (TokenCase(),)
    observation: str = ""


@dataclass(frozen=True, kw_only=True)
class EpisodeCase:
    """An episode of group `group`."""

    steps: Sequence[StepCase]
    group: int = 0
    outcome: float = 0.0
    ending: str = "terminated"
    bootstrap: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """One per step, with the outcome in the last and with penalties."""
        own = [step.reward + sum(token.penalty for token in step.tokens) for step in self.steps]
        own[-1] += self.outcome
        return own

    @property
    def task_return(self) -> float:
        """Without penalties."""
        return sum(step.reward for step in self.steps) + self.outcome

    @property
    def episode_return(self) -> float:
        return sum(self.rewards)

    @property
    def token_steps(self) -> list[int]:
        """The step of each trained token."""
        return [t for t, step in enumerate(self.steps) for _ in step.tokens]

    @property
    def tokens(self) -> list[TokenCase]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def token_rewards(self) -> list[float]:
        """Penalties on their tokens, each step's reward on the last trained token that is not after it, if any."""
        rewards = [token.penalty for token in self.tokens]
        for t, step in enumerate(self.steps):
            at = [i for i, owner in enumerate(self.token_steps) if owner <= t]
            rewards[at[-1] if at else 0] += step.reward + (self.outcome if t == len(self.steps) - 1 else 0.0)
        return rewards

    @property
    def last_value(self) -> float:
        return self.bootstrap if self.ending == "truncated" else 0.0


@dataclass(frozen=True, kw_only=True)
class BatchCase:
    """The episodes of a batch, and the greedy return of each group."""

    episodes: Sequence[EpisodeCase]
    greedy: Sequence[float] = field(default_factory=list)

    def members(self, group: int) -> list[EpisodeCase]:
        return [episode for episode in self.episodes if episode.group == group]

    def with_outcome(self, added: float) -> "BatchCase":
        """Every outcome reward larger by `added`, that of the greedy episodes too."""
        episodes = [replace(episode, outcome=episode.outcome + added) for episode in self.episodes]
        return BatchCase(episodes=episodes, greedy=[value + added for value in self.greedy])

    def scaled(self, factor: float) -> "BatchCase":
        """Every reward and value, not penalties, times `factor`."""
        episodes = [
            replace(
                episode,
                outcome=episode.outcome * factor,
                bootstrap=episode.bootstrap * factor,
                steps=[
                    replace(
                        step,
                        reward=step.reward * factor,
                        tokens=[replace(token, value=token.value * factor) for token in step.tokens],
                    )
                    for step in episode.steps
                ],
            )
            for episode in self.episodes
        ]
        return BatchCase(episodes=episodes, greedy=[value * factor for value in self.greedy])

    def permuted(self, order: Sequence[int], group_order: Sequence[int]) -> "BatchCase":
        """Episode order[i] at place i; group g is called group_order[g]."""
        episodes = [replace(self.episodes[i], group=group_order[self.episodes[i].group]) for i in order]
        greedy = [self.greedy[group_order.index(g)] for g in range(len(self.greedy))]
        return BatchCase(episodes=episodes, greedy=greedy)

    def inputs(self) -> EstimatorInputs:
        steps = [(m, t, step) for m, episode in enumerate(self.episodes) for t, step in enumerate(episode.steps)]
        last = [t == len(self.episodes[m].steps) - 1 for m, t, _ in steps]
        endings = [self.episodes[m].ending for m, _, _ in steps]
        tokens = [token for episode in self.episodes for token in episode.tokens]
        return EstimatorInputs(
            step_rewards=np.array([reward for episode in self.episodes for reward in episode.rewards]),
            step_trajectory=np.array([m for m, _, _ in steps]),
            step_terminated=np.array([end and how == "terminated" for end, how in zip(last, endings, strict=True)]),
            step_truncated=np.array([end and how == "truncated" for end, how in zip(last, endings, strict=True)]),
            step_num_tokens=np.array([len(step.tokens) for _, _, step in steps]),
            trajectory_group=np.array([episode.group for episode in self.episodes]),
            step_observations=[step.observation for _, _, step in steps],
            token_penalties=np.array([token.penalty for token in tokens]),
            token_values=np.array([token.value for token in tokens]),
            bootstrap_values=np.array([episode.last_value for episode in self.episodes]),
            old_logprobs=np.array([token.old for token in tokens]),
            teacher_logprobs=np.array([token.teacher for token in tokens]),
            greedy_returns=np.array(self.greedy),
        )

    def per_episode(self, of_tokens: np.ndarray) -> list[list[float]]:
        """What an estimator gave, as one list of tokens per episode."""
        ends = np.cumsum([len(episode.tokens) for episode in self.episodes])
        return [part.tolist() for part in np.split(of_tokens, ends[:-1])]

    def credit(self, name: str, **options: object) -> Credit:
        return compute_credit(name, self.inputs(), options)

    def advantages(self, name: str, **options: object) -> list[list[float]]:
        """One list of trained tokens per episode."""
        return self.per_episode(self.credit(name, **options).advantages)
