"""Outcome rewards: how a finished episode is scored, once."""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_agent.data import Row
from megatron_agent.registry import resolve

RewardFn = Callable[[Sequence[str], Row], Any]
"""(the model's replies in order, row) -> float, or {part: float}; sync or async. `success` may be a part."""

NUMERIC_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_BOXED = "\\boxed{"


def extract_answer(text: str) -> str | None:
    """The answer that a reply marks: the last `\\boxed{}` or what follows the last `####`; None where it marks none."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()
    return None


def _last_boxed(text: str) -> str | None:
    """What is between the braces of the last complete box; LaTeX in it has braces of its own."""
    for piece in reversed(text.split(_BOXED)[1:]):
        depth = 1
        for place, character in enumerate(piece):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return piece[:place].strip()
    return None


def exact(replies: Sequence[str], row: Row) -> float:
    """1 where the last reply's marked answer, or the whole reply, equals the ground truth."""
    last = replies[-1] if replies else ""
    return float((extract_answer(last) or last).strip() == str(row.ground_truth).strip())


def numeric(replies: Sequence[str], row: Row) -> float:
    """1 where the last reply's marked answer is the ground truth's number (relative tolerance 1e-6).

    Raises ValueError where the ground truth is no number.
    """
    wanted = _as_number(row.ground_truth)
    if wanted is None:
        raise ValueError(f"the ground truth {row.ground_truth!r} is not a number; use the reward `exact`")
    answer = extract_answer(replies[-1]) if replies else None
    number = _NUMBER.search(answer) if answer else None
    if number is None:
        return 0.0
    given = float(number.group().replace(",", ""))
    return float(math.isclose(given, wanted, rel_tol=NUMERIC_TOLERANCE, abs_tol=NUMERIC_TOLERANCE))


def rule(replies: Sequence[str], row: Row) -> float:
    """verl's `style: rule`: `numeric` where the ground truth is a number, else `exact`."""
    return (exact if _as_number(row.ground_truth) is None else numeric)(replies, row)


def _as_number(ground_truth: Any) -> float | None:
    try:
        return float(str(ground_truth).replace(",", ""))
    except ValueError:
        return None


REWARDS = {
    "exact": "megatron_agent.rewards:exact",
    "numeric": "megatron_agent.rewards:numeric",
    "rule": "megatron_agent.rewards:rule",
}


async def score(
    reward: str, replies: Sequence[str], row: Row, *, call: Callable[..., Awaitable[Any]] | None = None
) -> tuple[float, dict[str, float]]:
    """The outcome reward and its parts; `call(function, replies, row)` runs the function, by default here and now.

    Raises ValueError where the function gives NaN, infinity or no number.
    """
    function: RewardFn = resolve("reward", reward, REWARDS)
    value = function(replies, row) if call is None else await call(function, replies, row)
    if inspect.isawaitable(value):
        value = await value
    given = value if isinstance(value, dict) else {"outcome": value}
    parts = {name: _finite(part, f"the reward {reward!r}, part {name!r}") for name, part in given.items()}
    return math.fsum(part for name, part in parts.items() if name != "success"), parts


def _finite(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}, is {value!r}, which is not a finite number")
    return number
