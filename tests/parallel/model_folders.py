"""Tiny Hugging Face folders of every supported family, and the row that the model tests run."""

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 301,  # prime: padded under every tensor-parallel size
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for attention to be far from uniform
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so small that frequencies are kept, blended and divided
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama3_tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False, "hidden_size": 64}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "hidden_size": 64}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
}
SEGMENTS = (11, 1, 30, 7, 11, 4)


def build(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, **save_options: Any) -> None:
    """Save model `name` with random weights; norms and biases too, so that a swapped one shows."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, **save_options)


def row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """token_ids [64], position_ids [64], cu_seqlens of SEGMENTS."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, SIZES["vocab_size"], (sum(SEGMENTS),), generator=generator)
    position_ids = torch.cat([torch.arange(length) for length in SEGMENTS])
    return token_ids, position_ids, torch.tensor([0, *SEGMENTS]).cumsum(0).to(torch.int32)
