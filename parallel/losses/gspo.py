"""GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio for a whole sequence, or for each step of it.

In the paper's token form GSPO-token, with sg the stop-gradient and the mean over the trained tokens of the sequence:

    s   = exp(mean_t (log p_t - log p_old_t))
    s_t = sg[s] p_t / sg[p_t]                                 the value of s, the gradient of token t alone
    L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))

Where all tokens of a sequence have one advantage, the mean of L_t over them has the value and the gradient of GSPO's
own loss max(-A s, -A clip(s)); the token form also takes advantages that differ. The defaults of the bounds are the
paper's: a geometric mean over many tokens strays far less than one token's ratio does.

`step_gspo` means over the trained tokens of each step instead, for episodes whose steps have advantages of their own.
The ratio of a sequence is that of a packed one: a trajectory whose history was rewritten has several.
"""

import torch

from parallel.losses.base import MAX_LOG_RATIO, LossInputs, mean_over


def gspo(
    inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Terms [T] with a ratio per sequence; metric sum `clip_frac` counts the tokens whose gradient the clip stopped."""
    return _mean_ratio_terms(inputs, inputs.sequence_ids, clip_low, clip_high)


def step_gspo(
    inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Terms [T] with a ratio per step; metric sum `clip_frac` counts the tokens whose gradient the clip stopped."""
    return _mean_ratio_terms(inputs, inputs.step_ids, clip_low, clip_high)


def _mean_ratio_terms(
    inputs: LossInputs, ids: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    current = inputs.logprobs.detach()
    mean_log_ratio = mean_over(ids, inputs, current - inputs.old_logprobs)
    ratio = mean_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (inputs.logprobs - current).exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), {"clip_frac": ((clipped > unclipped) & inputs.mask).sum()}
