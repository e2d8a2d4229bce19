"""Environments that come with the project: what they show, how they end, and tools that misbehave."""

import asyncio
import threading
from typing import Any

import pytest

from megatron_agent.config import AgentConfig
from megatron_agent.data import parse_row
from megatron_agent.envs.arithmetic import demonstrations
from megatron_agent.envs.arithmetic import rows as arithmetic_rows
from megatron_agent.envs.base import Action, environment_class
from megatron_agent.envs.decisive_step import DecisiveStep
from megatron_agent.envs.decisive_step import rows as decisive_rows
from megatron_agent.envs.frozen_lake import MOVES, FrozenLake, format_demonstrations
from megatron_agent.envs.frozen_lake import rows as lake_rows
from megatron_agent.envs.tool_env import ToolEnv
from megatron_agent.errors import ConfigError
from megatron_agent.flows.agent_env_loop import make_env
from megatron_agent.tools.base import BaseTool
from megatron_agent.tools.formats import HermesFormat, ToolCall

ROW = parse_row({"prompt": [{"role": "user", "content": "go"}]}, index=0, where="row")


def start(**options):
    env = FrozenLake(**options)
    return env, env.reset(ROW).messages


def play(env, *moves):
    for move in moves[:-1]:
        assert not env.step(Action(text=move)).terminated
    return env.step(Action(text=moves[-1]))


def test_lake_shows_the_row_and_the_square():
    _, messages = start()
    assert messages == [{"role": "user", "content": "go"}, {"role": "user", "content": "at a1"}]
    _, messages = start(start="b3", show_map=True)
    assert messages[-1]["content"] == "SFFF\nFHFH\nFFFH\nHFFG\nat b3"


def test_lake_moves_by_column_letter_and_row_number():
    env, _ = start()
    assert env.step(Action(text="right")).messages == [{"role": "user", "content": "at b1"}]
    assert env.step(Action(text="left")).messages[0]["content"] == "at a1"
    assert env.step(Action(text="down")).messages[0]["content"] == "at a2"
    assert env.step(Action(text="up")).messages[0]["content"] == "at a1"
    assert env.step(Action(text="up")).messages[0]["content"] == "at a1"  # the wall


def test_lake_goal_and_hole():
    won = play(start()[0], "down", "down", "right", "right", "down", "right")
    assert (won.terminated, won.reward, won.success) == (True, 1.0, True)
    lost = play(start()[0], "right", "down")
    assert (lost.terminated, lost.reward, lost.success) == (True, 0.0, False)
    on = play(start()[0], "right")
    assert (on.terminated, on.truncated, on.reward) == (False, False, 0.0)


@pytest.mark.parametrize("text", ["Left.", "I go left!", "**LEFT**", "left\n"])
def test_lake_reads_the_direction_out_of_a_sentence(text):
    env, _ = start(start="b1")
    assert env.step(Action(text=text)).messages[0]["content"] == "at a1"


@pytest.mark.parametrize("text", ["", "leftover", "stay"])
def test_lake_counts_a_reply_without_direction(text):
    env, _ = start(start="b1")
    outcome = env.step(Action(text=text))
    assert outcome.info == {"bad_actions": 1}
    assert outcome.messages[0]["content"] == "at b1"
    assert not outcome.terminated


def test_lake_seeds_decide_the_slips():
    def walk(seed):
        env, _ = start(is_slippery=True, seed=seed, desc=["SFFFF"] + ["FFFFF"] * 3 + ["FFFFG"])
        return [env.step(Action(text="right")).messages[0]["content"] for _ in range(6)]

    assert walk(1) == walk(1)
    assert len({tuple(walk(seed)) for seed in range(5)}) > 1


def test_lake_can_be_closed_before_it_began():
    FrozenLake().close()


def test_lake_rows_start_on_every_free_square():
    rows = list(lake_rows())
    assert [row["env_kwargs"]["start"] for row in rows[:5]] == ["a1", "b1", "c1", "d1", "a2"]
    assert len(rows) == 11
    for index, record in enumerate(rows):
        row = parse_row(record, index=index, where="row")
        shown = FrozenLake(**row.env_kwargs).reset(row).messages
        assert shown == [{"role": "user", "content": f"at {row.env_kwargs['start']}"}]


