"""Packed rows: the record that the trainer's forward and backward pass consumes, and the plan that fills it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatch:
    """One row of T tokens. Each per-token value sits at the index of the token it is about.

    The shift by one (the logits at t-1 predict token t) happens only in parallel/logprobs.py. All
    tensors are on CPU. Padding is the row's last segment; it is never trained.
    """

    token_ids: torch.Tensor
    """int64 [T]; 0 in the padding."""
    position_ids: torch.Tensor
    """int64 [T]; restarts at 0 in every segment."""
    cu_seqlens: torch.Tensor
    """int32 [S+1]; segment boundaries, first 0, last T. The padding, if any, is the last segment."""
    loss_mask: torch.Tensor
    """bool [T]; True where the token is trained. Never True on a segment's first token."""
    step_index: torch.Tensor
    """int32 [T]; which step of its trajectory sampled the token; -1 where loss_mask is False."""
    trajectory_index: torch.Tensor
    """int32 [T]; row of the token's trajectory in the batch; -1 in the padding."""
    advantages: torch.Tensor
    """float32 [T]; 0 where loss_mask is False."""
    loss_weights: torch.Tensor
    """float32 [T]; factor of the token's loss term before the division by the batch's denominator; 0 where masked."""
    rollout_logprobs: torch.Tensor
    """float32 [T]; the engine's; 0 where loss_mask is False."""
    old_logprobs: torch.Tensor | None = None
    """float32 [T]; the trainer's before the update; 0 where masked; None until computed."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [T]; the reference model's; 0 where masked; None until computed."""
    num_padding: int = 0
    """Padding tokens at the row's end."""

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.token_ids.numel()
