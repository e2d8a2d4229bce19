"""A critic's output layer: one value per token that is asked for, from the last hidden states.

The value of the state before a token is read where the token's log-prob comes from: at the token before it
(trajectory/packing.py).

Shapes: R tokens whose outputs are asked for, H hidden size.
"""

from typing import Any

import torch
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
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=process_groups.device())
        )

    def forward(self, hidden_states: torch.Tensor, **_unused: Any) -> tuple[torch.Tensor, None]:
        """[R, 1, H] -> (values [R, 1, 1], no bias), as GPTModel calls it."""
        return torch.nn.functional.linear(hidden_states.float(), self.weight.float()), None
