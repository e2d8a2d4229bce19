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
        return _RMSNormFunction.apply(x, self.weight, self.eps)  # type: ignore[return-value]


class _RMSNormFunction(torch.autograd.Function):
    """normed = x / rms(x), y = normed * weight. No fp32 copy of x exists: on CPU, where each pass over memory counts,
    it takes half the time of torch's composite op.

    d x = (g - normed * mean(g * normed)) / rms(x) with g = dy * weight; d weight = sum over rows of dy * normed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = x.shape[-1]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse_rms = norm.square_().div_(size).add_(eps).rsqrt_()
        normed = torch.empty_like(x)
        torch.mul(x, inverse_rms, out=normed)
        ctx.save_for_backward(normed, weight, inverse_rms)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (grad,) = grads
        normed, weight, inverse_rms = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0, dtype=torch.float32).to(weight.dtype)
        grad_normed = grad * weight
        mean = (grad_normed * normed).sum(-1, keepdim=True, dtype=torch.float32).div_(normed.shape[-1])
        grad_x = torch.empty_like(normed)
        torch.mul(torch.addcmul(grad_normed, normed, mean.to(normed.dtype), value=-1), inverse_rms, out=grad_x)
        return grad_x, grad_weight, None
