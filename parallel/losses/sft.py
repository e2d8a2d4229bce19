"""Supervised fine-tuning: negative log-likelihood of the demonstrated tokens."""

import torch

from parallel.losses.base import LossInputs, weighted_sum


def negative_log_likelihood(inputs: LossInputs) -> torch.Tensor:
    """Scalar: sum of -log p over trained tokens, weighted."""
    return weighted_sum(inputs, -inputs.logprobs)
