"""The one error of an estimator that lacks what it reads."""

import numpy as np


def needed(values: np.ndarray | None, name: str, remedy: str) -> np.ndarray:
    """`values`, the field `name` of EstimatorInputs; raises ValueError with the remedy where it is None."""
    if values is None:
        raise ValueError(f"this advantage estimator reads {name}, and there is none: {remedy}")
    return values
