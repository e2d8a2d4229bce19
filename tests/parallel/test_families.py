"""Families: what is refused, and by which name; rotary frequencies; how a weight is cut."""

import math

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from megatron_agent.errors import ModelFolderError
from parallel.families.dense import padded_vocab_size, rotary_frequencies
from parallel.families.layout import Run, Source, alternate_gate_up, assemble, interleave_qkv, split_vocabulary
from parallel.families.registry import family_for

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(), "model type 'mistral' is not supported; supported: llama, qwen2, qwen3"),
        (LlamaConfig(attention_bias=True), "attention_bias=True is not supported for model type llama"),
        (LlamaConfig(mlp_bias=True), "mlp_bias=True"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act='gelu' is not supported for model type llama; supported: 'silu'"),
        (LlamaConfig(attention_dropout=0.1), "attention_dropout=0.1"),
        (LlamaConfig(num_local_experts=8), "num_local_experts=8"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (Qwen3Config(attention_bias=True), "attention_bias=True"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=2), "use_sliding_window=True"),
        (Qwen3Config(layer_types=["full_attention", "sliding_attention"] * 16), "layer type sliding_attention"),
        (Qwen2Config(rope_parameters=YARN), "rope type 'yarn' is not supported; supported: default, llama3"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "'linear'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor=0.5",
        ),
    ],
)
def test_refused_by_name(config, message):
    with pytest.raises(ModelFolderError) as error:
        family_for(config)
    assert message in str(error.value)


def test_llama3_frequencies_by_hand():
    """head_dim 128: the fastest pair stays, the slowest is divided by the factor, one in between is blended."""
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=LLAMA3)
    frequencies = rotary_frequencies(config)
    assert frequencies[0].item() == 1.0  # wavelength 2 pi
    assert frequencies[63].item() == pytest.approx(1e4 ** (-126 / 128) / 8, rel=1e-6)  # wavelength 54,410 > 8192
    turns = 8192 / (2 * math.pi) * 1e4 ** (-96 / 128)  # pair 48 turns 1.30 times in 8192 tokens: between 1 and 4
    blend = (turns - 1) / 3
    expected = 1e4 ** (-96 / 128) * ((1 - blend) / 8 + blend)
    assert frequencies[48].item() == pytest.approx(expected, rel=1e-5)


def test_qkv_rows_interleave_by_group():
    """4 query heads and 2 key-value heads of width 1: q0 q1 k0 v0 | q2 q3 k1 v1."""
    query, key, value = Source("q", (4, 1)), Source("k", (2, 1)), Source("v", (2, 1))
    weight = interleave_qkv("qkv", query, key, value, num_groups=2)
    assert weight.runs_of_rank(1, 2) == [Run(0, 2, 2), Run(1, 1, 1), Run(2, 1, 1)]
    # More tensor ranks than key-value heads: a rank's slice ends inside a group.
    assert [weight.runs_of_rank(rank, 4) for rank in (0, 1)] == [[Run(0, 0, 2)], [Run(1, 0, 1), Run(2, 0, 1)]]
    shards = [torch.tensor([[0.0], [1.0], [10.0], [20.0]]), torch.tensor([[2.0], [3.0], [11.0], [21.0]])]
    tensors = {name: tensor.flatten().tolist() for name, tensor in assemble(weight, shards).items()}
    assert tensors == {"q": [0.0, 1.0, 2.0, 3.0], "k": [10.0, 11.0], "v": [20.0, 21.0]}


def test_gate_and_up_alternate_by_rank():
    weight = alternate_gate_up("fc1", Source("gate", (4, 1)), Source("up", (4, 1)), tensor_size=2)
    assert weight.runs_of_rank(1, 2) == [Run(0, 2, 2), Run(1, 2, 2)]
    with pytest.raises(ModelFolderError, match=r"intermediate size 4 cannot be split over parallel\.tensor 3"):
        alternate_gate_up("fc1", Source("gate", (4, 1)), Source("up", (4, 1)), tensor_size=3)


def test_vocabulary_padding_is_cut_again():
    weight = split_vocabulary("embedding", Source("embed", (5, 1)), padded_size=8)
    assert weight.runs_of_rank(3, 4) == [Run(None, 1, 2)]
    assert weight.runs_of_rank(2, 4) == [Run(0, 4, 1), Run(None, 0, 1)]
    shards = list(torch.arange(8.0)[:, None].split(2))
    assert assemble(weight, shards)["embed"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("vocab", "tensor", "padded"), [(301, 1, 384), (301, 8, 384), (384, 2, 384), (301, 3, 384)])
def test_padded_vocabulary(vocab, tensor, padded):
    assert padded_vocab_size(vocab, tensor) == padded
