"""AgentFlowBase: how one episode is played, from a dataset row to a trajectory."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_agent.config import AgentConfig, RolloutConfig
from megatron_agent.data import Row
from megatron_agent.generation import Completion, GenerateFn, SamplingParams
from trajectory.steps import ContextChange, Step

T = TypeVar("T")
Message = dict[str, Any]


class ChatRenderer(Protocol):
    """Messages <-> token ids, by the model's own chat template."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the whole conversation up to where the assistant speaks."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> tuple[list[int], ContextChange]:
        """The next prompt: `before` led to `prompt_ids`, the model said `response_ids`, `after` followed."""
        ...

    def decode(self, response_ids: Sequence[int]) -> str:
        """Text of a response without the end-of-turn token."""
        ...


@dataclass(kw_only=True)
class FlowContext:
    """What a flow may use while it plays one episode."""

    generate: GenerateFn
    renderer: ChatRenderer
    agent: AgentConfig
    limits: RolloutConfig
    temperature: float
    trajectory_id: str
    group_id: str
    run_sync: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Runs a blocking function in a thread."""
    steps: list[Step] = field(default_factory=list)
    """Steps so far; what is here survives a failure or time-out."""
    timings: dict[str, float] = field(default_factory=dict)

    async def complete(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Sample one response."""
        started = time.monotonic()
        params = SamplingParams(
            temperature=self.temperature, max_tokens=max_tokens, stop=tuple(self.agent.stop)
        )
        completion = await self.generate(prompt_ids, params, session_id=self.trajectory_id)
        self._add_time("generate_s", started)
        return completion

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run environment code, sync or async, within rollout.step_timeout_s."""
        started = time.monotonic()
        if asyncio.iscoroutinefunction(function):
            awaitable = function(*arguments)
        else:
            awaitable = self.run_sync(lambda: function(*arguments))
        try:
            return await asyncio.wait_for(awaitable, self.limits.step_timeout_s)
        except TimeoutError as error:
            name = getattr(function, "__qualname__", repr(function))
            raise TimeoutError(f"{name} took longer than rollout.step_timeout_s={self.limits.step_timeout_s}") from error
        finally:
            self._add_time("environment_s", started)

    def _add_time(self, name: str, started: float) -> None:
        self.timings[name] = self.timings.get(name, 0.0) + time.monotonic() - started


@dataclass(kw_only=True)
class EpisodeEnd:
    """How a flow ended its episode."""

    success: bool | None = None
    outcome_reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)


class AgentFlowBase:
    """Base of flows: `run` plays one episode and leaves its steps in `context.steps`.

    What it raises becomes the trajectory's error; the steps so far are kept.
    """

    async def run(self, row: Row, context: FlowContext) -> EpisodeEnd:
        """Play the row."""
        raise NotImplementedError


def response_arrays(completion: Completion) -> dict[str, np.ndarray]:
    """A completion's ids, log-probs and mask as a Step wants them: every id was sampled."""
    return {
        "response_ids": np.asarray(completion.token_ids, dtype=np.int32),
        "rollout_logprobs": np.asarray(completion.logprobs, dtype=np.float32),
        "response_mask": np.ones(len(completion.token_ids), dtype=bool),
    }
