"""What Llama, Qwen2 and Qwen3 share: a dense decoder with grouped-query attention, rotary positions, SwiGLU, RMSNorm.

A family states its differences (`qkv_bias`, `qk_norm`) and refuses what this trainer would compute differently.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_agent.errors import ModelFolderError
from parallel.families.layout import (
    Source,
    Weight,
    alternate_gate_up,
    interleave_qkv,
    split_columns,
    split_vocabulary,
    whole,
)

# Config keys that change what a model computes, with the values under which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "attention_dropout": (None, 0),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "no_rope_layers": (None, []),
}
_VOCAB_MULTIPLE = 128  # keeps the output layer's matrix sizes friendly to GPU kernels
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFamily:
    """One model family; `hf_config` below is its transformers config object."""

    model_type: str
    """As in config.json."""
    architecture: str
    """The class in config.json's `architectures`."""
    qkv_bias: bool = False
    qk_norm: bool = False

    def check(self, hf_config: Any) -> None:
        """Raise ModelFolderError for the first option that would be computed differently here."""
        architectures = getattr(hf_config, "architectures", None) or [self.architecture]
        if list(architectures) != [self.architecture]:
            raise ModelFolderError(
                f"config.json: architecture {architectures[0]} of model type {self.model_type} is not supported; "
                f"only {self.architecture} is"
            )
        for key, neutral in _NEUTRAL_VALUES.items():
            value = getattr(hf_config, key, neutral[0])
            if value not in neutral:
                raise ModelFolderError(
                    f"config.json: {key}={value!r} is not supported for model type {self.model_type}; "
                    f"supported: {neutral[-1]!r}"
                )
        layer_types = set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}
        if layer_types:
            raise ModelFolderError(
                f"config.json: layer type {sorted(layer_types)[0]} (layer_types, sliding_window) is not supported; "
                "only full_attention is"
            )
        rotary_frequencies(hf_config)

    def attention_pair_cost(self, hf_config: Any) -> float:
        """What one query-key pair costs a layer, over what one token costs it beside attention; in multiply-adds, of
        which every weight is one per token."""
        hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
        width = head_dim(hf_config)
        projections = 2 * (heads + hf_config.num_key_value_heads) * width
        return 2 * heads * width / (hidden * (projections + 3 * hf_config.intermediate_size))

    def transformer_options(self, hf_config: Any) -> dict[str, Any]:
        """Keyword arguments of Megatron's TransformerConfig that follow from the model."""
        return {
            "num_layers": hf_config.num_hidden_layers,
            "hidden_size": hf_config.hidden_size,
            "ffn_hidden_size": hf_config.intermediate_size,
            "num_attention_heads": hf_config.num_attention_heads,
            "num_query_groups": hf_config.num_key_value_heads,
            "kv_channels": head_dim(hf_config),
            "layernorm_epsilon": hf_config.rms_norm_eps,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }

    def weights_before_layers(self, hf_config: Any, *, tensor_size: int) -> list[Weight]:
        """Weights of the first pipeline stage that belong to no layer."""
        shape = (hf_config.vocab_size, hf_config.hidden_size)
        source = Source("model.embed_tokens.weight", shape)
        padded = padded_vocab_size(hf_config.vocab_size, tensor_size)
        return [split_vocabulary("embedding.word_embeddings.weight", source, padded)]

    def weights_after_layers(self, hf_config: Any, *, tensor_size: int) -> list[Weight]:
        """Weights of the last stage that belong to no layer. A tied output layer reads the embedding's tensor."""
        name = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
        output = Source(name, (hf_config.vocab_size, hf_config.hidden_size))
        padded = padded_vocab_size(hf_config.vocab_size, tensor_size)
        return [
            whole("decoder.final_layernorm.weight", Source("model.norm.weight", (hf_config.hidden_size,))),
            split_vocabulary("output_layer.weight", output, padded),
        ]

    def layer_weights(self, hf_config: Any, layer: int, *, tensor_size: int) -> list[Weight]:
        """Weights of one decoder layer (`layer` counts from 0 over all stages), in Hugging Face's order."""
        return list(self._layer_weights(hf_config, layer, tensor_size))

    def _layer_weights(self, hf_config: Any, layer: int, tensor_size: int) -> Iterator[Weight]:
        hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        hidden, ffn, dim = hf_config.hidden_size, hf_config.intermediate_size, head_dim(hf_config)
        groups = hf_config.num_key_value_heads
        query_rows, kv_rows = hf_config.num_attention_heads * dim, groups * dim

        def qkv(kind: str, *shape: int) -> Weight:
            query, key, value = (
                Source(f"{hf}self_attn.{name}_proj.{kind}", (rows, *shape))
                for name, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows))
            )
            return interleave_qkv(f"{megatron}self_attention.linear_qkv.{kind}", query, key, value, num_groups=groups)

        yield whole(f"{megatron}input_layernorm.weight", Source(f"{hf}input_layernorm.weight", (hidden,)))
        yield qkv("weight", hidden)
        if self.qkv_bias:
            yield qkv("bias")
        if self.qk_norm:
            for name in ("q", "k"):
                source = Source(f"{hf}self_attn.{name}_norm.weight", (dim,))
                yield whole(f"{megatron}self_attention.{name}_layernorm.weight", source)
        output = Source(f"{hf}self_attn.o_proj.weight", (hidden, query_rows))
        yield split_columns(f"{megatron}self_attention.linear_proj.weight", output)
        norm = Source(f"{hf}post_attention_layernorm.weight", (hidden,))
        yield whole(f"{megatron}pre_mlp_layernorm.weight", norm)
        gate, up = (Source(f"{hf}mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
        yield alternate_gate_up(f"{megatron}mlp.linear_fc1.weight", gate, up, tensor_size=tensor_size)
        down = Source(f"{hf}mlp.down_proj.weight", (hidden, ffn))
        yield split_columns(f"{megatron}mlp.linear_fc2.weight", down)


def head_dim(hf_config: Any) -> int:
    """Width of one attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding with every tensor rank holding equally many.

    The same for every tensor-parallel size that divides 128, so checkpoints keep their shapes across such sizes.
    """
    multiple = math.lcm(_VOCAB_MULTIPLE, tensor_size)
    return math.ceil(vocab_size / multiple) * multiple


def rotary_frequencies(hf_config: Any) -> torch.Tensor:
    """Angle per position of each rotated pair, fp32 [head_dim / 2] on CPU.

    Rope types `default` and `llama3` (frequencies below a wavelength kept, above another divided by `factor`,
    in between blended). Raises ModelFolderError for any other.
    """
    rope = dict(hf_config.rope_parameters)
    rope_type = rope.get("rope_type", "default")
    known = _ROPE_KEYS | set(_LLAMA3_KEYS if rope_type == "llama3" else ())
    if rope_type not in ("default", "llama3"):
        raise ModelFolderError(f"config.json: rope type {rope_type!r} is not supported; supported: default, llama3")
    unknown = sorted(set(rope) - known)
    if unknown:
        raise ModelFolderError(f"config.json: rope parameter {unknown[0]!r} is not supported for rope type {rope_type}")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ModelFolderError(
            f"config.json: partial_rotary_factor={rope['partial_rotary_factor']} is not supported; only 1 is"
        )
    dim = head_dim(hf_config)
    inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return inv_freq if rope_type == "default" else _llama3_frequencies(inv_freq, rope)


def _llama3_frequencies(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    missing = [key for key in _LLAMA3_KEYS if key not in rope]
    if missing:
        raise ModelFolderError(f"config.json: rope type llama3 needs the parameter {missing[0]!r}")
    factor, low, high, old_context = (rope[key] for key in _LLAMA3_KEYS)
    wavelength = 2 * math.pi / inv_freq
    # 0 at the longest kept-as-scaled wavelength, 1 at the shortest that stays; linear in the number of turns.
    blend = ((old_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq
