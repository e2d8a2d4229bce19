"""The options of `algorithm`: rewards, credit, losses, off-policy correction, critic, teacher.

An option of an estimator or a loss that is absent has that estimator's or loss's own default; one that it does not
take is an error of `check`.
"""

import math
from typing import Any, Literal

from megatron_agent.config_types import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Denominator = Literal["token", "step", "trajectory", "prompt_group", "constant"]
OWN_DENOMINATOR: dict[str, Denominator] = {
    "gspo": "trajectory", "step_gspo": "step", "dr_grpo": "constant", "sapo": "trajectory"
}  # fmt: skip
"""Loss -> what divides its sum where nothing is set; `token` for the others."""
ADVANTAGE_OPTIONS = (
    "std", "eps", "gamma", "lam", "gamma_step", "lam_step", "baseline", "step_weight", "step_norm", "similarity",
    "task_weight",
)  # fmt: skip
"""Fields of AdvantageConfig that are keyword arguments of the estimators that take them."""
LOSS_OPTIONS = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Fields of LossConfig that are keyword arguments of the losses that take them."""

MASK_BANDS = {"token_band": (0.5, 5.0), "geometric_band": (0.999, 1.001), "outlier": (1e-4, math.inf)}
"""Mask of CorrectionConfig -> the published bounds: IcePop's, and those of verl's rejection and veto."""


class AdvantageConfig(Section):
    name: str = "grpo"
    """Estimator: a name of docs/algorithms.md or `package.module:function`."""
    std: bool | None = None
    """Group-relative estimators: divide by the group's standard deviation; false gives Dr. GRPO."""
    eps: PositiveFloat | None = None
    """Added to standard deviations."""
    gamma: Fraction | None = None
    """Discount: per step for step-level estimators, per trained token for token-level ones."""
    lam: Fraction | None = None
    """Lambda of GAE, over the same unit as gamma."""
    gamma_step: Fraction | None = None
    """gae_turn: discount from one step to the next."""
    lam_step: Fraction | None = None
    """gae_turn: lambda from one step to the next."""
    baseline: Literal["none", "batch"] | None = None
    """reinforce: what is subtracted from the returns."""
    step_weight: NonNegativeFloat | None = None
    """gigpo: weight of the step-level advantage beside the episode-level one."""
    step_norm: Literal["mean_std", "mean"] | None = None
    """gigpo: what step-level groups are normalised by."""
    similarity: Fraction | None = None
    """gigpo: least similarity, by words, of two observations that share a step-level group; 1 asks for equal ones."""
    task_weight: NonNegativeFloat | None = None
    """opd: weight of the task's group-relative advantage beside the teacher's signal."""
    args: dict[str, Any] = {}
    """Keyword arguments of an estimator of your own."""
    whiten: bool = False
    """Shift and scale the advantages of all trained tokens of the batch to mean 0 and standard deviation 1."""
    clip: PositiveFloat | None = None
    """Largest absolute advantage; absent means no limit."""
    per_step: bool = False
    """Divide each trajectory's advantages by its number of steps, so that long episodes do not weigh more."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the estimator: those that are set."""
        given = {name: getattr(self, name) for name in ADVANTAGE_OPTIONS if getattr(self, name) is not None}
        return given | self.args


class OverlongConfig(Section):
    buffer_tokens: PositiveInt
    """A response longer than agent.max_response_tokens minus this many tokens begins to cost reward."""
    penalty: PositiveFloat = 1.0
    """Reward lost at the full length; grows linearly through the buffer (DAPO's soft overlong punishment)."""


class RewardShapingConfig(Section):
    normalise: Literal["none", "group", "batch", "running_std"] = "none"
    """Scale of the rewards before credit: returns of each group or of the batch get mean 0 and standard deviation 1;
    `running_std` divides by the standard deviation of all returns of the run so far and shifts nothing."""
    overlong: OverlongConfig | None = None
    """Soft penalty on long responses; absent means none."""


class FilterConfig(Section):
    zero_variance: bool = False
    """Drop groups of equal returns and play more rows until the batch is full (DAPO's dynamic sampling)."""
    max_resample_rounds: NonNegativeInt = 4
    """zero_variance: how many further rounds are played before the batch is trained as it is."""
    overlong: bool = False
    """Drop trajectories that a token limit cut off."""
    max_staleness: NonNegativeInt | None = None
    """Drop trajectories with a step sampled by weights that are more training steps old than this."""


