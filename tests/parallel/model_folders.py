"""Tiny Hugging Face folders of every supported family, and the row that the model tests run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from trajectory.packing import PackedMicrobatch, pack_row
from trajectory.samples import Sample

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


def row() -> PackedMicrobatch:
    """SEGMENTS of random tokens, 64 in all; every token but the first of each is trained."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, SIZES["vocab_size"], (sum(SEGMENTS),), generator=generator)
    samples = [
        sample(index, ids.numpy(), mask=np.arange(len(ids)) > 0) for index, ids in enumerate(token_ids.split(SEGMENTS))
    ]
    return pack_row(samples, share=False)


def sample(index: int, token_ids: np.ndarray, *, mask: np.ndarray, weights: np.ndarray | None = None) -> Sample:
    """A sample whose `mask` (bool [L]) is trained with these weights, default 1."""
    return Sample(
        trajectory_index=index,
        first_trained=0,
        token_ids=token_ids,
        loss_mask=mask,
        value_mask=mask,
        step_index=np.where(mask, 0, -1).astype(np.int32),
        rollout_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        loss_weights=np.where(mask, 1.0 if weights is None else weights, 0.0).astype(np.float32),
    )


def tree_samples(seed: int) -> list[Sample]:
    """Up to nine samples that begin like one another for some way, some of them equal or prefixes of others, and of
    which any tokens are trained, with weights of either sign."""
    rng = np.random.default_rng(seed)
    sequences: list[np.ndarray] = []
    for _ in range(rng.integers(1, 10)):
        start = sequences[rng.integers(len(sequences))] if sequences else np.zeros(0, dtype=np.int64)
        kept = start[: rng.integers(len(start) + 1)]
        new = rng.integers(0, SIZES["vocab_size"], rng.integers(0 if len(kept) > 1 else 2, 25))
        sequences.append(np.concatenate([kept, new]))
    masks = [(rng.random(len(ids)) < 0.7) & (np.arange(len(ids)) > 0) for ids in sequences]
    return [
        sample(index, ids, mask=mask, weights=rng.normal(size=len(ids)))
        for index, (ids, mask) in enumerate(zip(sequences, masks, strict=True))
    ]


def everything(microbatch: PackedMicrobatch) -> PackedMicrobatch:
    """The same with the outputs of all its tokens asked for."""
    return replace(microbatch, asked=torch.arange(microbatch.num_tokens))
