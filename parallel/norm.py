"""RMSNorm for the layer spec without Transformer Engine. Megatron's own local norm refuses sequence parallelism."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32 and rounded to the input's type before the
    weight is applied, as Hugging Face models do."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Each tensor rank sees only its part of the sequence, so Megatron must sum the gradients of this weight.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and type."""
        normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return normed.to(x.dtype) * self.weight
