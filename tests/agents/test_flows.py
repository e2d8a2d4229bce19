"""Flows: what becomes a step, when an episode ends, and which budget ended it."""

import numpy as np
import pytest
from scripted_model import END, TOKENIZER, ScriptedModel, completion, ids_of, make_config, make_row, play, text_of

from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Observation
from megatron_agent.errors import ConfigError
from megatron_agent.flows.registry import make_flow
from megatron_agent.flows.single_step import SingleStep
from megatron_agent.model_folders.tiny_qwen3 import build
from trajectory.samples import merge_steps
from trajectory.steps import ContextChange, StopReason, TrajectoryStatus


class Counting(AgentEnv):
    """Says how many steps there were; ends, truncates or gives rewards when the reply says so."""

    def __init__(self, *, limit: int = 100, observation: str = "again") -> None:
        self._limit = limit
        self._observation = observation
        self._count = 0

    def reset(self, row):
        return Observation(messages=[*row.prompt, {"role": "user", "content": "at a1"}])

    def step(self, action: Action) -> EnvStep:
        self._count += 1
        return EnvStep(
            messages=[{"role": "user", "content": self._observation}],
            reward=0.5,
            reward_parts={"moves": 0.5},
            terminated="goal" in action.text,
            truncated=self._count >= self._limit,
            success=True if "goal" in action.text else None,
            info={"bad_actions": int("stay" in action.text)},
        )


