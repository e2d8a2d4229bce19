"""CISPO (MiniMax-M1, 2025, arXiv 2506.13585): a clipped importance weight on the policy gradient.

Per token, with sg the stop-gradient and r = exp(log p - log p_old):

    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p

The clip bounds a token's weight and never stops its gradient, so rare tokens on which a line of reasoning turns keep
learning in every update of a batch. As in the paper there is no lower bound by default (1 - 1 = 0); the upper one is
not published there, and the default bounds the weight at 5.
"""

import torch

from parallel.losses.base import LossInputs, token_ratio


def cispo(
    inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Terms [T]; metric sum `clip_frac` counts the tokens whose weight was clipped."""
    ratio = token_ratio(inputs).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * inputs.advantages * inputs.logprobs, {"clip_frac": ((weight != ratio) & inputs.mask).sum()}
