"""Dr. GRPO's loss (Liu et al. 2025, arXiv 2503.20783): PPO's clip, summed over a response and divided by a constant.

    L = 1 / (N C) sum over trajectories, tokens of max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

for N trajectories. A mean over each response's own length would make every token of a long wrong response weigh less
than one of a short wrong response; a constant C (denominator `constant`, the default of this loss) does not. The other
half of the method is an advantage without the division by the standard deviation: `advantage.std: false`.
"""

import torch

from parallel.losses.base import LossInputs
from parallel.losses.ppo_clip import ppo_clip


def dr_grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate terms [T]; metric sum `clip_frac` as in ppo_clip."""
    return ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
