"""Outcome rewards: how a finished episode is scored, once."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_agent.data import Row
from megatron_agent.registry import resolve

RewardFn = Callable[[Sequence[str], Row], Any]
"""(the model's replies in order, row) -> float, or {part: float}; sync or async. `success` may be a part."""

NUMERIC_TOLERANCE = 1e-6
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def extract_answer(text: str) -> str | None:
    """The answer that a reply marks: the last `\\boxed{}` or what follows the last `####`; None where it marks none."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if boxed:
        return boxed[-1].strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()
    return None


def exact(replies: Sequence[str], row: Row) -> float:
    """1 where the last reply's marked answer, or the whole reply, equals the ground truth."""
    last = replies[-1] if replies else ""
    return float((extract_answer(last) or last).strip() == str(row.ground_truth).strip())


def numeric(replies: Sequence[str], row: Row) -> float:
    """1 where the last reply's marked answer is the ground truth's number (relative tolerance 1e-6)."""
    answer = extract_answer(replies[-1]) if replies else None
    number = _NUMBER.search(answer) if answer else None
    if number is None:
        return 0.0
    given, wanted = float(number.group().replace(",", "")), float(str(row.ground_truth).replace(",", ""))
    return float(math.isclose(given, wanted, rel_tol=NUMERIC_TOLERANCE, abs_tol=NUMERIC_TOLERANCE))


REWARDS = {"exact": "megatron_agent.rewards:exact", "numeric": "megatron_agent.rewards:numeric", "rule": "megatron_agent.rewards:numeric"}


async def score(reward: str, replies: Sequence[str], row: Row) -> tuple[float, dict[str, float]]:
    """The outcome reward and its parts. Raises ValueError where the function gives NaN, infinity or no number."""
    value = resolve("reward", reward, REWARDS)(replies, row)
    if inspect.isawaitable(value):
        value = await value
    parts = {name: float(part) for name, part in value.items()} if isinstance(value, dict) else {"outcome": float(value)}
    total = math.fsum(part for name, part in parts.items() if name != "success")
    if not math.isfinite(total):
        raise ValueError(f"the reward {reward!r} returned {value!r}, which is not a finite number")
    return total, parts
