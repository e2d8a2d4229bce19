"""Off-policy correction: the rollout engine sampled the tokens, the trainer's own old policy did not quite.

With w = p_old / p_rollout of a token, the policy loss of each token is multiplied by a constant:

    tis token      min(w_t, cap)                               truncated importance sampling (Ionides 2008)
    tis step       min(prod of w over the step's trained tokens, cap)
    tis sequence   min(prod of w over the sequence's trained tokens, cap)

and by 0 where a mask leaves the token out. The masks look at w before its truncation:

    token_band       tokens with w outside [low, high]. IcePop (Ling team 2025) is this with [0.5, 5], tis token and a
                     cap of at least 5
    geometric_band   sequences whose geometric mean of w is outside [low, high] (Liu, Li et al. 2025, "When speed kills
                     stability"; verl's geometric rejection)
    outlier          sequences with a token of w < low: the trainer finds a sampled token all but impossible, so the
                     rest of the sequence is not to be trusted (verl's veto)
    reject_k3        sequences whose mean k3 of KL(rollout || old) is above a threshold

A token that is left out still counts in the batch's denominator: that is a sum over masks known before anything was
computed, so the gradient stays the same under any split into microbatches and ranks. Dividing by what is left would
need another pass over the batch, and would give a batch of which little is left the weight of a whole one.

Decoupled PPO (Hilton et al. 2022, "Batch size-invariance for policy optimization") is this with tis token: the
recomputed old policy is the proximal policy, which the clip is around, and the rollout policy is the behaviour policy,
which the weight corrects for.
"""

import math

import torch

from megatron_agent.config_algorithm import CorrectionConfig
from parallel.losses.base import MAX_LOG_RATIO, LossInputs, MetricTerms, mean_over, select, sum_over, totals
from parallel.losses.kl import k1, k3


def correction_weights(inputs: LossInputs, config: CorrectionConfig) -> tuple[torch.Tensor, MetricTerms]:
    """Constant factor of each token's policy loss term [T], 0 where masked, and metrics.

    Sums: `correction_weight_mean`, `correction_weight_square` (for the effective sample size), `correction_clip_frac`
    (truncated tokens) and `correction_mask_frac` (tokens left out) over trained tokens; `rollout_kl_k1` and
    `rollout_kl_k3` of KL(rollout || old) over trained tokens, `rollout_kl_sequence_k1` and `_k3`, which see each
    sequence as one draw, over the `num_sequences` with a trained token. Maximum: `correction_weight_max`.
    """
    log_weight = inputs.old_logprobs - inputs.rollout_logprobs
    weight = _importance(inputs, log_weight, config.tis)
    truncated = weight > config.cap
    left_out = _left_out(inputs, log_weight, config)
    weight = select(inputs.mask & ~left_out, weight.clamp(max=config.cap))
    sums = {
        "correction_weight_mean": weight.sum(),
        "correction_weight_square": weight.square().sum(),
        "correction_clip_frac": (truncated & inputs.mask).sum(),
        "correction_mask_frac": (left_out & inputs.mask).sum(),
    }
    return weight, MetricTerms(sums | _divergence(inputs), {"correction_weight_max": weight.max()})


def _importance(inputs: LossInputs, log_weight: torch.Tensor, level: str) -> torch.Tensor:
    """[T]: the importance weight of the token or of what it belongs to; 1 everywhere for level `none`."""
    if level == "none":
        return torch.ones_like(log_weight)
    if level != "token":
        ids = inputs.step_ids if level == "step" else inputs.sequence_ids
        log_weight = sum_over(ids, inputs, log_weight)
    return log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _left_out(inputs: LossInputs, log_weight: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """bool [T]: the tokens that the masks leave out; what masked tokens have here means nothing."""
    low, high = (math.log(bound) for bound in config.band())
    left_out = torch.zeros_like(inputs.mask)
    if config.mask == "token_band":
        left_out = (log_weight < low) | (log_weight > high)
    elif config.mask == "geometric_band":
        mean = mean_over(inputs.sequence_ids, inputs, log_weight)
        left_out = (mean < low) | (mean > high)
    elif config.mask == "outlier":
        outliers = (log_weight < low).to(log_weight.dtype)
        left_out = sum_over(inputs.sequence_ids, inputs, outliers) > 0
    if config.reject_k3 is not None:
        divergence = k3(inputs.rollout_logprobs, inputs.old_logprobs)
        left_out = left_out | (mean_over(inputs.sequence_ids, inputs, divergence) > config.reject_k3)
    return left_out


def _divergence(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Sums of the estimators of KL(rollout || old), per token and per sequence."""
    rollout, old = inputs.rollout_logprobs, inputs.old_logprobs
    ids = inputs.sequence_ids
    rollout_of_sequences, old_of_sequences = totals(ids, inputs, rollout), totals(ids, inputs, old)
    return {
        "rollout_kl_k1": select(inputs.mask, k1(rollout, old)).sum(),
        "rollout_kl_k3": select(inputs.mask, k3(rollout, old)).sum(),
        # Rows of totals that are no sequence hold 0 in both, so they add nothing.
        "rollout_kl_sequence_k1": k1(rollout_of_sequences, old_of_sequences).sum(),
        "rollout_kl_sequence_k3": k3(rollout_of_sequences, old_of_sequences).sum(),
        "num_sequences": (totals(ids, inputs, torch.ones_like(old)) > 0).sum(),
    }
