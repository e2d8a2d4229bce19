"""From a YAML file, its bases and `key=value` overrides to a validated ExperimentConfig.

Every error names the dotted key and, where it came from a file, the file and line.
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError, did_you_mean, list_problems

KeyPath = tuple[str, ...]
BASE_KEY = "base"


@dataclass(slots=True)
class _Layer:
    """The keys of one source (a file with its bases, or the overrides) and where each was written."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """`file:line` of the key, or of the nearest section around it; empty when it was never written."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return ""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment file, put its `base` chain under it and the overrides over it, and validate.

    Mappings are merged key by key; every other value replaces the base's. Raises ConfigError, listing all mistakes.
    """
    layer = _merge(_read_file(Path(path), chain=()), _parse_overrides(overrides))
    try:
        return ExperimentConfig.model_validate(layer.values)
    except ValidationError as error:
        raise ConfigError(_describe(error, layer)) from None


def dump_config(config: ExperimentConfig) -> str:
    """All options as YAML, defaults included; loading it gives an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that the overrides set."""
    return [override.partition("=")[0] for override in overrides]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice and reads `1e-6` as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"{self.name}:{line}: the key {key!r} is not text; put it in quotes")
            if key in seen:
                raise ConfigError(f"{self.name}:{line}: the key {key!r} is already set in line {seen[key]}; keep one")
            seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """The document's value, and its node tree, which knows the lines."""
    loader = _Loader(text)
    loader.name = name
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _read_file(path: Path, chain: tuple[Path, ...]) -> _Layer:
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(str(item) for item in (*chain, resolved))
        raise ConfigError(f"{path}: its `{BASE_KEY}` chain comes back to itself: {names}; remove one of them")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        user = f" (the base of {chain[-1]})" if chain else ""
        raise ConfigError(f"{path}{user}: cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; an experiment is a YAML file") from None
    values, node = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections such as `run:` and `model:`, and holds no mapping")
    layer = _Layer(values, dict(_origins(node, str(path), ())))
    if BASE_KEY not in values:
        return layer
    base = values.pop(BASE_KEY)
    if not isinstance(base, str):
        raise ConfigError(f"{layer.origin((BASE_KEY,))}: `{BASE_KEY}` is {base!r}; name one YAML file")
    return _merge(_read_file(path.parent / base, (*chain, resolved)), layer)


def _origins(node: yaml.Node | None, name: str, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key_path = (*path, key_node.value)
            yield key_path, f"{name}:{key_node.start_mark.line + 1}"
            yield from _origins(value_node, name, key_path)


def _parse_overrides(overrides: Sequence[str]) -> _Layer:
    layer = _Layer()
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r}: write it as key.sub=value, for example run.steps=20")
        path = tuple(key.split("."))
        _require_known(path, override)
        for other in layer.origins:
            if path[: len(other)] == other or other[: len(path)] == path:
                raise ConfigError(f"override {override!r}: {'.'.join(other)} is overridden too; keep one of the two")
        value, _ = _parse_yaml(text, f"override {override!r}")
        section = layer.values
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
        layer.origins[path] = f"override {override!r}"
    return layer


def _require_known(path: KeyPath, override: str) -> None:
    """Refuse an override of a key that the schema does not have: it could have no effect."""
    annotation: Any = ExperimentConfig
    for depth, part in enumerate(path):
        model = section_model(annotation)
        if model is None:
            if is_free_mapping(annotation):
                return
            raise ConfigError(f"override {override!r}: {'.'.join(path[:depth])} is a value and has no key {part!r}")
        if part not in model.model_fields:
            raise ConfigError(f"override {override!r}: unknown key {'.'.join(path)}; {_nearest_key(path[: depth + 1])}")
        annotation = model.model_fields[part].annotation


def section_model(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation such as `SftConfig | None`; None where it is a plain value."""
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for member in members:
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def is_free_mapping(annotation: Any) -> bool:
    """True for options like `engine_args`, whose keys the schema does not know."""
    return typing.get_origin(annotation) is dict


def option_paths(model: type[BaseModel] = ExperimentConfig, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every section and option of the schema, in file order."""
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        inner = section_model(info.annotation)
        if inner is not None:
            yield from option_paths(inner, (*prefix, name))


def _nearest_key(path: KeyPath) -> str:
    """The remedy for an unknown key: a near name in its section, else the same name in another section."""
    siblings = [known[-1] for known in option_paths() if known[:-1] == path[:-1]]
    hint = did_you_mean(path[-1], siblings)
    if hint.startswith("known"):
        elsewhere = [".".join(known) for known in option_paths() if known[-1] == path[-1]]
        if elsewhere:
            return f"did you mean {' or '.join(repr(key) for key in elsewhere)}?"
    return hint


def _name_hint(path: KeyPath, value: Any) -> str:
    """The remedy where a section that is chosen by name was given the name itself."""
    if isinstance(value, str) and (*path, "name") in option_paths():
        return f", so write {'.'.join(path)}.name={value}"
    return ""


def _merge(below: _Layer, above: _Layer) -> _Layer:
    """`above` over `below`: mappings key by key, anything else replaced."""
    return _Layer(_merge_values(below.values, above.values), below.origins | above.origins)


def _merge_values(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: a YAML alias makes several keys share one, and only one of them may change."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge_values(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _describe(error: ValidationError, layer: _Layer) -> str:
    problems = []
    for item in error.errors(include_url=False):
        path = tuple(str(part) for part in item["loc"])
        key = ".".join(path)
        match item["type"]:
            case "extra_forbidden":
                problem = f"unknown key {key}; {_nearest_key(path)}"
            case "missing":
                problem = f"{key} is missing; it has no default"
            case "model_type" | "dict_type":
                problem = f"{key} is {item['input']!r}; it must be a mapping of keys{_name_hint(path, item['input'])}"
            case _:
                reason = item["msg"][0].lower() + item["msg"][1:]
                problem = f"{key} is {item['input']!r}; {reason}"
        origin = layer.origin(path)
        problems.append(f"{origin}: {problem}" if origin else problem)
    return list_problems(problems)
