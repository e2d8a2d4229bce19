"""Checks of names: registry entries, `package.module:attribute` references, and the arguments given to them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import did_you_mean
from megatron_agent.source_reading import parameters, reference_problem, registry_entries

TOOL_FORMATS = ("megatron_agent.tools.formats", "TOOL_FORMATS")
TOOLS = ("megatron_agent.tools.base", "TOOLS")
ENVS = ("megatron_agent.envs.base", "ENVIRONMENTS")
FLOWS = ("megatron_agent.flows.registry", "FLOWS")
REWARDS = ("megatron_agent.rewards", "REWARDS")


def check_tool_format(config: ExperimentConfig) -> Iterator[str]:
    """The tool format, which comes from the registry only."""
    name, known = config.agent.tool_format, registry_entries(*TOOL_FORMATS)
    if name not in known:
        yield f"agent.tool_format: there is no {name!r}; {did_you_mean(name, known)}"


def has_tool_env(config: ExperimentConfig) -> bool:
    """Whether episodes are played by the environment that agent.tools and its options are for."""
    return config.agent.env in (None, "tool_env")


def check_agent_names(config: ExperimentConfig) -> Iterator[str]:
    """Flow, environment, tools and reward; registered or the user's own. Also the environment's arguments."""
    agent = config.agent
    named: list[tuple[str, str, tuple[str, str]]] = [("agent.flow", agent.flow, FLOWS)]
    named += [(f"agent.tools[{index}]", tool.name, TOOLS) for index, tool in enumerate(agent.tools)]
    if agent.env is not None:
        named.append(("agent.env", agent.env, ENVS))
    if agent.reward is not None:
        named.append(("agent.reward", agent.reward, REWARDS))
    for option, name, registry in named:
        known = registry_entries(*registry)
        problem = name_problem(option, name, known)
        if problem:
            yield problem
        elif option == "agent.env":
            reference = known.get(name, name)
            # A row's own env_kwargs give what is missing here.
            yield from arguments_problem("agent.env_kwargs", reference, agent.env_kwargs, given_later=None)
    for index, tool in enumerate(agent.tools):
        reference = registry_entries(*TOOLS).get(tool.name, tool.name)
        if not name_problem("agent.tools", tool.name, registry_entries(*TOOLS)):
            yield from arguments_problem(f"agent.tools[{index}].args", reference, tool.args, given_later=())
    if agent.tools and not has_tool_env(config):
        yield f"agent.tools are for the default environment, but agent.env is {agent.env}; remove one of the two"
    names = [tool.name for tool in agent.tools if not tool.args]
    if len(set(names)) < len(names):
        yield f"agent.tools names a tool twice: {', '.join(names)}; keep one"


def name_problem(option: str, name: str, known: Iterable[str]) -> str | None:
    """What is wrong with a registered name or a `package.module:attribute`; None where it is fine."""
    known = list(known)
    if name in known:
        return None
    if ":" not in name:
        return f"{option}: there is no {name!r} (one of your own is package.module:name); {did_you_mean(name, known)}"
    problem = reference_problem(name)
    return f"{option}: {problem}" if problem else None


def arguments_problem(
    option: str, reference: str, arguments: Mapping[str, Any], *, given_later: Collection[str] | None
) -> Iterator[str]:
    """Arguments that the function or class does not take, and missing ones that are not `given_later`.

    None for `given_later` means that any argument may still come.
    """
    accepted = parameters(reference)
    if accepted.takes_any:
        return
    for name in arguments:
        if name not in accepted.names:
            yield f"{option}.{name}: {reference} has no such argument; {did_you_mean(name, accepted.names)}"
    if given_later is not None:
        missing = set(accepted.required) - set(arguments) - set(given_later)
        if missing:
            yield f"{option}: {reference} also needs {', '.join(sorted(missing))}"
