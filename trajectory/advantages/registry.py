"""Every advantage estimator by name. A new one is one new file and one line here."""

from collections.abc import Callable

import numpy as np

from trajectory.advantages.grpo import grpo
from trajectory.advantages.inputs import EstimatorInputs

ESTIMATORS: dict[str, Callable[..., np.ndarray]] = {"grpo": grpo}
"""name -> (EstimatorInputs, **options) -> float64 [N], the advantage of each step."""


def compute_advantages(name: str, inputs: EstimatorInputs, **options: float | bool) -> np.ndarray:
    """float64 [N]: the advantage of every step. Raises ValueError naming the known estimators."""
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(sorted(ESTIMATORS))}")
    return ESTIMATORS[name](inputs, **options)
