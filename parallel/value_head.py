"""A critic's output layer: one value per token from the last hidden states, and which token each value is about.

The shift by one of values happens here and nowhere else: the value at index t is that of the state before token t,
read from the hidden state at t - 1, where the log-prob of token t comes from too.

Shapes: T tokens, N tokens whose value is asked for, H hidden size.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from parallel import process_groups


class ValueHead(torch.nn.Module):
    """Linear map hidden state -> value without bias, in the place of GPTModel's output layer.

    The product is taken in fp32 and values are fp32 whatever the model's type: in bf16 a value would have no more than
    three digits. The weight has the model's type, and with bf16 an fp32 master like all others; Megatron cannot store
    the optimizer state of a model whose types are mixed. It starts at 0, so all values do.
    Every tensor rank holds all of it and computes the same gradient, which Megatron counts once in the gradient norm
    because the weight is not marked as split.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._gather = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=process_groups.device())
        )

    def forward(self, hidden_states: torch.Tensor, **_unused: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, H] (T / tensor_size with sequence parallelism) -> (values [T, 1, 1], no bias), as GPTModel calls it.
        Collective over the tensor group with sequence parallelism."""
        if self._gather:
            # Every rank goes on with all tokens, so each takes back its own part of the gradient: a sum over ranks
            # would count it tensor_size times.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden_states.float(), self.weight.float()), None


def value_positions(mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """int64 [N] on CPU: where `mask` (bool [T]) asks for a value. Never a segment's first token (`cu_seqlens` int32
    [S+1]): the state before it is not in the row."""
    wanted = mask.to("cpu", copy=True)
    starts = cu_seqlens[:-1].long().cpu()
    wanted[starts[starts < wanted.numel()]] = False
    return wanted.nonzero().squeeze(1)


def values_at(output: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp32 [N]: the values of the states before the tokens at `positions` (int64 [N]), from the critic's output [T, 1].
    Differentiable; the other rows get a gradient of exactly 0."""
    return output[positions.to(output.device) - 1, 0]
