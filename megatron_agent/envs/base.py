"""AgentEnv: what an agent acts in. `reset` shows the first observation, `step` answers an action."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_agent.registry import resolve

Message = dict[str, Any]
"""A chat message: role, content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment shows before the first action."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the callable tools, shown by the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model said."""

    text: str
    """Decoded response without the end-of-turn token."""
    is_cut_off: bool = False
    """True where the token limit ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """What followed from an action."""

    messages: list[Message] = field(default_factory=list)
    """The next observation (tool results, the new state)."""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    """The environment's verdict on the episode, with the last step."""
    info: dict[str, float] = field(default_factory=dict)
    """Counters, for example tool_calls, tool_errors, bad_calls."""


class AgentEnv:
    """Base of environments. One instance lives for one episode; the methods may be `async`.

    Synchronous ones run in a thread of the episode's own, so a slow one never holds up other episodes.
    """

    def reset(self, row: Any) -> Observation | Awaitable[Observation]:
        """Start an episode on a dataset row (`data.Row`)."""
        raise NotImplementedError

    def step(self, action: Action) -> EnvStep | Awaitable[EnvStep]:
        """Apply an action."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; called once, also after failures."""


ENVIRONMENTS = {
    "decisive_step": "megatron_agent.envs.decisive_step:DecisiveStep",
    "frozen_lake": "megatron_agent.envs.frozen_lake:FrozenLake",
    "tool_env": "megatron_agent.envs.tool_env:ToolEnv",
}


def environment_class(name: str) -> Callable[..., AgentEnv]:
    """The class behind a registered name or `package.module:Class`; ConfigError where there is none."""
    return resolve("environment", name, ENVIRONMENTS)
