"""ToolEnv: an environment whose steps are tool calls; a reply without a call is the final answer.

reply --parse--> calls --at the same time--> [slot of the tool -> time-out -> retry] --in order--> tool messages
    a slot is one of `max_concurrency` of the tool in this process; every holder gives it back within its time-out
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from megatron_agent.config import ToolConfig
from megatron_agent.data import Row
from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Message, Observation
from megatron_agent.errors import ConfigError
from megatron_agent.tools.base import BaseTool, ToolArgumentError, ToolResult, make_tools
from megatron_agent.tools.formats import BrokenCall, ToolCall, get_tool_format
from megatron_agent.worker_thread import run_in_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one call led to."""

    text: str
    counters: tuple[str, ...] = ()
    result: ToolResult | None = None
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Installed:
    """A tool of this episode with its options."""

    tool: BaseTool
    options: ToolConfig = field(default_factory=lambda: ToolConfig(name="own"))


class ToolEnv(AgentEnv):
    """Calls of one turn run at the same time and answer in order; a failing one answers with its error.

    Tools are given as in `agent.tools`: names, ToolConfig or its keys, or ready instances.
    Raises ConfigError where two tools have one name.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str | Mapping[str, Any] | ToolConfig | BaseTool],
        tool_format: str = "hermes",
        bad_call: Literal["observe", "end"] = "observe",
        tool_timeout_s: float = 60.0,
    ) -> None:
        installed = [one for entry in tools for one in _install(entry)]
        self._tools = {one.tool.name: one for one in installed}
        if len(self._tools) < len(installed):
            (name, _), *_ = Counter(one.tool.name for one in installed).most_common(1)
            raise ConfigError(f"agent.tools: two tools are called {name!r}; remove one")
        self._format = get_tool_format(tool_format)
        self._bad_call = bad_call
        self._timeout_s = tool_timeout_s

    async def reset(self, row: Row) -> Observation:
        await asyncio.gather(*(_run(one.tool.set_up, row) for one in self._tools.values()))
        return Observation(messages=list(row.prompt), tools=[one.tool.schema() for one in self._tools.values()])

    async def close(self) -> None:
        """Close all tools, whatever some of them raise; then raise the first of that."""
        closed = await asyncio.gather(*(_run(one.tool.close) for one in self._tools.values()), return_exceptions=True)
        for failure in closed:
            if isinstance(failure, BaseException):
                raise failure

    async def step(self, action: Action) -> EnvStep:
        calls = self._format.parse(action.text, is_cut_off=action.is_cut_off)
        if not calls:  # the final answer, unless the token limit came before its end
            return EnvStep(terminated=not action.is_cut_off, truncated=action.is_cut_off)
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        info = Counter[str]({"tool_calls": len(calls)})
        for answer in answers:
            info.update(answer.counters)
            info.update(answer.result.info if answer.result else {})
        results = [answer.result for answer in answers if answer.result is not None]
        rewards = {"tool_reward": sum(result.reward for result in results)}
        rewards["tool_cost"] = -sum(answer.cost for answer in answers)
        messages: list[Message] = [{"role": "tool", "content": answer.text} for answer in answers]
        is_broken_end = self._bad_call == "end" and "bad_calls" in info
        return EnvStep(
            messages=messages,
            reward=sum(rewards.values()),
            reward_parts={name: reward for name, reward in rewards.items() if reward},
            terminated=is_broken_end or any(result.ends_episode for result in results),
            info=dict(info),
        )

    async def _answer(self, call: ToolCall | BrokenCall) -> _Answer:
        """The observation of one call; a call that never reached a tool is counted by its kind and as a bad call."""
        if isinstance(call, BrokenCall):
            return _bad(call.kind, call.detail)
        one = self._tools.get(call.name)
        if one is None:
            return _bad("unknown_tool", f"unknown tool {call.name!r}; there are {', '.join(sorted(self._tools))}")
        try:
            arguments = one.tool.parse_arguments(call.arguments)
        except ToolArgumentError as error:
            return _bad("bad_arguments", str(error))
        return await self._execute(one, arguments)

    async def _execute(self, one: _Installed, arguments: dict[str, Any]) -> _Answer:
        options = one.options
        timeout_s = options.timeout_s or self._timeout_s
        problem = ""
        for attempt in range(options.retries + 1):
            try:
                async with _slot(options), asyncio.timeout(timeout_s) as deadline:
                    result = await _run(one.tool.execute, **arguments)
            except Exception as error:  # what a tool raises is an observation, whatever it is
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, TimeoutError) and deadline.expired():
                    problem = f"{one.tool.name} took longer than {timeout_s:g} s"
                continue
            result = result if isinstance(result, ToolResult) else ToolResult(content=result)
            text = _shortened(_shown(result.content), options.max_result_chars)
            return _Answer(text=text, result=result, cost=options.cost, counters=("tool_retries",) * attempt)
        counters = ("tool_errors", *("tool_retries",) * options.retries)
        return _Answer(
            text=_shortened(f"error: {problem}", options.max_result_chars), cost=options.cost, counters=counters
        )


def _install(entry: str | Mapping[str, Any] | ToolConfig | BaseTool) -> list[_Installed]:
    if isinstance(entry, BaseTool):
        return [_Installed(tool=entry)]
    if isinstance(entry, str):
        entry = ToolConfig(name=entry)
    options = entry if isinstance(entry, ToolConfig) else ToolConfig.model_validate(entry)
    return [_Installed(tool=tool, options=options) for tool in make_tools(options.name, options.args)]


def _bad(kind: str, detail: str) -> _Answer:
    return _Answer(text=f"error: {detail}", counters=("bad_calls", f"call_{kind}"))


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()
"""Of each event loop, the semaphores of its limited tools: a limit holds over all episodes of a process."""


def _slot(options: ToolConfig) -> asyncio.Semaphore | nullcontext[None]:
    """Holds one of the tool's places while it runs."""
    if options.max_concurrency is None:
        return nullcontext()
    of_loop = _slots.setdefault(asyncio.get_running_loop(), {})
    return of_loop.setdefault(options.model_dump_json(), asyncio.Semaphore(options.max_concurrency))


async def _run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The tool's own code; the synchronous kind runs in a thread, where it may block."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    if getattr(function, "__func__", None) in (BaseTool.set_up, BaseTool.close):  # nothing to do is worth no thread
        return None
    return await run_in_thread(partial(function, *arguments, **named))


def _shown(result: Any) -> str:
    """What the model reads: text as it is, objects and lists as JSON."""
    return json.dumps(result, ensure_ascii=False, default=str) if isinstance(result, dict | list) else str(result)


def _shortened(text: str, limit: int | None) -> str:
    """The text's head and tail of `limit` characters together, with a note between them of what is missing."""
    if limit is None or len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"