def test_lake_demonstrations_are_valid_moves_that_end_with_the_assistant():
    for record in format_demonstrations(num_rows=20):
        assert record["messages"][-1]["role"] == "assistant"
        assert {m["content"] for m in record["messages"] if m["role"] == "assistant"} <= set(MOVES)


def test_arithmetic_rows_and_demonstrations_agree_with_their_answers():
    for record in arithmetic_rows(num_rows=20, seed=3):
        assert record["prompt"][-1]["role"] == "user"
        assert str(int(record["reward_model"]["ground_truth"])) == record["reward_model"]["ground_truth"]
    for record in demonstrations(num_rows=5):
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        (call,) = HermesFormat().parse(record["messages"][2]["content"])
        assert isinstance(call, ToolCall)
        assert record["messages"][4]["content"] == f"#### {record['messages'][3]['content']}"


class Echo(BaseTool):
    name = "echo"

    def execute(self, text: str, times: int = 1) -> str:
        return text * times


class Table(BaseTool):
    name = "table"

    def execute(self) -> dict[str, list[str]]:
        return {"città": ["a"]}


class Raises(BaseTool):
    name = "raises"

    def execute(self) -> str:
        raise KeyError("nothing there")


class OwnTimeout(BaseTool):
    name = "own_timeout"

    def execute(self) -> str:
        raise TimeoutError("the server did not answer")


class Exits(BaseTool):
    name = "exits"

    def execute(self) -> str:
        raise SystemExit(3)


class Hangs(BaseTool):
    name = "hangs"
    gate = threading.Event()

    def execute(self) -> str:
        self.gate.wait()
        return "late"


class AsyncHangs(BaseTool):
    name = "async_hangs"

    async def execute(self) -> str:
        await asyncio.sleep(3600)
        return "late"


TOOLS = (Echo(), Table(), Raises(), OwnTimeout(), Exits(), Hangs(), AsyncHangs())


def call(name, **arguments):
    return HermesFormat().render(ToolCall(name=name, arguments=arguments))


def answer(text, *, is_cut_off=False, tool_timeout_s=30.0, **options):
    async def run():
        env = ToolEnv(tools=TOOLS, tool_timeout_s=tool_timeout_s, **options)
        await env.reset(ROW)
        return await env.step(Action(text=text, is_cut_off=is_cut_off))

    return asyncio.run(run())


def texts(outcome):
    assert all(message["role"] == "tool" for message in outcome.messages)
    return [message["content"] for message in outcome.messages]


@pytest.fixture(autouse=True)
def _let_hanging_tools_go():
    Hangs.gate.clear()
    yield
    Hangs.gate.set()


def test_tools_are_shown():
    observation = asyncio.run(ToolEnv(tools=TOOLS).reset(ROW))
    assert observation.messages == ROW.prompt
    assert [tool["function"]["name"] for tool in observation.tools] == [tool.name for tool in TOOLS]


def test_a_reply_without_call_is_the_final_answer():
    outcome = answer("#### 42")
    assert (outcome.terminated, outcome.truncated, outcome.messages) == (True, False, [])


def test_an_answer_that_the_token_limit_ended_is_no_final_answer():
    outcome = answer("The answer is", is_cut_off=True)
    assert (outcome.terminated, outcome.truncated) == (False, True)


def test_calls_are_answered_in_order():
    outcome = answer(call("echo", text="a", times=2) + call("echo", text="b"))
    assert texts(outcome) == ["aa", "b"]
    assert outcome.info == {"tool_calls": 2}
    assert not outcome.terminated


def test_objects_are_shown_as_json():
    assert texts(answer(call("table"))) == ['{"città": ["a"]}']


