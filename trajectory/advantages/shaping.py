"""What is done to rewards before an estimator sees them, and to advantages after it gave them."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from trajectory.advantages.groups import EQUAL_RETURNS, centre, deviations
from trajectory.advantages.groups import whiten as whiten_over_batch
from trajectory.advantages.inputs import Credit, EstimatorInputs


class RunningReturns:
    """Mean and variance of all returns of a run (Welford 1962; batches are merged as in Chan et al. 1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def update(self, returns: np.ndarray) -> None:
        """Add the returns [M] of a batch."""
        if not len(returns):
            return
        mean, count = float(returns.mean()), self._count + len(returns)
        shift = mean - self._mean
        self._squares += float(((returns - mean) ** 2).sum()) + shift**2 * self._count * len(returns) / count
        self._mean += shift * len(returns) / count
        self._count = count

    @property
    def std(self) -> float:
        """Population standard deviation; 0 where all returns so far are equal or there is none."""
        std = float(np.sqrt(self._squares / max(self._count, 1)))
        return std if std > EQUAL_RETURNS * max(abs(self._mean), 1.0) else 0.0

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])


def normalise_rewards(
    inputs: EstimatorInputs,
    kind: Literal["none", "group", "batch", "running_std"],
    *,
    running: RunningReturns | None,
    eps: float = 1e-8,
) -> EstimatorInputs:
    """The inputs with rewards, and greedy returns with them, on another scale.

    `group`, `batch`: every step reward is divided by std + eps, and mean / (std + eps) is subtracted once, from the
    trajectory's last step, so that the returns of each group or of the batch have mean 0 and standard deviation 1.
    Equal returns become exactly 0, and then nothing is divided: what the steps' rewards differ by stays as it was.
    `running_std`: the batch's returns are added to `running` and every step reward is divided by the std + eps of all
    returns so far; nothing is subtracted, and nothing divided while all are equal.

    Returns are those without token penalties. These keep their scale, as their coefficient is set against rewards of
    standard deviation 1, and stay in their steps' rewards.
    """
    if kind == "none":
        return inputs
    penalties = np.zeros(len(inputs.step_rewards))
    if inputs.token_penalties is not None:
        penalties = np.bincount(inputs.token_step(), weights=inputs.token_penalties, minlength=len(penalties))
    rewards, owner, group = inputs.step_rewards - penalties, inputs.step_trajectory, inputs.trajectory_group
    returns, greedy = np.bincount(owner, weights=rewards, minlength=len(group)), inputs.greedy_returns
    if kind == "running_std":
        assert running is not None, "running_std needs the returns of the run so far"
        running.update(returns)
        scale = running.std + eps if running.std else 1.0
        greedy = None if greedy is None else greedy / scale
        return replace(inputs, step_rewards=rewards / scale + penalties, greedy_returns=greedy)
    assert kind in ("group", "batch"), f"unknown kind of reward normalisation: {kind}"
    labels = group if kind == "group" else np.zeros_like(group)
    centred = centre(returns, labels)
    scale = deviations(centred, labels)
    scale = np.where(scale > 0, scale + eps, 1.0)
    rewards = rewards / scale[owner]
    last_step = np.searchsorted(owner, np.arange(len(group)), side="right") - 1
    rewards[last_step] = 0.0
    # The rest of the return, and not the reward less the mean: equal returns then add up to 0 without rounding.
    rewards[last_step] = centred / scale - np.bincount(owner, weights=rewards, minlength=len(group))
    if greedy is not None:
        _, member = np.unique(group, return_index=True)
        greedy = (greedy - (returns - centred)[member]) / scale[member]
    return replace(inputs, step_rewards=rewards + penalties, greedy_returns=greedy)


def overlong_penalties(num_tokens: np.ndarray, *, max_tokens: int, buffer_tokens: int, penalty: float) -> np.ndarray:
    """float64 [N]: DAPO's soft overlong punishment (Yu et al. 2025) of responses of `num_tokens` [N] tokens.

    0 up to max_tokens - buffer_tokens, from there linearly down to -penalty at max_tokens, and -penalty beyond.
    """
    over = (np.asarray(num_tokens, dtype=np.float64) - (max_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * np.clip(over, 0.0, 1.0)


def finish_advantages(
    credit: Credit, inputs: EstimatorInputs, *, whiten: bool, clip: float | None, per_step: bool, eps: float = 1e-8
) -> Credit:
    """The credit with its advantages, in this order:

    1. `per_step`: divided by the number of steps of their trajectory;
    2. `whiten`: shifted to mean 0 and divided by std + eps, both over all trained tokens of the batch;
    3. `clip`: limited to [-clip, clip], which therefore counts in standard deviations where 2 was asked for.

    Value targets stay: the critic learns returns, whatever is done to advantages.
    """
    advantages = credit.advantages
    if per_step:
        num_steps = np.bincount(inputs.step_trajectory, minlength=len(inputs.trajectory_group))
        advantages = advantages / inputs.on_tokens(num_steps[inputs.step_trajectory])
    if whiten:
        advantages = whiten_over_batch(advantages, eps)
    if clip is not None:
        advantages = np.clip(advantages, -clip, clip)
    return replace(credit, advantages=advantages)
