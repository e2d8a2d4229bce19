"""ToolEnv: an environment whose steps are tool calls; a reply without a call is the final answer."""

import asyncio
import inspect
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from megatron_agent.data import Row
from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Message, Observation
from megatron_agent.tools.base import BaseTool, ToolArgumentError, make_tool
from megatron_agent.tools.formats import BrokenCall, ToolCall, get_tool_format
from megatron_agent.worker_thread import run_in_thread


class ToolEnv(AgentEnv):
    """Calls of one turn run at the same time and answer in order; a failing one answers with its error."""

    def __init__(
        self,
        *,
        tools: Sequence[str | BaseTool],
        tool_format: str = "hermes",
        bad_call: Literal["observe", "end"] = "observe",
        tool_timeout_s: float = 60.0,
    ) -> None:
        made = [make_tool(tool) if isinstance(tool, str) else tool for tool in tools]
        self._tools = {tool.name: tool for tool in made}
        self._format = get_tool_format(tool_format)
        self._bad_call = bad_call
        self._timeout_s = tool_timeout_s

    async def reset(self, row: Row) -> Observation:
        return Observation(messages=list(row.prompt), tools=[tool.schema() for tool in self._tools.values()])

    async def step(self, action: Action) -> EnvStep:
        calls = self._format.parse(action.text, is_cut_off=action.is_cut_off)
        if not calls:  # the final answer, unless the token limit came before its end
            return EnvStep(terminated=not action.is_cut_off, truncated=action.is_cut_off)
        results = await asyncio.gather(*(self._answer(call) for call in calls))
        info: dict[str, float] = {"tool_calls": len(calls)}
        for _, failure in results:
            if failure:
                info[failure] = info.get(failure, 0) + 1
        broken = any(isinstance(call, BrokenCall) for call in calls)
        messages: list[Message] = [{"role": "tool", "content": text} for text, _ in results]
        return EnvStep(messages=messages, terminated=broken and self._bad_call == "end", info=info)

    async def _answer(self, call: ToolCall | BrokenCall) -> tuple[str, str | None]:
        """The observation of one call, and how it failed: bad_calls, tool_errors or None."""
        if isinstance(call, BrokenCall):
            return f"error: {call.detail}", "bad_calls"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: unknown tool {call.name!r}; there are {', '.join(sorted(self._tools))}", "bad_calls"
        try:
            arguments = tool.parse_arguments(call.arguments)
        except ToolArgumentError as error:
            return f"error: {error}", "bad_calls"
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return _shown(await _execute(tool, arguments)), None
        except Exception as error:  # what a tool raises is an observation, whatever it is
            if isinstance(error, TimeoutError) and deadline.expired():
                return f"error: {call.name} took longer than {self._timeout_s:g} s", "tool_errors"
            return f"error: {type(error).__name__}: {error}", "tool_errors"


async def _execute(tool: BaseTool, arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool.execute):
        return await tool.execute(**arguments)
    return await run_in_thread(partial(tool.execute, **arguments))


def _shown(result: Any) -> str:
    """What the model reads: text as it is, objects and lists as JSON."""
    return json.dumps(result, ensure_ascii=False, default=str) if isinstance(result, dict | list) else str(result)
