"""Outcome rewards: scored once per episode, and only finite numbers."""

import asyncio

import numpy as np
import pytest

from megatron_agent import rewards
from megatron_agent.data import parse_row
from megatron_agent.errors import ConfigError
from megatron_agent.rewards import extract_answer, score


def row(ground_truth="42"):
    record = {"prompt": "6 * 7?", "reward_model": {"style": "rule", "ground_truth": ground_truth}}
    return parse_row(record, index=0, where="row")


def rate(replies, ground_truth="42", reward="rule"):
    return asyncio.run(score(reward, replies, row(ground_truth)))


@pytest.fixture
def own_reward(monkeypatch):
    """Registers a function as the reward `own`."""

    def register(function):
        monkeypatch.setattr(rewards, "own", function, raising=False)
        return "megatron_agent.rewards:own"

    return register


def test_an_answer_beside_each_of_five_calls_counts_once():
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>\n#### 42'
    assert rate([call] * 5 + ["#### 42"]) == (1.0, {"outcome": 1.0})
    assert rate([call] * 5) == (1.0, {"outcome": 1.0})


def test_only_the_last_reply_counts():
    assert rate(["#### 42", "#### 43"])[0] == 0
    assert rate(["#### 43", "#### 42"])[0] == 1
    assert rate([])[0] == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so #### 42", "42"),
        ("#### 41\n#### 42\nbye", "42"),
        (r"thus \boxed{42}", "42"),
        (r"\boxed{41} no, \boxed{ 42 }", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{41} and \boxed{4", "41"),
        ("42", None),
        ("", None),
    ],
)
def test_the_marked_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("reply", "ground_truth", "reward"),
    [
        ("#### 42", 42, 1),
        ("#### 42.0", "42", 1),
        ("#### 1,234 apples", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### $42.", "42", 1),
        ("#### -0.5", "-.5", 1),
        ("#### .5", "0.5", 1),
        ("#### 1e3", "1000", 1),
        (r"\boxed{42}", "42", 1),
        ("#### 43", "42", 0),
        ("#### -42", "42", 0),
        ("#### many", "42", 0),
        ("42", "42", 0),
    ],
)
def test_numeric(reply, ground_truth, reward):
    assert rate([reply], ground_truth, "numeric")[0] == reward


def test_numeric_wants_a_number_as_ground_truth():
    with pytest.raises(ValueError, match="ground truth 'Paris' is not a number; use the reward `exact`"):
        rate(["#### 1"], "Paris", "numeric")


def test_exact():
    assert rate(["#### Paris"], "Paris", "exact")[0] == 1
    assert rate([" Paris\n"], "Paris", "exact")[0] == 1
    assert rate(["It is Paris"], "Paris", "exact")[0] == 0
    assert rate([r"\boxed{\frac{1}{2}}"], r"\frac{1}{2}", "exact")[0] == 1


def test_a_rule_of_verl_takes_numbers_and_text():
    assert rate(["#### 42.0"], "42")[0] == 1
    assert rate(["#### Paris"], "Paris")[0] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1], {"form": float("nan"), "outcome": 1.0}])
def test_what_is_no_finite_number_is_named(own_reward, value):
    name = own_reward(lambda replies, row: value)
    with pytest.raises(ValueError, match=r"the reward '.*:own', part '\w+', is .* not a finite number"):
        rate(["a"], reward=name)


def test_parts_add_up_and_success_is_a_verdict(own_reward):
    name = own_reward(lambda replies, row: {"outcome": 1.0, "form": np.float32(-0.25), "success": True})
    assert rate(["a"], reward=name) == (0.75, {"outcome": 1.0, "form": -0.25, "success": 1.0})


def test_an_async_reward_is_awaited(own_reward):
    async def judge(replies, row):
        await asyncio.sleep(0)
        return len(replies)

    assert rate(["a", "b"], reward=own_reward(judge))[0] == 2


def test_an_unknown_reward_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        rate(["a"], reward="numerc")
