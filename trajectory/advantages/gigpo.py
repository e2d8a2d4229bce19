"""GiGPO (Feng et al. 2025): GRPO over episodes, and beside it a comparison of steps that began in the same state.

    A_t = grpo + step_weight * (G_t - mean_S) / (std_S + eps)          G_t = sum over k >= t of gamma^(k-t) r_k

S are the steps of the group, of whichever trajectory, that were shown the same observation as step t: they chose
differently in one state, and what followed says which choice was better. `step_norm: mean` leaves out std_S. A step
that is alone in S, and steps whose returns are equal, get the episode's part only.

With similarity < 1 observations need not be equal: in the order of the batch, an observation joins the first set whose
first observation resembles it that much, or starts a set. They are compared by words and single other signs
(`difflib.SequenceMatcher.ratio`): by characters a page of text would take a hundred times as long.
"""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal

import numpy as np

from trajectory.advantages.groups import normalise
from trajectory.advantages.grpo import grpo
from trajectory.advantages.inputs import EstimatorInputs
from trajectory.advantages.recursions import discounted_sums

WORD = re.compile(r"\w+|[^\w\s]")


def gigpo(
    inputs: EstimatorInputs,
    *,
    std: bool = True,
    eps: float = 1e-6,
    step_weight: float = 1.0,
    step_norm: Literal["mean_std", "mean"] = "mean_std",
    gamma: float = 1.0,
    similarity: float = 1.0,
) -> np.ndarray:
    """float64 [N]: the advantage of every step; `std` is of the episode's part, gamma discounts over steps.

    Raises ValueError where there is not one observation per step.
    """
    step_group = inputs.trajectory_group[inputs.step_trajectory]
    if len(inputs.step_observations) != len(step_group):
        raise ValueError(
            f"gigpo compares steps of one observation: {len(step_group)} steps need as many step_observations, "
            f"not {len(inputs.step_observations)}"
        )
    anchors = anchor_sets(inputs.step_observations, step_group, similarity)
    returns = discounted_sums(inputs.step_rewards, gamma, inputs.step_trajectory)
    of_steps = normalise(returns, anchors, std=step_norm == "mean_std", eps=eps)
    return grpo(inputs, std=std, eps=eps) + step_weight * of_steps


def anchor_sets(observations: Sequence[str], step_group: np.ndarray, similarity: float) -> np.ndarray:
    """int64 [N]: the set of each step, 0.. in order of appearance; no set has steps of two groups."""
    found: dict[tuple[int, str], int] = {}
    first_of_set: dict[int, list[tuple[list[str], int]]] = {}
    num_sets = 0
    for key in zip(step_group.tolist(), observations, strict=True):
        if key in found:
            continue
        group, observation = key
        known = first_of_set.setdefault(group, [])
        words = WORD.findall(observation) if similarity < 1 else []
        alike = _first_alike(words, known, similarity) if similarity < 1 else None
        if alike is None:
            alike = num_sets
            known.append((words, alike))
            num_sets += 1
        found[key] = alike
    return np.array([found[key] for key in zip(step_group.tolist(), observations, strict=True)], dtype=np.int64)


def _first_alike(words: Sequence[str], known: Sequence[tuple[list[str], int]], similarity: float) -> int | None:
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(words)  # the sequence that the matcher indexes
    for first, number in known:
        matcher.set_seq1(first)
        if (
            matcher.real_quick_ratio() >= similarity
            and matcher.quick_ratio() >= similarity
            and matcher.ratio() >= similarity
        ):
            return number
    return None
