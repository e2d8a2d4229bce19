"""AgentFlowBase: how one episode is played, from a dataset row to a trajectory."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import numpy as np

from megatron_agent.config import AgentConfig, RolloutConfig
from megatron_agent.data import Row
from megatron_agent.errors import FleetError
from megatron_agent.generation import Completion, GenerateFn, SamplingParams
from trajectory.steps import ContextChange, Step

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
        """Sample one response; raises FleetError where ids and log-probs differ in length."""
        started = time.monotonic()
        params = SamplingParams(temperature=self.temperature, max_tokens=max_tokens, stop=tuple(self.agent.stop))
        completion = await self.generate(prompt_ids, params, session_id=self.trajectory_id)
        self._add_time("generate_s", started)
        if len(completion.token_ids) != len(completion.logprobs):
            raise FleetError(
                f"episode {self.trajectory_id}, step {len(self.steps) + 1}: the engine returned "
                f"{len(completion.token_ids)} ids but {len(completion.logprobs)} log-probs"
            )
        return completion

    async def call(self, function: Callable[..., Any], *arguments: Any, phase: str = "environment_s") -> Any:
        """Run user code, sync or async, within rollout.step_timeout_s; its seconds count for `phase`."""
        started = time.monotonic()
        timeout_s = self.limits.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                result = await self.run_sync(lambda: function(*arguments))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not deadline.expired():  # one that the user's code raised itself
                raise
            name = getattr(function, "__qualname__", repr(function))
            raise TimeoutError(f"{name} took longer than rollout.step_timeout_s={timeout_s:g}") from error
        finally:
            self._add_time(phase, started)

    async def clean_up(self, function: Callable[..., Any]) -> None:
        """Run clean-up code after a failure; what it raises would hide that failure."""
        with contextlib.suppress(Exception):
            await self.call(function)

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


class ResponseArrays(TypedDict):
    """The arrays of a Step that a completion gives."""

    response_ids: np.ndarray
    rollout_logprobs: np.ndarray
    response_mask: np.ndarray


def response_arrays(completion: Completion) -> ResponseArrays:
    """A completion's ids, log-probs and mask as a Step wants them: every id was sampled."""
    return {
        "response_ids": np.asarray(completion.token_ids, dtype=np.int32),
        "rollout_logprobs": np.asarray(completion.logprobs, dtype=np.float32),
        "response_mask": np.ones(len(completion.token_ids), dtype=bool),
    }


def cache_counters(completion: Completion) -> dict[str, int]:
    """What a Step's `info` keeps about the engine's prefix cache, for the metrics."""
    return {
        "num_cached_tokens": completion.num_cached_tokens,
        "cache_block_tokens": completion.cache_block_tokens,
    }
