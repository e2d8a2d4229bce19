"""JSON schemas as chat templates want them, and annotations as pydantic wants them."""

import sys
import types
import typing
from typing import Any

import typing_extensions


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions put where they are used, and without titles: both cost prompt tokens.

    A type that holds itself stays a reference.
    """
    definitions = schema.get("$defs", {})
    kept: set[str] = set()

    def visit(part: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [visit(entry, inside) for entry in part]
        if not isinstance(part, dict):
            return part
        reference = part.get("$ref", "")
        name = reference.removeprefix("#/$defs/")
        if reference and name in inside:
            kept.add(name)
        elif reference:
            part = definitions[name] | {key: value for key, value in part.items() if key != "$ref"}
            inside = (*inside, name)
        return {
            key: {field: visit(value, inside) for field, value in entry.items()}
            if key == "properties"
            else entry
            if key in ("default", "const", "enum", "examples")
            else visit(entry, inside)
            for key, entry in part.items()
            if key not in ("title", "$defs")
        }

    result = visit(schema, ())
    if kept:
        result["$defs"] = {name: visit(definitions[name], (name,)) for name in sorted(kept)}
    return result


def portable(hint: Any) -> Any:
    """The annotation with typing's TypedDicts as typing_extensions', which pydantic wants before Python 3.12."""
    if sys.version_info >= (3, 12):
        return hint
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        fields = {
            name: portable(part) if name in hint.__required_keys__ else typing_extensions.NotRequired[portable(part)]
            for name, part in hints.items()
        }
        make: Any = typing_extensions.TypedDict
        return make(hint.__name__, fields)
    origin: Any = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(portable(part) for part in arguments)]  # noqa: UP007
    if origin in (list, dict, tuple, set):
        return origin[tuple(portable(part) for part in arguments)]  # pyright: ignore[reportInvalidTypeArguments]
    return hint