@pytest.mark.parametrize(
    ("text", "shown", "counters"),
    [
        (call("raises"), "error: KeyError: 'nothing there'", ["tool_errors"]),
        (call("own_timeout"), "error: TimeoutError: the server did not answer", ["tool_errors"]),
        (call("exits"), "error: RuntimeError: SystemExit: 3", ["tool_errors"]),
        (call("hangs"), "error: hangs took longer than 0.2 s", ["tool_errors"]),
        (call("async_hangs"), "error: async_hangs took longer than 0.2 s", ["tool_errors"]),
        (call("ehco", text="a"), "error: unknown tool 'ehco'; there are async", ["bad_calls", "call_unknown_tool"]),
        (call("echo"), "error: bad arguments for echo: text: missing", ["bad_calls", "call_bad_arguments"]),
        ("<tool_call>{'name'</tool_call>", "error: the tool call is not valid JSON", ["bad_calls", "call_bad_json"]),
    ],
)
def test_a_failing_call_is_an_observation(text, shown, counters):
    outcome = answer(text, tool_timeout_s=0.2 if "hangs" in text else 30)
    assert texts(outcome)[0].startswith(shown)
    assert outcome.info == {"tool_calls": 1} | dict.fromkeys(counters, 1)
    assert not outcome.terminated


def test_a_failing_call_does_not_cost_its_neighbours():
    outcome = answer(call("hangs") + call("echo", text="a") + call("raises"), tool_timeout_s=2)
    assert texts(outcome)[1] == "a"
    assert outcome.info == {"tool_calls": 3, "tool_errors": 2}


def test_many_hanging_tools_leave_room_for_others():
    outcome = answer("".join([call("hangs")] * 80) + call("echo", text="a"), tool_timeout_s=2)
    assert texts(outcome)[-1] == "a"
    assert outcome.info["tool_errors"] == 80


def test_a_cut_off_call_is_an_observation_and_counted():
    outcome = answer('<tool_call>{"name": "echo", "argum', is_cut_off=True)
    assert texts(outcome) == ["error: the tool call was cut off by the token limit"]
    assert outcome.info["bad_calls"] == 1
    assert not outcome.terminated


def test_bad_call_end():
    assert answer("<tool_call>{</tool_call>", bad_call="end").terminated
    assert answer("<tool_call>{", is_cut_off=True, bad_call="end").terminated
    assert not answer(call("echo", text="a"), bad_call="end").terminated
    assert not answer(call("raises"), bad_call="end").terminated  # the call was fine


def test_environments_by_name_and_arguments_from_the_row():
    assert environment_class("tool_env") is ToolEnv
    with pytest.raises(ConfigError, match="did you mean 'frozen_lake'"):
        environment_class("frozen_lak")
    agent = AgentConfig(env="frozen_lake", env_kwargs={"start": "b1", "show_map": True})
    row = parse_row({"prompt": [], "env_kwargs": {"start": "c1"}}, index=0, where="row")
    env: Any = make_env(row, agent, 1.0)
    assert env.reset(row).messages[0]["content"].endswith("FFFH\nHFFG\nat c1")


def test_tools_are_the_default_environment():
    def names(row, **options):
        env: Any = make_env(row, AgentConfig(**options), 1.0)
        return [tool["function"]["name"] for tool in asyncio.run(env.reset(row)).tools]

    own = parse_row({"prompt": [], "env_kwargs": {"tools": []}}, index=0, where="row")
    assert names(ROW, tools=["calculator"]) == ["calculator"]
    assert names(own, tools=["calculator"]) == []
    assert names(ROW) == []


@pytest.mark.parametrize(("column", "right"), [("a", "left"), ("b", "down")])
def test_only_the_third_move_decides(column, right):
    for third in MOVES:
        env = DecisiveStep(column=column)
        shown = [env.reset(ROW).messages[-1]["content"]]
        outcomes = [env.step(Action(text=third if number == 3 else "up")) for number in range(1, 11)]
        shown += [message["content"] for outcome in outcomes for message in outcome.messages]
        after = "h" if third == right else "g"
        assert shown == [f"at {column}{n}" for n in (1, 2, 3)] + [f"at {after}{n}" for n in range(4, 11)]
        assert [outcome.reward for outcome in outcomes] == [0.0] * 9 + [float(third == right)]
        assert [outcome.terminated for outcome in outcomes] == [False] * 9 + [True]
        assert outcomes[-1].success is (third == right)


def test_the_decisive_step_has_a_row_for_each_column_and_refuses_others():
    assert [row["env_kwargs"]["column"] for row in decisive_rows()] == ["a", "b"]
    with pytest.raises(ValueError, match="column is one of ab"):
        DecisiveStep(column="x")
