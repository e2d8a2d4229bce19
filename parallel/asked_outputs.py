"""The output layer reads only the tokens whose outputs are asked for.

Most tokens of a row are prompts, observations and tool results, whose logits nobody reads: over a vocabulary of 150k
they would be most of a small model's work and most of its memory.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from parallel import process_groups


class AskedOutputs:
    """Keeps the hidden states of some tokens in front of a last stage's output layer, and drops the others.

    Works for Megatron's ColumnParallelLinear and a ValueHead alike. With sequence parallelism each tensor rank has its
    part of the tokens: the whole row is gathered here, and the output layer is told that its input is whole.
    """

    def __init__(self, output_layer: Any, *, sequence_parallel: bool) -> None:
        self.tokens: torch.Tensor | None = None
        """int64 [R] on the model's device: the row's tokens that the next forward pass asks for; None: all."""
        self._gather = sequence_parallel and process_groups.tensor_size() > 1
        if self._gather and getattr(output_layer, "sequence_parallel", False):
            # What it does with an input that is whole on every tensor rank: sum the input's gradient over them.
            output_layer.sequence_parallel = False
            output_layer.allreduce_dgrad = True
        output_layer.register_forward_pre_hook(self._select)

    def _select(self, _layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """[T or T / tensor_size, 1, H] -> [R, 1, H]. Collective over the tensor group with sequence parallelism."""
        hidden_states, *rest = inputs
        if self._gather:
            # Every rank goes on with all tokens and gets the whole gradient for them, so each takes back its own
            # part of it: a sum over ranks would count it tensor_size times.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        if self.tokens is not None:
            hidden_states = hidden_states.index_select(0, self.tokens)
        return hidden_states, *rest
