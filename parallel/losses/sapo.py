"""SAPO (Gao et al. 2025, arXiv 2511.20347): a soft gate in the place of the clip.

Per token, with r = exp(log p - log p_old):

    L = -A f(r),   f(r) = 4 / tau sigmoid(tau (r - 1)),   tau = tau_positive where A > 0 and tau_negative elsewhere

f'(r) = 4 sigmoid(tau (r - 1)) (1 - sigmoid(tau (r - 1))) is 1 at r = 1 and falls off smoothly on both sides, the
faster the larger tau. A larger tau_negative damps the gradients that push tokens down, which raise many others and
are the less stable ones. The paper takes the mean over each response (denominator `trajectory`).
"""

import torch

from parallel.losses.base import LossInputs, token_ratio


def sapo(
    inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Terms [T]; nothing is clipped, so no metric sums."""
    tau = torch.full_like(inputs.advantages, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    gate = 4.0 / tau * torch.sigmoid(tau * (token_ratio(inputs) - 1.0))
    return -inputs.advantages * gate, {}
