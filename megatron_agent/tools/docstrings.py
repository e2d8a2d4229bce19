"""Reads what a tool's docstring says about the tool and about each argument (Google style)."""

import inspect
import re

_SECTION = re.compile(r"(Args|Arguments|Parameters):\s*$")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def read_docstring(docstring: str | None) -> tuple[str, dict[str, str]]:
    """The text without its `Args:` section, and that section's text for each argument."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    start = next((number for number, line in enumerate(lines) if _SECTION.match(line)), None)
    if start is None:
        return "\n".join(lines).strip(), {}
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith((" ", "\t"))):
        end += 1
    text = "\n".join([*lines[:start], *lines[end:]]).strip()
    return text, _arguments(inspect.cleandoc("\n" + "\n".join(lines[start + 1 : end])).splitlines())


def _arguments(lines: list[str]) -> dict[str, str]:
    described: dict[str, list[str]] = {}
    name = None
    for line in lines:
        match = None if line.startswith((" ", "\t")) else _ARGUMENT.match(line)
        if match:
            name = match[1]
            described[name] = [match[2]]
        elif name is not None and line.strip():
            described[name].append(line.strip())
    return {name: " ".join(parts).strip() for name, parts in described.items()}
