"""Arithmetic that a small model cannot do in its head but a calculator can: rows, and demonstrations of the form."""

import random
from collections.abc import Iterator
from typing import Any

from megatron_agent.tools.calculator import Calculator
from megatron_agent.tools.formats import HermesFormat, ToolCall

SYSTEM = "Use the calculator. End with #### and the number."
_ITEMS = ("apples", "books", "coins", "stones", "tickets", "bottles", "stamps", "chairs")
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")


def rows(*, num_rows: int = 1000, seed: int = 0, digits: int = 3) -> Iterator[dict[str, Any]]:
    """Word problems with their answers; other seeds give other problems."""
    rng = random.Random(seed)
    for _ in range(num_rows):
        question, expression = _problem(rng, digits)
        yield {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": Calculator().execute(expression)},
            "data_source": "arithmetic",
        }


def demonstrations(*, num_rows: int = 200, seed: int = 0, digits: int = 3) -> Iterator[dict[str, Any]]:
    """Solved problems: one call, its result, the marked answer."""
    rng = random.Random(seed)
    calculator = Calculator()
    for _ in range(num_rows):
        question, expression = _problem(rng, digits)
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


def _problem(rng: random.Random, digits: int) -> tuple[str, str]:
    """A question and the expression that answers it."""
    low, high = 10 ** (digits - 1), 10**digits - 1
    a, b, c = (rng.randint(low, high) for _ in range(3))
    name, other = rng.sample(_NAMES, 2)
    item = rng.choice(_ITEMS)
    return rng.choice(
        (
            (f"{name} has {a} boxes with {b} {item} each. How many {item} are there?", f"{a} * {b}"),
            (f"{name} has {a} boxes with {b} {item} each and {c} more. How many {item}?", f"{a} * {b} + {c}"),
            (f"{name} has {a} {item}, {other} has {b} and buys {c}. How many together?", f"{a} + {b} + {c}"),
            (f"{name} had {a} boxes of {b} {item} and gave away {c}. How many are left?", f"{a} * {b} - {c}"),
            (f"What is {a} * {b}?", f"{a} * {b}"),
            (f"What is ({a} + {b}) * {c}?", f"({a} + {b}) * {c}"),
        )
    )
