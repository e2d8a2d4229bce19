"""DAPO's "clip-higher" (Yu et al. 2025, arXiv 2503.14476): PPO's clip with more room upwards.

    L = max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28))

Unlikely tokens may grow further before the clip stops them, which keeps the entropy up. DAPO's other parts are
settings elsewhere: the mean over all trained tokens of the batch is the denominator `token`, which is the default,
dynamic sampling is `filters.zero_variance`, and the penalty on long responses is `reward.overlong`.
"""

import torch

from parallel.losses.base import LossInputs
from parallel.losses.ppo_clip import ppo_clip


def dapo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate terms [T]; metric sum `clip_frac` as in ppo_clip."""
    return ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
