"""Every advantage estimator by name. A new one is one new file and one line in each of two tables here."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from trajectory.advantages.inputs import Credit, EstimatorInputs

ESTIMATORS: dict[str, str] = {
    "grpo": "trajectory.advantages.grpo:grpo",
}
"""name -> function (EstimatorInputs, **options) -> Credit, or float64 [N], an advantage for every step."""

NEEDS: dict[str, str] = {
    "grpo": "group",
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
        values = np.asarray(credit, dtype=np.float64)
        credit = Credit(advantages=inputs.on_tokens(values) if len(values) == len(inputs.step_rewards) else values)
    if credit.advantages.shape != (inputs.num_tokens,):
        raise ValueError(
            f"the estimator {name!r} gave advantages of shape {credit.advantages.shape}; they are one per step "
            f"({len(inputs.step_rewards)}) or one per trained token ({inputs.num_tokens})"
        )
    return credit
