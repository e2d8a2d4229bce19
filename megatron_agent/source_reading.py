"""Reads names and signatures out of Python sources without running them: checks must not load torch or user code."""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_agent.errors import did_you_mean

LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp)
"""Expressions whose value nobody can call."""

BASES_WITHOUT_CONSTRUCTOR = ("BaseTool", "AgentEnv")
"""Classes that only derive from these, and have no constructor of their own, take no arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The keyword arguments of a function or of a class's constructor."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    defaults: dict[str, Any]
    """The default values that are written as literals."""
    takes_any: bool
    """True where it has **kwargs, or where its source does not tell."""


def registry_entries(module: str, variable: str) -> dict[str, str]:
    """The dict literal that a module of this repository assigns to `variable`: names, and what they stand for.

    Values that are not text, such as a class that only the running module knows, are given as "".
    """
    for node in _parse(module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                return {_text(key): _text(value) for key, value in pairs if key is not None}
    raise LookupError(f"{module} assigns no dict literal to {variable}")


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def reference_problem(reference: str) -> str | None:
    """What is wrong with a `package.module:name` whose module or name does not exist, or which is a plain value where a
    function or class is wanted; None where it is fine."""
    module, _, attribute = reference.partition(":")
    try:
        tree = _parse(module)
    except (ImportError, ValueError):
        return f"there is no module {module!r} for {reference!r}; install it, or run from the folder that holds it"
    except SyntaxError as error:
        return f"{error.filename}:{error.lineno}: {error.msg}; mend the module {module!r}"
    names = _top_level_names(tree.body)
    if attribute in names:
        value = _literal(tree.body, attribute)
        if value is not None:
            return f"{reference!r} is {value}, which cannot be called; name a function or a class"
        return None
    if "*" in names:
        return None
    return f"the module {module!r} has no {attribute!r}; {did_you_mean(attribute, names)}"


def parameters(reference: str) -> Parameters:
    """The parameters of the function or class `package.module:name`, which exists.

    A class takes those of its `make_all`, which makes several instances, or else those of its constructor.
    """
    module, _, attribute = reference.partition(":")
    unknown = Parameters(names=(), required=(), defaults={}, takes_any=True)
    for node in _parse(module).body:
        if getattr(node, "name", None) != attribute:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return _parameters_of(node, skip=0)
        if isinstance(node, ast.ClassDef):
            methods = {member.name: member for member in node.body if isinstance(member, ast.FunctionDef)}
            makes = methods.get("make_all", methods.get("__init__"))
            if makes is not None:
                return _parameters_of(makes, skip=1)
            if all(isinstance(base, ast.Name) and base.id in BASES_WITHOUT_CONSTRUCTOR for base in node.bases):
                return Parameters(names=(), required=(), defaults={}, takes_any=False)
    return unknown


def _parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip: int) -> Parameters:
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keyword = [argument.arg for argument in arguments.kwonlyargs]
    defaults: dict[str, ast.expr] = dict(
        zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    )
    defaults |= {name: value for name, value in zip(keyword, arguments.kw_defaults, strict=True) if value is not None}
    names = (positional + keyword)[skip:]
    return Parameters(
        names=tuple(names),
        required=tuple(name for name in names if name not in defaults),
        defaults={name: value.value for name, value in defaults.items() if isinstance(value, ast.Constant)},
        takes_any=arguments.kwarg is not None,
    )


@cache
def _parse(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module {module}")
    if not spec.origin.endswith(".py"):  # a compiled module: its names cannot be read
        return ast.parse("from compiled import *")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"), filename=spec.origin)


def _literal(body: list[ast.stmt], name: str) -> str | None:
    """The source of the literal that a module's top level binds to `name` last; None where that is anything else."""
    literal = None
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                literal = ast.unparse(node.value) if isinstance(node.value, LITERALS) else None
        elif name in _top_level_names([node]):
            literal = None
    return literal


def _top_level_names(body: list[ast.stmt]) -> set[str]:
    """The names that statements of a module's top level define, also inside `if`, `try` and `with`."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).split(".")[0] for alias in aliases)
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                names |= _top_level_names(inner) | _top_level_names(other)
            case ast.With(body=inner):
                names |= _top_level_names(inner)
            case ast.Assign() | ast.AnnAssign():
                names.update(target.id for target in ast.walk(node) if isinstance(target, ast.Name))
    return names
