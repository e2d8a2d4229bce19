"""Flows by name; verl's agent loop names work too, so that its files load unchanged."""

from megatron_agent.flows.base import AgentFlowBase
from megatron_agent.registry import resolve

FLOWS = {
    "agent_env_loop": "megatron_agent.flows.agent_env_loop:AgentEnvLoop",
    "single_step": "megatron_agent.flows.single_step:SingleStep",
    "tool_agent": "megatron_agent.flows.agent_env_loop:AgentEnvLoop",
    "single_turn_agent": "megatron_agent.flows.single_step:SingleStep",
}


def make_flow(name: str) -> AgentFlowBase:
    """An instance of a registered flow or of `package.module:Class`; ConfigError where there is none."""
    return resolve("flow", name, FLOWS)()
