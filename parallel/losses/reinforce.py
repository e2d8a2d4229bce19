"""REINFORCE (Williams 1992): the plain policy gradient, without a ratio.

    L = -A log p

Right for one update a batch; old log-probs are not read, so nothing holds a second update back.
"""

import torch

from parallel.losses.base import LossInputs


def reinforce(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Terms [T]; nothing is clipped, so no metric sums."""
    return -inputs.advantages * inputs.logprobs, {}
