"""PPO's clipped surrogate (Schulman et al. 2017), with asymmetric bounds and the optional dual clip (Ye et al. 2020).

Per token, with r = exp(log p - log p_old) and advantage A:

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    L = min(L, -A dual_clip)                                  where A < 0 and dual_clip is set

The dual clip bounds the loss of a token with negative advantage whose ratio has run away upwards.
"""

import torch

from parallel.losses.base import LossInputs, token_ratio


def ppo_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate terms [T]; metric sum `clip_frac` counts the tokens whose gradient a clip stopped."""
    ratio = token_ratio(inputs)
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.maximum(unclipped, clipped)
    stopped = clipped > unclipped
    if dual_clip is not None:
        bound = -inputs.advantages * dual_clip
        negative = inputs.advantages < 0
        stopped = stopped | (negative & (terms > bound))
        terms = torch.where(negative, torch.minimum(terms, bound), terms)
    return terms, {"clip_frac": (stopped & inputs.mask).sum()}
