"""Pairs each weight of the model with the parameter of this rank that holds a part of it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallel import process_groups
from parallel.families.layout import Weight
from parallel.families.registry import family_for
from parallel.model import unwrap

# Transformer Engine fuses a norm into the linear layer behind it, and names its weight there.
_FUSED_NORM_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

OUTPUT_LAYER = "output_layer.weight"
"""Name of the last stage's output layer: the language model's, or a critic's value head in its place."""


def layers_per_stage(hf_config: Any) -> int:
    """Decoder layers of each pipeline stage."""
    return hf_config.num_hidden_layers // process_groups.pipeline_size()


def all_weights(hf_config: Any) -> Iterator[tuple[int, Weight]]:
    """(pipeline stage, weight) of the whole model in Hugging Face's order, each Hugging Face tensor once."""
    family = family_for(hf_config)
    tensor_size, last = process_groups.tensor_size(), process_groups.pipeline_size() - 1
    for weight in family.weights_before_layers(hf_config, tensor_size=tensor_size):
        yield 0, weight
    per_stage = layers_per_stage(hf_config)
    for layer in range(hf_config.num_hidden_layers):
        for weight in family.layer_weights(hf_config, layer, tensor_size=tensor_size):
            yield layer // per_stage, weight
    for weight in family.weights_after_layers(hf_config, tensor_size=tensor_size):
        if not (hf_config.tie_word_embeddings and weight.megatron_name == OUTPUT_LAYER):
            yield last, weight


def stage_parameters(chunks: Sequence[torch.nn.Module], hf_config: Any) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by Weight.megatron_name."""
    first_layer = process_groups.pipeline_rank() * layers_per_stage(hf_config)
    (chunk,) = chunks
    parameters = {}
    for name, parameter in unwrap(chunk).named_parameters():
        parameters[_global_name(name, first_layer)] = parameter
    return parameters


def _global_name(name: str, first_layer: int) -> str:
    if not name.startswith("decoder.layers."):
        return name
    local_layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
    for plain, fused in _FUSED_NORM_NAMES.items():
        if rest == fused:
            rest = plain
    return f"decoder.layers.{int(local_layer) + first_layer}.{rest}"
