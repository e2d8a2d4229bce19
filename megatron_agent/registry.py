"""Looks up what a configuration names: an entry of a registry, or `package.module:attribute`."""

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_agent.errors import ConfigError, did_you_mean


def resolve(kind: str, name: str, registry: Mapping[str, str]) -> Any:
    """The object behind `name`; `registry` maps short names to `package.module:attribute`.

    Raises ConfigError, with the nearest registered name or with what failed to import.
    """
    reference = registry.get(name, name)
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"unknown {kind} {name!r}: {did_you_mean(name, registry)}; own ones are named package.module:name"
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be imported: {error}") from error
