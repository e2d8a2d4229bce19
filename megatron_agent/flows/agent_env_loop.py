"""AgentEnvLoop: observe, say, let the environment answer, until it ends or a limit is reached."""

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_agent.config import AgentConfig
from megatron_agent.data import Row
from megatron_agent.envs.base import Action, AgentEnv, EnvStep, environment_class
from megatron_agent.flows.base import AgentFlowBase, EpisodeEnd, FlowContext, Message, cache_counters, response_arrays
from trajectory.steps import ContextChange, Step, StopReason


class AgentEnvLoop(AgentFlowBase):
    """One environment, one agent, append-only history. Tools are an environment too (ToolEnv)."""

    async def run(self, row: Row, context: FlowContext) -> EpisodeEnd:
        env: AgentEnv = await context.call(make_env, row, context.agent, context.limits.tool_timeout_s)
        try:
            end = await self._play(env, row, context)
        except BaseException:
            await context.clean_up(env.close)
            raise
        await context.call(env.close)
        return end

    async def _play(self, env: AgentEnv, row: Row, context: FlowContext) -> EpisodeEnd:
        agent, renderer = context.agent, context.renderer
        observation = await context.call(env.reset, row)
        shown: list[Message] = list(observation.messages)
        history = with_system_prompt(shown, agent.system_prompt)
        prompt, change = renderer.render(history, observation.tools), ContextChange.FIRST
        end = EpisodeEnd()
        for number in range(1, agent.max_steps + 1):
            room = agent.max_episode_tokens - len(prompt)
            if room < 1:
                assert not context.steps, "a step whose successor has no room is truncated"
                raise ValueError(
                    f"the first prompt has {len(prompt)} tokens and agent.max_episode_tokens is "
                    f"{agent.max_episode_tokens}; raise the limit or shorten the rows"
                )
            completion = await context.complete(prompt, max_tokens=min(agent.max_response_tokens, room))
            text = renderer.decode(completion.token_ids)
            cut_off = completion.finish_reason == "length"
            outcome = checked(await context.call(env.step, Action(text=text, is_cut_off=cut_off)))
            reason = stop_reason(
                outcome,
                is_cut_off=cut_off,
                no_room=cut_off and room < agent.max_response_tokens,
                is_last=number == agent.max_steps,
            )
            next_prompt, next_change = prompt, change
            if reason in (StopReason.NONE, StopReason.MAX_STEPS, StopReason.ENV_TRUNCATED):
                following = [{"role": "assistant", "content": text}, *outcome.messages]
                next_prompt, next_change = renderer.extend(
                    prompt, completion.token_ids, history, following, observation.tools
                )
                history = [*history, *following]
                if reason is StopReason.NONE and len(next_prompt) >= agent.max_episode_tokens:
                    reason = StopReason.PROMPT_LENGTH
            context.steps.append(
                Step(
                    prompt_ids=np.asarray(prompt, dtype=np.int32),
                    **response_arrays(completion),
                    policy_version=completion.policy_version,
                    observation=shown,
                    response_text=text,
                    feedback=outcome.messages,
                    reward=outcome.reward,
                    reward_parts=outcome.reward_parts,
                    terminated=outcome.terminated,
                    truncated=reason.is_truncation,
                    stop_reason=reason,
                    next_observation=outcome.messages if reason is not StopReason.NONE else None,
                    next_prompt_ids=shown_next(next_prompt, reason, limit=agent.max_episode_tokens),
                    context_change=change,
                    info={
                        **outcome.info,
                        "cut_off": int(cut_off),
                        **cache_counters(completion),
                    },
                )
            )
            if outcome.success is not None:
                end.success = outcome.success
            if reason is not StopReason.NONE:
                break
            prompt, change, shown = next_prompt, next_change, outcome.messages
        return end


def shown_next(next_prompt: list[int], reason: StopReason, *, limit: int) -> np.ndarray | None:
    """What a critic values after a truncated last step: the next prompt, where it was made and still fits."""
    if reason not in (StopReason.MAX_STEPS, StopReason.ENV_TRUNCATED) or len(next_prompt) > limit:
        return None
    return np.asarray(next_prompt, dtype=np.int32)


def stop_reason(outcome: EnvStep, *, is_cut_off: bool, no_room: bool, is_last: bool) -> StopReason:
    """Why the episode ends with this step; NONE where it goes on. A final state goes before any limit.

    `no_room`: the episode's token budget, and not the response's, cut the response off.
    """
    if outcome.terminated:
        return StopReason.TERMINATED
    if no_room:
        return StopReason.EPISODE_LENGTH
    if outcome.truncated:
        return StopReason.RESPONSE_LENGTH if is_cut_off else StopReason.ENV_TRUNCATED
    return StopReason.MAX_STEPS if is_last else StopReason.NONE


def checked(outcome: Any) -> EnvStep:
    """What `env.step` returned; raises ValueError where it is no EnvStep, or a number in it is none."""
    if not isinstance(outcome, EnvStep):
        raise ValueError(f"step() returned {type(outcome).__name__}, not an EnvStep")
    numbers = {"reward": outcome.reward} | {f"reward_parts[{name!r}]": v for name, v in outcome.reward_parts.items()}
    for name, value in numbers.items():
        if not isinstance(value, int | float | np.number | np.bool_) or not np.isfinite(value):
            raise ValueError(f"step() returned {name} {value!r}, which is not a finite number")
    return outcome


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """The messages, after the configured system prompt where they have none of their own."""
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def make_env(row: Row, agent: AgentConfig, tool_timeout_s: float) -> AgentEnv:
    """The row's environment: agent.env with its defaults, overridden by the row's `env_kwargs`.

    Without agent.env it is the tools' (none: the first reply is the final answer).
    """
    defaults: dict[str, Any] = {}
    if agent.env in (None, "tool_env"):
        defaults = {
            "tools": agent.tools,
            "tool_format": agent.tool_format,
            "bad_call": agent.bad_call,
            "tool_timeout_s": tool_timeout_s,
        }
    make: Callable[..., AgentEnv] = environment_class(agent.env or "tool_env")
    return make(**{**defaults, **agent.env_kwargs, **row.env_kwargs})
