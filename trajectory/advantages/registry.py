"""Every advantage estimator by name. A new one is one new file and one line in each of two tables here."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from trajectory.advantages.inputs import Credit, EstimatorInputs

ESTIMATORS: dict[str, str] = {
    "gae_step": "trajectory.advantages.gae_step:gae_step",
    "gae_token": "trajectory.advantages.gae_token:gae_token",
    "gae_turn": "trajectory.advantages.gae_turn:gae_turn",
    "gigpo": "trajectory.advantages.gigpo:gigpo",
    "grpo": "trajectory.advantages.grpo:grpo",
    "opd": "trajectory.advantages.opd:opd",
    "reinforce": "trajectory.advantages.reinforce:reinforce",
    "reinforce_plus_plus": "trajectory.advantages.reinforce_plus_plus:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "trajectory.advantages.reinforce_plus_plus:reinforce_plus_plus_baseline",
    "remax": "trajectory.advantages.remax:remax",
    "rloo": "trajectory.advantages.rloo:rloo",
    "step_reward_group": "trajectory.advantages.step_reward_group:step_reward_group",
}
"""name -> function (EstimatorInputs, **options) -> Credit, or float64 [N], an advantage for every step."""

NEEDS: dict[str, str] = {
    "gae_step": "critic",
    "gae_token": "critic",
    "gae_turn": "critic",
    "gigpo": "group",
    "grpo": "group",
    "opd": "teacher",
    "reinforce_plus_plus_baseline": "group",
    "remax": "greedy",
    "rloo": "group",
    "step_reward_group": "group",
}
"""What an estimator cannot do without: `group`, several trajectories of one prompt; `critic`, values; `teacher`, its
log-probs; `greedy`, a greedy episode of each prompt. One that is not here needs nothing."""


def compute_credit(name: str, inputs: EstimatorInputs, options: dict[str, Any]) -> Credit:
    """The credit of every trained token by the estimator `name`, or by one's own `package.module:function`.

    Raises ValueError where there is no such estimator, and where what it returns does not fit the inputs.
    """
    if name not in ESTIMATORS and ":" not in name:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(sorted(ESTIMATORS))}")
    module, _, attribute = ESTIMATORS.get(name, name).partition(":")
    function: Callable[..., Credit | np.ndarray] = getattr(importlib.import_module(module), attribute)
    credit = function(inputs, **options)
    if not isinstance(credit, Credit):
        of_steps = np.asarray(credit, dtype=np.float64)
        if of_steps.shape != inputs.step_rewards.shape:
            raise ValueError(
                f"the estimator {name!r} gave an array of shape {of_steps.shape}; an array has one advantage per step "
                f"({len(inputs.step_rewards)}), and those of single tokens are given as Credit(advantages=...)"
            )
        credit = Credit(advantages=inputs.on_tokens(of_steps))
    for field in ("advantages", "value_targets", "value_mask"):
        values = getattr(credit, field)
        if values is not None and values.shape != (inputs.num_tokens,):
            raise ValueError(
                f"the estimator {name!r} gave {field} of shape {values.shape}; there is one per trained token "
                f"({inputs.num_tokens})"
            )
    return credit
