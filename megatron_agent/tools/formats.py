"""How tool calls are written in a model's text: parsing them, and showing the tools."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_agent.errors import ConfigError, did_you_mean

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call in a model's text."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCall:
    """Text that began as a call and is none: an error observation, never a final answer."""

    kind: str
    """`bad_json` or `cut_off`."""
    detail: str


class ToolFormat(Protocol):
    """One family's way to write calls."""

    def parse(self, text: str, *, is_cut_off: bool) -> list[ToolCall | BrokenCall]:
        """All calls in order; empty where the text holds none."""
        ...

    def render(self, call: ToolCall) -> str:
        """The text that `parse` reads back as the same call."""
        ...

    def with_tools(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """The messages with the tools described in a system message, for templates that take no tools."""
        ...


class HermesFormat:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str, *, is_cut_off: bool = False) -> list[ToolCall | BrokenCall]:
        return [self._parse_one(match, is_cut_off) for match in self._CALL.finditer(text)]

    def _parse_one(self, match: re.Match[str], is_cut_off: bool) -> ToolCall | BrokenCall:
        body, close = match.groups()
        try:
            call = json.loads(body)
        except json.JSONDecodeError as error:
            if is_cut_off and not close:
                return BrokenCall(kind="cut_off", detail="the tool call was cut off by the token limit")
            return BrokenCall(kind="bad_json", detail=f"the tool call is not valid JSON: {error.msg}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return BrokenCall(kind="bad_json", detail='a tool call is {"name": ..., "arguments": {...}}')
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return BrokenCall(kind="bad_json", detail="`arguments` must be an object")
        return ToolCall(name=call["name"], arguments=arguments)

    def render(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return f"{self.OPEN}{body}{self.CLOSE}"

    def with_tools(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = (
            f"You can call tools:\n{listed}\n"
            f'Write a call as {self.OPEN}{{"name": "...", "arguments": {{...}}}}{self.CLOSE}'
        )
        if messages and messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


TOOL_FORMATS: dict[str, type[ToolFormat]] = {"hermes": HermesFormat}


def get_tool_format(name: str) -> ToolFormat:
    """The format of that name; ConfigError with the nearest name where there is none."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"agent.tool_format {name!r} is unknown: {did_you_mean(name, TOOL_FORMATS)}")
    return TOOL_FORMATS[name]()