class LossConfig(Section):
    name: str = "ppo_clip"
    """Policy loss: a name of docs/algorithms.md or `package.module:function`."""
    clip_low: PositiveFloat | None = None
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: PositiveFloat | None = None
    """Upper clip: ratio <= 1 + clip_high."""
    dual_clip: PositiveFloat | None = None
    """Bound on the loss for negative advantages (usually 3); absent means none."""
    tau_positive: PositiveFloat | None = None
    """sapo: temperature of the gate for positive advantages."""
    tau_negative: PositiveFloat | None = None
    """sapo: temperature of the gate for negative advantages."""
    denominator: Denominator | None = None
    """What the sum of loss terms is divided by. `token`: trained tokens. `step`, `trajectory`, `prompt_group`: a mean
    over these of their own token means. `constant`: trajectories times constant_tokens. Absent: the loss's own."""
    constant_tokens: PositiveFloat | None = None
    """denominator constant: tokens that a trajectory counts as; absent: agent.max_steps x agent.max_response_tokens."""
    args: dict[str, Any] = {}
    """Keyword arguments of a loss of your own."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the loss: those that are set."""
        given = {name: getattr(self, name) for name in LOSS_OPTIONS if getattr(self, name) is not None}
        return given | self.args

    def resolved_denominator(self) -> Denominator:
        """What divides, where it is not set the loss's own."""
        return self.denominator or OWN_DENOMINATOR.get(self.name, "token")


class KlConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model; 0 loads no reference model."""
    estimator: Literal["k1", "k2", "k3", "k3_clamped"] = "k3"
    """Estimators of Schulman 2020 (k3 is unbiased and non-negative); `k3_clamped` is k3 within [-10, 10]."""
    gradient: Literal["estimator", "k2"] = "estimator"
    """In the loss: the gradient of the estimator itself, or k2's beside the estimator's value, which is that of the
    KL on samples of the policy."""
    placement: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a penalty on each trained token's reward (PPO's of InstructGPT)."""


class CorrectionConfig(Section):
    tis: Literal["none", "token", "step", "sequence"] = "none"
    """Importance weight old / rollout of each token, of its step, or of its sequence, on the policy loss."""
    cap: PositiveFloat = 2.0
    """Truncation of the weights."""
    mask: Literal["none", "token_band", "geometric_band", "outlier"] = "none"
    """Leave tokens out of the loss: `token_band` (IcePop) those with old / rollout outside [low, high];
    `geometric_band` sequences whose geometric mean is outside; `outlier` sequences with a token below `low`."""
    low: PositiveFloat | None = None
    """Lower bound of the mask's band; absent: the mask's own (token_band 0.5, geometric_band 0.999, outlier 1e-4)."""
    high: PositiveFloat | None = None
    """Upper bound of the mask's band; absent: the mask's own (token_band 5, geometric_band 1.001)."""
    reject_k3: PositiveFloat | None = None
    """Leave out sequences whose mean k3 between old and rollout log-probs is above this; absent means none."""

    def is_on(self) -> bool:
        """True where some weight may differ from 1."""
        return self.tis != "none" or self.mask != "none" or self.reject_k3 is not None

    def band(self) -> tuple[float, float]:
        """(low, high) of the mask: those that are set, and the published ones where they are not."""
        low, high = MASK_BANDS.get(self.mask, (1.0, 1.0))
        return self.low or low, self.high or high


class CriticConfig(Section):
    path: str | None = None
    """HF folder that the critic starts from; absent: model.path. Its value head starts at 0."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic; optimizer's other options are shared."""
    warmup_steps: NonNegativeInt = 0
    """First training steps that update the critic only."""
    value_clip: PositiveFloat | None = None
    """Keep new values within this of the old ones, as PPO2 does; absent means no clip."""
    epochs: PositiveInt = 1
    """Passes of the critic over a rollout batch."""
    privileged: str | None = None
    """What only the critic sees, as text in front of its sequences: a key of each row's `extra_info`, or `ground_truth`
    for that of its reward_model; the policy never sees it (Pinto et al. 2017). Absent: nothing."""


class TeacherConfig(Section):
    path: str
    """HF folder of the teacher; it needs the policy's tokenizer."""
    top_k: NonNegativeInt = 0
    """0: the teacher's log-prob of each sampled token is the advantage (estimator opd). Above 0: a loss term beside any
    other estimator, the divergence from the teacher's distribution by its k likeliest tokens and one rest."""
    divergence: Literal["reverse", "forward", "js"] = "reverse"
    """top_k: KL(policy || teacher), KL(teacher || policy), or Jensen-Shannon."""
    coef: PositiveFloat = 1.0
    """top_k: weight of the divergence in the loss."""
    replicas: NonNegativeInt = 0
    """0: the trainer's ranks hold the teacher, in host memory between uses. Above 0: so many vLLM engines of its own
    score the sampled tokens (top_k 0)."""
    tensor_parallel: PositiveInt = 1
    """Devices per replica of the teacher."""


class AlgorithmConfig(Section):
    reward: RewardShapingConfig = RewardShapingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    filters: FilterConfig = FilterConfig()
    loss: LossConfig = LossConfig()
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()
    critic: CriticConfig | None = None
    """The value model, for the estimators that read values."""
    teacher: TeacherConfig | None = None
    """The model to distil from: by the estimator opd, or by a loss term (top_k)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio: the trainer's own pass before the update, or the engine's log-probs."""
    minibatches: PositiveInt = 1
    """Optimizer updates per rollout batch and epoch; whole trajectories are split among them."""
    epochs: PositiveInt = 1
    """Passes over a rollout batch."""
    target_kl: PositiveFloat | None = None
    """Skip the rest of a rollout batch's updates once the policy is this far (k3) from the old one."""
