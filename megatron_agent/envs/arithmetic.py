"""Arithmetic that a small model cannot do in its head but a calculator can: rows, and demonstrations of the form."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_agent.tools.calculator import Calculator
from megatron_agent.tools.formats import HermesFormat, ToolCall

KINDS = (
    ("{name} has {a} boxes with {b} {item} each. How many {item} are there?", "{a} * {b}"),
    ("{name} has {a} {item}, {other} has {b}. How many together?", "{a} + {b}"),
    ("{name} has {a} boxes with {b} {item} each and {c} more. How many {item}?", "{a} * {b} + {c}"),
    ("{name} has {a} {item}, {other} has {b} and buys {c}. How many together?", "{a} + {b} + {c}"),
    ("{name} had {a} boxes of {b} {item} and gave away {c}. How many are left?", "{a} * {b} - {c}"),
    ("A box holds {a} {item}. {name} buys {b} boxes, {other} {c}. How many {item}?", "{a} * ({b} + {c})"),
)
"""(question, expression), from easy to hard."""
NUM_DEMONSTRATED = 2
SYSTEM = "Use the calculator. End with #### and the number."
_ITEMS = ("apples", "books", "coins", "stones", "tickets", "bottles", "stamps", "chairs")
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")


def rows(*, num_rows: int = 1000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Word problems of all kinds with their answers; other seeds give other problems."""
    rng = random.Random(seed)
    for _ in range(num_rows):
        question, expression = _problem(rng, KINDS)
        yield {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": Calculator().execute(expression)},
            "data_source": "arithmetic",
        }


def demonstrations(*, num_rows: int = 200, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Solved problems of the first kinds only: one call, its result, the marked answer.

    They show the form of a call and leave it to reinforcement learning to find the expressions of the other kinds.
    """
    rng = random.Random(seed)
    calculator = Calculator()
    for _ in range(num_rows):
        question, expression = _problem(rng, KINDS[:NUM_DEMONSTRATED])
        result = calculator.execute(expression)
        call = HermesFormat().render(ToolCall(name="calculator", arguments={"expression": expression}))
        yield {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
                {"role": "assistant", "content": call},
                {"role": "tool", "content": result},
                {"role": "assistant", "content": f"#### {result}"},
            ],
            "tools": [calculator.schema()],
        }


def _problem(rng: random.Random, kinds: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """A question and the expression that answers it."""
    question, expression = rng.choice(kinds)
    values: dict[str, Any] = {letter: rng.randint(100, 999) for letter in "abc"}
    values["name"], values["other"] = rng.sample(_NAMES, 2)
    values["item"] = rng.choice(_ITEMS)
    return question.format(**values), expression.format(**values)
