"""BaseTool: one class with a typed `execute`; its JSON schema comes from the signature and the docstring."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from megatron_agent.errors import ConfigError
from megatron_agent.registry import resolve
from megatron_agent.tools.docstrings import read_docstring
from megatron_agent.tools.schemas import compact, portable


class ToolArgumentError(ValueError):
    """The model's arguments do not fit the signature; the text is what the model sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What `execute` may return where text alone is not enough."""

    content: Any
    """What the model reads: text as it is, objects and lists as JSON."""
    reward: float = 0.0
    """Added to the step's reward."""
    ends_episode: bool = False
    """True where this call was the last thing the agent does, as with an answer."""
    info: dict[str, float] = field(default_factory=dict)
    """Counters that are added to the step's."""


class BaseTool:
    """Base of tools. A subclass sets `name` and writes `execute(self, ...)`, sync or async, with annotated parameters.

    The docstring of `execute` (or that of the class) is the description, and its `Args:` section describes the
    arguments. Whatever `execute` returns is shown to the model as text; what it raises becomes an error observation.
    An episode has an instance of its own; `set_up` and `close` frame the episode.
    """

    name: ClassVar[str]

    def set_up(self, row: Any) -> Any:
        """Get ready for an episode on a dataset row (`data.Row`); sync or async."""

    def close(self) -> Any:
        """Release what the episode holds; called once, also after failures; sync or async."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work; subclasses give it named, annotated parameters."""
        raise NotImplementedError

    @cached_property
    def _docstring(self) -> tuple[str, dict[str, str]]:
        """The tool's description and those of its arguments."""
        of_class, class_arguments = read_docstring(type(self).__doc__)
        of_execute, arguments = read_docstring(type(self).execute.__doc__)
        return of_execute or of_class, class_arguments | arguments

    @cached_property
    def _model(self) -> type[BaseModel]:
        hints = get_type_hints(self.execute, include_extras=True)
        described = self._docstring[1]
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.execute).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
                raise ConfigError(
                    f"tool {self.name!r}: parameter {name!r} of execute needs a type annotation and must be passable "
                    "by name; *args and **kwargs have no schema"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            field = Field(default, description=described[name]) if name in described else default
            fields[name] = (portable(hints[name]), field)
        return create_model(f"{self.name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)

    def schema(self) -> dict[str, Any]:
        """The function schema that chat templates take."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self._docstring[0],
                "parameters": compact(self._model.model_json_schema()),
            },
        }

    def parse_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as `execute` wants them (nested objects built); ToolArgumentError says what does not fit."""
        try:
            parsed = self._model.model_validate(arguments)
        except ValidationError as error:
            problems = "; ".join(self._problem(details) for details in error.errors())
            raise ToolArgumentError(f"bad arguments for {self.name}: {problems}") from error
        return {name: getattr(parsed, name) for name in type(parsed).model_fields}

    def _problem(self, details: Any) -> str:
        name = ".".join(map(str, details["loc"])) or "arguments"
        if details["type"] == "extra_forbidden" and len(details["loc"]) == 1:
            return f"{name}: there is no such argument; there are {', '.join(self._model.model_fields) or 'none'}"
        if details["type"] == "missing":
            return f"{name}: missing"
        return f"{name}: {details['msg']}, not {details['input']!r:.80}"


TOOLS = {"calculator": "megatron_agent.tools.calculator:Calculator"}


def make_tools(name: str, arguments: Mapping[str, Any] | None = None) -> list[BaseTool]:
    """The tools behind a registered name or a `package.module:Class`, made with the keyword `arguments`.

    That is one instance, or what the class method `make_all(**arguments)` returns where the class has one: a server
    has many tools.
    """
    tool_class = resolve("tool", name, TOOLS)
    make_all = getattr(tool_class, "make_all", None)
    return make_all(**(arguments or {})) if make_all is not None else [tool_class(**(arguments or {}))]
