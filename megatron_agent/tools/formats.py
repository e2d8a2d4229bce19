"""How tool calls are written in a model's text: parsing them, and showing the tools."""

import json
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
    # Models write line breaks into strings, as in code.
    _JSON = json.JSONDecoder(strict=False)

    def parse(self, text: str, *, is_cut_off: bool = False) -> list[ToolCall | BrokenCall]:
        calls: list[ToolCall | BrokenCall] = []
        place = text.find(self.OPEN)
        while place >= 0:
            call, place = self._parse_one(text, place + len(self.OPEN), is_cut_off)
            calls.append(call)
            place = text.find(self.OPEN, place)
        if not calls and is_cut_off and self._ends_in_open(text):
            calls.append(_CUT_OFF)
        return calls

    def _parse_one(self, text: str, start: int, is_cut_off: bool) -> tuple[ToolCall | BrokenCall, int]:
        """The call whose body begins at `start`, and where it ends."""
        body = start + len(text[start:]) - len(text[start:].lstrip())
        problem, call, end = "", None, body
        try:
            call, end = self._JSON.raw_decode(text, body)  # the object ends where JSON says: a string may hold the tag
        except json.JSONDecodeError as error:
            problem = f"the tool call is not valid JSON: {error.msg}"
        close = text.find(self.CLOSE, end)
        after = close + len(self.CLOSE) if close >= 0 else len(text)
        if problem:
            return (_CUT_OFF if is_cut_off and close < 0 else _bad_json(problem)), after
        if text[end : close if close >= 0 else None].strip():
            return _bad_json("the tool call is not valid JSON: there is more after the object"), after
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return _bad_json('a tool call is {"name": ..., "arguments": {...}}'), after
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return _bad_json("`arguments` must be an object"), after
        return ToolCall(name=call["name"], arguments=arguments), after

    def _ends_in_open(self, text: str) -> bool:
        """True where the text stops within the opening tag, which is several tokens for some tokenizers."""
        return any(text.endswith(self.OPEN[:length]) for length in range(1, len(self.OPEN)))

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


_CUT_OFF = BrokenCall(kind="cut_off", detail="the tool call was cut off by the token limit")


def _bad_json(detail: str) -> BrokenCall:
    return BrokenCall(kind="bad_json", detail=detail)


TOOL_FORMATS: dict[str, type[ToolFormat]] = {"hermes": HermesFormat}


def get_tool_format(name: str) -> ToolFormat:
    """The format of that name; ConfigError with the nearest name where there is none."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"agent.tool_format {name!r} is unknown: {did_you_mean(name, TOOL_FORMATS)}")
    return TOOL_FORMATS[name]()
