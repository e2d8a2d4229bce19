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


class EstimatorOutputError(ValueError):
    """What an estimator returned does not fit the inputs or is not finite; names the estimator and the remedy."""


def compute_credit(name: str, inputs: EstimatorInputs, options: dict[str, Any]) -> Credit:
    """The credit of every trained token by the estimator `name`, or by one's own `package.module:function`.

    Raises ValueError where there is no such estimator, and EstimatorOutputError where what it returns does not fit the
    inputs or is not finite.
    """
    if name not in ESTIMATORS and ":" not in name:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(sorted(ESTIMATORS))}")
    module, _, attribute = ESTIMATORS.get(name, name).partition(":")
    function: Callable[..., Credit | np.ndarray] = getattr(importlib.import_module(module), attribute)
    credit = function(inputs, **options)
    if not isinstance(credit, Credit):
        of_steps = np.asarray(credit, dtype=np.float64)
        if of_steps.shape != inputs.step_rewards.shape:
            raise EstimatorOutputError(
                f"the estimator {name!r} gave an array of shape {of_steps.shape}; an array has one advantage per step "
                f"({len(inputs.step_rewards)}), and those of single tokens are given as Credit(advantages=...)"
            )
        _require_finite(name, "advantages", of_steps, per="step", of_unit=np.arange(len(of_steps)), inputs=inputs)
        credit = Credit(advantages=inputs.on_tokens(of_steps))
    for field in ("advantages", "value_targets", "value_mask"):
        values = getattr(credit, field)
        if values is not None and np.shape(values) != (inputs.num_tokens,):
            raise EstimatorOutputError(
                f"the estimator {name!r} gave {field} of shape {np.shape(values)}; there is one per trained token "
                f"({inputs.num_tokens})"
            )
    of_token = inputs.token_step()
    _require_finite(name, "advantages", credit.advantages, per="trained token", of_unit=of_token, inputs=inputs)
    if credit.value_targets is not None:
        # What the mask leaves out is not read.
        read = (
            credit.value_targets if credit.value_mask is None else np.where(credit.value_mask, credit.value_targets, 0)
        )
        _require_finite(name, "value_targets", read, per="trained token", of_unit=of_token, inputs=inputs)
    return credit


def _require_finite(
    name: str, field: str, values: np.ndarray, *, per: str, of_unit: np.ndarray, inputs: EstimatorInputs
) -> None:
    """`of_unit` is the step that each value belongs to."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if not len(wrong):
        return
    step = int(of_unit[wrong[0]])
    episode = int(inputs.step_trajectory[step])
    number = step - int(np.searchsorted(inputs.step_trajectory, episode))
    raise EstimatorOutputError(
        f"the estimator {name!r} gave {field} that are not finite: {len(wrong)} of {len(values)}, one per {per}; the "
        f"first is {values[wrong[0]]}, in step {number} of episode {episode} of the batch (both from 0). Look for a "
        "division by 0 or a logarithm of 0, as where a group's returns are all equal, and give 0 there"
    )