ENV = {"env": "test_flows:Counting"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build(path)
    return path


def run(folder, *replies, agent=None, row=None, **rollout):
    model = ScriptedModel(*replies)
    trajectory = play(make_config(folder, agent={**ENV, **(agent or {})}, **rollout), model, row or make_row([]))
    return trajectory, model


def test_a_step_is_what_the_model_saw_and_said(folder):
    trajectory, model = run(folder, "left" + END, "goal" + END, row=make_row("go"))
    assert trajectory.status is TrajectoryStatus.OK
    assert trajectory.error is None
    first, second = trajectory.steps
    assert first.prompt_ids.tolist() == ids_of(
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>user\nat a1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.response_ids.tolist() == ids_of("left" + END)
    np.testing.assert_allclose(first.rollout_logprobs, [-0.1, -0.2], rtol=1e-6)
    assert first.response_mask.all()
    assert first.policy_version == 3
    assert [m["content"] for m in first.observation] == ["go", "at a1"]
    assert first.response_text == "left"
    assert [m["content"] for m in first.feedback] == ["again"]
    assert (first.reward, first.reward_parts) == (0.5, {"moves": 0.5})
    assert (first.terminated, first.truncated, first.stop_reason) == (False, False, StopReason.NONE)
    assert first.next_observation is None
    assert first.context_change is ContextChange.FIRST
    assert (second.terminated, second.truncated, second.stop_reason) == (True, False, StopReason.TERMINATED)
    assert second.next_observation == second.feedback
    assert second.observation == first.feedback
    assert second.context_change is ContextChange.CLEAN
    assert trajectory.success is True
    assert trajectory.episode_return == 1.0
    assert model.forgotten == ["episode"]


def test_the_next_prompt_is_the_last_one_the_response_and_the_new_observation(folder):
    trajectory, model = run(folder, "left" + END, "goal" + END)
    assert model.prompts[1] == [
        *model.prompts[0],
        *ids_of("left" + END),
        *ids_of("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"),
    ]
    samples = merge_steps(trajectory, trajectory_index=0)
    assert len(samples) == 1
    assert text_of(samples[0].token_ids[samples[0].loss_mask]) == f"left{END}goal{END}"


def test_a_reply_that_a_stop_string_ended_is_closed_without_training_the_closing_token(folder):
    """The engine stopped at `left`; the end-of-turn token that follows is the system's."""
    trajectory, model = run(
        folder, lambda: completion("left", finish_reason="stop"), "goal" + END, agent={"stop": ["left"]}
    )
    assert model.params[0].stop == ("left",)
    assert trajectory.steps[0].response_ids.tolist() == ids_of("left")
    assert len(trajectory.steps[0].rollout_logprobs) == 1
    (sample,) = merge_steps(trajectory, trajectory_index=0)
    closing = len(model.prompts[0]) + 1
    assert sample.token_ids[closing] == TOKENIZER.eos_token_id
    assert not sample.loss_mask[closing]
    assert sample.rollout_logprobs[closing] == 0
    assert trajectory.steps[0].info["cut_off"] == 0


def test_max_steps_truncates_the_last_step(folder):
    trajectory, _ = run(folder, *["left" + END] * 3, agent={"max_steps": 3})
    last = trajectory.steps[-1]
    assert len(trajectory.steps) == 3
    assert (last.terminated, last.truncated, last.stop_reason) == (False, True, StopReason.MAX_STEPS)
    assert last.next_observation == [{"role": "user", "content": "again"}]
    assert trajectory.status is TrajectoryStatus.TRUNCATED


def test_a_final_state_in_the_last_step_is_no_truncation(folder):
    trajectory, _ = run(folder, "left" + END, "goal" + END, agent={"max_steps": 2})
    assert trajectory.steps[-1].stop_reason is StopReason.TERMINATED
    assert trajectory.status is TrajectoryStatus.OK


def test_the_environments_own_limit(folder):
    trajectory, _ = run(folder, *["left" + END] * 2, agent={"env_kwargs": {"limit": 2}})
    assert trajectory.steps[-1].stop_reason is StopReason.ENV_TRUNCATED
    assert trajectory.steps[-1].truncated


def test_a_reply_cut_off_by_the_response_budget_is_an_action_like_others(folder):
    trajectory, model = run(folder, "left left left left", "goal" + END, agent={"max_response_tokens": 3})
    first, second = trajectory.steps
    assert model.params[0].max_tokens == 3
    assert len(first.response_ids) == 3
    assert (first.info["cut_off"], second.info["cut_off"]) == (1, 0)
    assert first.stop_reason is StopReason.NONE
    assert second.prompt_ids[len(first.prompt_ids) + 3] == TOKENIZER.eos_token_id


def test_a_final_answer_cut_off_by_the_response_budget_is_truncated(folder):
    agent = {"env": None, "tools": ["calculator"], "max_response_tokens": 3}
    trajectory, _ = run(folder, "yes yes yes yes", agent=agent, row=make_row("?"))
    assert trajectory.steps[-1].stop_reason is StopReason.RESPONSE_LENGTH
    assert trajectory.status is TrajectoryStatus.TRUNCATED


def test_a_reply_cut_off_by_the_episodes_budget_ends_it(folder):
    _, model = run(folder, "goal" + END)
    budget = len(model.prompts[0]) + 2
    trajectory, model = run(folder, "left left left left", agent={"max_episode_tokens": budget})
    assert model.params[0].max_tokens == 2
    assert len(trajectory.steps) == 1
    assert trajectory.steps[0].stop_reason is StopReason.EPISODE_LENGTH
    assert trajectory.status is TrajectoryStatus.TRUNCATED


def test_an_observation_that_does_not_fit_ends_the_episode(folder):
    agent = {"max_episode_tokens": 60, "env_kwargs": {"observation": "long " * 50}}
    trajectory, model = run(folder, "left" + END, agent=agent)
    assert len(model.prompts) == 1
    assert trajectory.steps[0].stop_reason is StopReason.PROMPT_LENGTH
    assert trajectory.steps[0].next_observation == trajectory.steps[0].feedback
    assert len(trajectory.steps[0].prompt_ids) + len(trajectory.steps[0].response_ids) < 60


def test_no_context_is_longer_than_the_episodes_budget(folder):
    for budget in range(40, 80):
        trajectory, _ = run(folder, *["left stay" + END] * 8, agent={"max_episode_tokens": budget})
        assert trajectory.error is None
        assert all(len(step.prompt_ids) + len(step.response_ids) <= budget for step in trajectory.steps)


def test_a_first_prompt_without_room_says_what_to_raise(folder):
    trajectory, _ = run(folder, agent={"max_episode_tokens": 5})
    assert trajectory.status is TrajectoryStatus.ENV_FAILED
    assert trajectory.error is not None
    assert "agent.max_episode_tokens is 5; raise the limit or shorten the rows" in trajectory.error


def test_the_system_prompt_goes_before_messages_without_one(folder):
    _, model = run(folder, "goal" + END, agent={"system_prompt": "Be brief."})
    assert text_of(model.prompts[0]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    own = make_row([{"role": "system", "content": "Be long."}])
    _, model = run(folder, "goal" + END, agent={"system_prompt": "Be brief."}, row=own)
    assert "Be brief." not in text_of(model.prompts[0])


def test_tools_are_rendered_and_called(folder):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    row = make_row("6 * 7?", reward_model={"style": "rule", "ground_truth": "42"})
    trajectory, model = run(folder, call + END, "#### 42" + END, agent={"env": None, "tools": ["calculator"]}, row=row)
    assert '"name": "calculator"' in text_of(model.prompts[0])
    assert text_of(model.prompts[1]).endswith(f"{call}{END}\n<|im_start|>tool\n42{END}\n<|im_start|>assistant\n")
    assert trajectory.steps[0].info["tool_calls"] == 1
    assert (trajectory.outcome_reward, trajectory.reward_parts) == (1.0, {"outcome": 1.0})
    assert trajectory.success is True


def test_counters_of_the_environment_are_on_the_step(folder):
    trajectory, _ = run(folder, "stay" + END, "goal" + END)
    assert [step.info["bad_actions"] for step in trajectory.steps] == [1, 0]


def test_single_step(folder):
    row = make_row("6 * 7?", agent_name="single_turn_agent", reward_model={"style": "rule", "ground_truth": "42"})
    trajectory, _ = run(folder, "#### 42" + END, row=row)
    (step,) = trajectory.steps
    assert (step.terminated, step.truncated, step.stop_reason) == (True, False, StopReason.TERMINATED)
    assert trajectory.outcome_reward == 1.0
    trajectory, _ = run(folder, "#### 4242", row=row, agent={"max_response_tokens": 7})
    (step,) = trajectory.steps
    assert (step.terminated, step.truncated, step.stop_reason) == (False, True, StopReason.RESPONSE_LENGTH)
    assert trajectory.status is TrajectoryStatus.TRUNCATED


def test_flows_by_name():
    assert isinstance(make_flow("single_turn_agent"), SingleStep)
    with pytest.raises(ConfigError, match="did you mean 'single_step'"):
        make_flow("single_stp")


def test_a_truncated_episode_keeps_the_prompt_that_would_have_come_next(folder):
    trajectory, model = run(folder, "left" + END, "up" + END, agent={"max_steps": 2})
    first, last = trajectory.steps
    assert (first.next_prompt_ids, last.stop_reason) == (None, StopReason.MAX_STEPS)
    assert last.next_prompt_ids.tolist() == [
        *model.prompts[1],
        *ids_of("up" + END),
        *ids_of("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_a_terminated_episode_has_no_next_prompt(folder):
    trajectory, _ = run(folder, "goal" + END)
    assert trajectory.steps[-1].next_prompt_ids is None
