"""Means and deviations over groups: what every estimator that compares returns with one another is made of.

`labels` say which group each value is in, 0..L-1. Deviations are population deviations (division by the count).
"""

import numpy as np

EQUAL_RETURNS = 1e-9
"""Values whose spread is below this share of their size are equal: 0.1 added up in another order differs by less."""


def group_means(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 [M]: the mean of the group of each of the M values."""
    return (np.bincount(labels, weights=values) / np.maximum(np.bincount(labels), 1))[labels]


def centre(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 [M]: each value minus its group's mean; exactly 0 in a group of equal values, whatever rounding says."""
    centred = values - group_means(values, labels)
    if not len(values):
        return centred
    scale, spread = np.ones(int(labels.max()) + 1), np.zeros(int(labels.max()) + 1)
    np.maximum.at(scale, labels, np.abs(values))
    np.maximum.at(spread, labels, np.abs(centred))
    return np.where((spread <= EQUAL_RETURNS * scale)[labels], 0.0, centred)


def deviations(centred: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 [M]: the standard deviation of the group of each value, of values that `centre` gave."""
    spread = np.zeros(int(labels.max(initial=0)) + 1)
    np.maximum.at(spread, labels, np.abs(centred))
    size = np.where(spread > 0, spread, 1.0)[labels]  # squares of what is at most 1 cannot overflow
    return size * np.sqrt(group_means((centred / size) ** 2, labels))


def normalise(values: np.ndarray, labels: np.ndarray, *, std: bool, eps: float) -> np.ndarray:
    """float64 [M]: (value - mean) / (deviation + eps) within each group; only the difference where not `std`."""
    centred = centre(values, labels)
    return centred / (deviations(centred, labels) + eps) if std else centred


def whiten(values: np.ndarray, eps: float) -> np.ndarray:
    """float64 [M]: the values shifted to mean 0 and divided by their standard deviation + eps; equal values give 0."""
    if not len(values):
        return values
    centred = values - values.mean()
    spread = np.abs(centred).max()
    if spread <= EQUAL_RETURNS * max(np.abs(values).max(), 1.0):
        return np.zeros(len(values))
    return centred / (spread * np.sqrt(np.mean((centred / spread) ** 2)) + eps)
