"""How much each trained token is to be praised: reward shaping, the estimator, what is done to its advantages."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError
from parallel.losses.kl import KL_ESTIMATORS
from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.registry import NEEDS, EstimatorOutputError, compute_credit
from trajectory.advantages.shaping import RunningReturns, finish_advantages, normalise_rewards, overlong_penalties

TokenScores = dict[str, torch.Tensor]
"""What models said of one row: `old`, `reference`, `teacher` log-probs or `values`, each float32 [T]; not for credit
`teacher_top_ids` and `teacher_top_logprobs`, [N, k]."""


def scores_for_credit(config: ExperimentConfig) -> frozenset[str]:
    """The names in TokenScores that credit needs; none where it can be given before the trainer sees the rows."""
    algorithm = config.algorithm
    wanted: set[str] = set()
    if algorithm.critic:
        wanted.add("values")
    if algorithm.teacher and algorithm.teacher.top_k == 0:
        wanted |= {"old"} if algorithm.teacher.replicas else {"teacher", "old"}
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "reward":
        wanted |= {"reference", "old"}
    return frozenset(wanted)


class CreditGiver:
    """`algorithm.reward` and `algorithm.advantage` applied to a batch; keeps the statistics of running_std."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._running = RunningReturns()
        self.scores = scores_for_credit(config)
        self.need = NEEDS.get(config.algorithm.advantage.name)

    def shape_rewards(self, inputs: EstimatorInputs) -> EstimatorInputs:
        """The inputs with long responses penalised and rewards normalised. Call it once a batch."""
        options = self._config.algorithm.reward
        if options.overlong:
            penalties = overlong_penalties(
                inputs.step_num_tokens,
                max_tokens=self._config.agent.max_response_tokens,
                buffer_tokens=options.overlong.buffer_tokens,
                penalty=options.overlong.penalty,
            )
            inputs = replace(inputs, step_rewards=inputs.step_rewards + penalties)
        return normalise_rewards(inputs, options.normalise, running=self._running)

    def give(self, inputs: EstimatorInputs) -> Credit:
        """The credit of every trained token; `inputs` hold the scores that it needs. Raises ConfigError where what the
        estimator returns cannot be used; what its own code raises is not caught."""
        options = self._config.algorithm.advantage
        inputs = self._with_kl_penalties(inputs)
        try:
            credit = compute_credit(options.name, inputs, options.options())
        except EstimatorOutputError as error:
            raise ConfigError(f"algorithm.advantage.name: {error}") from None
        if self._config.algorithm.critic and credit.value_targets is None:
            raise ConfigError(
                f"algorithm.advantage.name {options.name} gives no value_targets, so algorithm.critic would never "
                "learn; give them in its Credit, or remove algorithm.critic"
            )
        return finish_advantages(credit, inputs, whiten=options.whiten, clip=options.clip, per_step=options.per_step)

    def kl_metrics(self, inputs: EstimatorInputs) -> dict[str, float]:
        """`kl`, the mean over trained tokens, where it is a part of the reward; the loss reports its own."""
        kl = self._token_kl(inputs)
        return {} if kl is None else {"kl": float(kl.mean())}

    def _token_kl(self, inputs: EstimatorInputs) -> np.ndarray | None:
        """float64 [K]: the KL estimate of each token, old against reference; None where the reward has no such part."""
        kl = self._config.algorithm.kl
        if kl.coef == 0 or kl.placement != "reward":
            return None
        assert inputs.old_logprobs is not None
        assert inputs.reference_logprobs is not None
        old, reference = torch.from_numpy(inputs.old_logprobs), torch.from_numpy(inputs.reference_logprobs)
        return KL_ESTIMATORS[kl.estimator](old, reference).numpy()

    def _with_kl_penalties(self, inputs: EstimatorInputs) -> EstimatorInputs:
        kl = self._token_kl(inputs)
        if kl is None:
            return inputs
        penalties = -self._config.algorithm.kl.coef * kl
        of_steps = np.bincount(inputs.token_step(), weights=penalties, minlength=len(inputs.step_rewards))
        return replace(inputs, token_penalties=penalties, step_rewards=inputs.step_rewards + of_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"running_returns": self._running.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "running_returns" in state:  # not in checkpoints from before there was such a state
            self._running.load_state_dict(state["running_returns"])
