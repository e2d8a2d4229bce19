"""BaseTool: one class with a typed `execute`; its JSON schema comes from the signature and the docstring."""

import inspect
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from megatron_agent.errors import ConfigError
from megatron_agent.registry import resolve


class ToolArgumentError(ValueError):
    """The model's arguments do not fit the signature; the text is what the model sees."""


class BaseTool:
    """Base of tools. A subclass sets `name` and writes `execute(self, ...)`, sync or async, with annotated parameters.

    The class docstring (or that of `execute`) is the description. Whatever `execute` returns is shown to the model
    as text; what it raises becomes an error observation.
    """

    name: ClassVar[str]

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work; subclasses give it named, annotated parameters."""
        raise NotImplementedError

    @cached_property
    def _model(self) -> type[BaseModel]:
        hints = get_type_hints(self.execute, include_extras=True)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.execute).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in hints:
                raise ConfigError(
                    f"tool {self.name!r}: parameter {name!r} of execute needs a type annotation, and *args or "
                    "**kwargs have no schema"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        return create_model(f"{self.name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)

    def schema(self) -> dict[str, Any]:
        """The function schema that chat templates take."""
        description = inspect.getdoc(type(self).execute) or inspect.getdoc(type(self)) or ""
        if type(self).execute.__doc__ is None or type(self).execute is BaseTool.execute:
            description = inspect.getdoc(type(self)) or ""
        parameters = self._model.model_json_schema()
        _drop_titles(parameters)
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def parse_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as `execute` wants them (nested objects built); ToolArgumentError says what does not fit."""
        try:
            parsed = self._model.model_validate(arguments)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ToolArgumentError(f"bad arguments for {self.name}: {problems}") from error
        return {name: getattr(parsed, name) for name in type(parsed).model_fields}


def _drop_titles(schema: Any) -> None:
    """pydantic's titles repeat the names and cost prompt tokens."""
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            schema.pop("title")
        for value in schema.values():
            _drop_titles(value)
    elif isinstance(schema, list):
        for value in schema:
            _drop_titles(value)


TOOLS = {"calculator": "megatron_agent.tools.calculator:Calculator"}


def make_tool(name: str) -> BaseTool:
    """An instance of a registered tool or of `package.module:Class`."""
    return resolve("tool", name, TOOLS)()
