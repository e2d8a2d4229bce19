"""The records of what an agent did: Step, Trajectory, TrajectoryGroup.

A step is one decision and everything around it: what the environment showed, the exact token ids
that the model saw and sampled, what came back, and how it ended. Ids come from the engine and are
never re-tokenized. All records are frozen; later stages add information in records of their own.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


class StopReason(Enum):
    """Why a step was the last of its episode, or why its generation ended."""

    NONE = "none"  # the step ended normally and the episode went on
    TERMINATED = "terminated"  # the environment reached a final state
    MAX_STEPS = "max_steps"
    RESPONSE_LENGTH = "response_length"  # generation was cut at the response budget
    PROMPT_LENGTH = "prompt_length"  # the next prompt no longer fits
    EPISODE_LENGTH = "episode_length"  # the episode's token budget is used up
    TIME_LIMIT = "time_limit"  # the episode's time-out
    ENV_TRUNCATED = "env_truncated"  # the environment itself truncated
    ENV_FAILED = "env_failed"  # what came after this step raised or took too long: environment, tool set-up, reward

    @property
    def is_truncation(self) -> bool:
        """True where the return is cut by a limit and not by a final state."""
        return self not in (StopReason.NONE, StopReason.TERMINATED, StopReason.ENV_FAILED)


class TrajectoryStatus(Enum):
    """How an episode came out, seen from outside."""

    OK = "ok"
    TRUNCATED = "truncated"
    ENV_FAILED = "env_failed"  # the steps before the failure are kept


class ContextChange(Enum):
    """How a step's prompt relates to the previous step's prompt + response."""

    FIRST = "first"  # the first step of its episode or branch
    CLEAN = "clean"  # the previous ids are an exact prefix of this prompt
    REALIGN = "realign"  # sampled ids kept although the template would render them differently
    FORK = "fork"  # history was rewritten: a new sample starts here


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One decision: exactly what the model saw and said, and what followed.

    Raises ``ValueError`` where ids, log-probs and mask disagree in length, or where there is no prompt token (the
    first token of a sequence has no log-prob).
    """

    prompt_ids: np.ndarray
    """int32 [P]: every token that the model saw."""
    response_ids: np.ndarray
    """int32 [R]: sampled ids, then any forced closing tokens (mask False)."""
    rollout_logprobs: np.ndarray
    """float32 [R]: the engine's log-prob of each id; 0.0 where response_mask is False."""
    response_mask: np.ndarray
    """bool [R]: True where the model sampled the token; only those are trained."""
    policy_version: int
    """The weights' version that sampled this step."""
    observation: list[dict[str, Any]] = field(default_factory=list)
    """Chat messages the environment showed before this action (only the new ones)."""
    response_text: str = ""
    feedback: list[dict[str, Any]] = field(default_factory=list)
    """Messages that came back (tool results, the next observation)."""
    reward: float = 0.0
    """This step's own reward; the outcome reward is not in it."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    stop_reason: StopReason = StopReason.NONE
    next_observation: list[dict[str, Any]] | None = None
    """Only on the last step: what the agent would have seen next."""
    next_prompt_ids: np.ndarray | None = None
    """int32; only on a truncated last step: the prompt that the agent would have seen next, for a critic to value."""
    context_change: ContextChange = ContextChange.FIRST
    info: dict[str, Any] = field(default_factory=dict)
    """Counters of this step, for example tool_calls, tool_errors, bad_calls."""

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        if len(self.rollout_logprobs) != n or len(self.response_mask) != n:
            raise ValueError(
                f"a step has {n} response ids but {len(self.rollout_logprobs)} log-probs and "
                f"{len(self.response_mask)} mask entries; each response id needs one of each"
            )
        if not len(self.prompt_ids):
            raise ValueError("a step needs at least one prompt token, for its first response token to follow")

    @property
    def num_trained_tokens(self) -> int:
        """How many response tokens the model itself sampled."""
        return int(self.response_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode: its steps and how it was scored, once."""

    trajectory_id: str
    group_id: str
    """The dataset row (prompt) and visit that this episode belongs to."""
    steps: tuple[Step, ...]
    outcome_reward: float = 0.0
    """Scored once per episode; added once to the last step's reward by the estimators."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    status: TrajectoryStatus = TrajectoryStatus.OK
    success: bool | None = None
    """The environment's or reward's own verdict; None where there is none."""
    error: str | None = None
    """What failed, when status is ENV_FAILED: exception type, message, step index."""
    data_source: str = ""
    row_index: int = -1
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: generate_s, environment_s, reward_s, total_s."""
    privileged_ids: np.ndarray | None = None
    """int32 [P]: what only a critic sees, in front of each of its sequences; None where there is nothing to see."""

    def __post_init__(self) -> None:
        for index, step in enumerate(self.steps[:-1]):
            if step.terminated or step.truncated:
                raise ValueError(f"trajectory {self.trajectory_id}: step {index} ended the episode but more follow")

    @property
    def episode_return(self) -> float:
        """Sum of the step rewards plus the outcome reward, once."""
        return float(sum(step.reward for step in self.steps) + self.outcome_reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The trajectories of one prompt; the unit of group-relative baselines."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    """An episode of the same prompt played without sampling, as a baseline; it is not trained on."""
