"""SingleStep: one prompt, one response; for tasks that a reward alone scores."""

import numpy as np

from megatron_agent.data import Row
from megatron_agent.flows.agent_env_loop import with_system_prompt
from megatron_agent.flows.base import AgentFlowBase, EpisodeEnd, FlowContext, cache_counters, response_arrays
from trajectory.steps import Step, StopReason


class SingleStep(AgentFlowBase):
    """No environment: the row's messages are the observation, and the reply ends the episode."""

    async def run(self, row: Row, context: FlowContext) -> EpisodeEnd:
        messages = with_system_prompt(row.prompt, context.agent.system_prompt)
        prompt = context.renderer.render(messages, [])
        room = min(context.agent.max_response_tokens, context.agent.max_episode_tokens - len(prompt))
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens, which leaves no room for a response")
        completion = await context.complete(prompt, max_tokens=room)
        cut_off = completion.finish_reason == "length"
        context.steps.append(
            Step(
                prompt_ids=np.asarray(prompt, dtype=np.int32),
                **response_arrays(completion),
                policy_version=completion.policy_version,
                observation=messages,
                response_text=context.renderer.decode(completion.token_ids),
                terminated=not cut_off,
                truncated=cut_off,
                stop_reason=StopReason.RESPONSE_LENGTH if cut_off else StopReason.TERMINATED,
                next_observation=[],
                info={"cut_off": int(cut_off), **cache_counters(completion)},
            )
        )
        return EpisodeEnd()
