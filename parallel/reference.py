"""Frozen models that score the policy's tokens: the reference of the KL term, and a teacher.

The reference has the base model's weights, never those of a resumed policy.
"""

import torch

from megatron_agent.config import ExperimentConfig
from parallel import process_groups
from parallel.forward import compute_logprobs, compute_top_tokens
from parallel.hf_folder import load_hf_weights
from parallel.model import build_model, read_hf_config
from parallel.top_tokens import TopTokens
from trajectory.packing import PackedMicrobatch


class FrozenModel:
    """Scores tokens with the weights of an HF folder, which wait in host memory and visit the device to score."""

    def __init__(self, config: ExperimentConfig, folder: str):
        """Collective: every rank builds and loads its part of the model in `folder`."""
        self._temperature = config.rollout.temperature
        self._vocab_size = read_hf_config(folder).vocab_size
        self._policy_vocab_size = read_hf_config(config.model.path).vocab_size
        self._chunks = build_model(folder, config=config, for_training=False)
        load_hf_weights(self._chunks, folder)
        self._move_to(torch.device("cpu"))

    def compute_logprobs(self, microbatches: list[PackedMicrobatch]) -> list[torch.Tensor]:
        """Log-probs of the trained tokens: one float32 [T] CPU tensor per microbatch, 0 where masked. Collective."""
        self._move_to(process_groups.device())
        logprobs = compute_logprobs(
            self._chunks, microbatches, vocab_size=self._vocab_size, temperature=self._temperature
        )
        self._move_to(torch.device("cpu"))
        return logprobs

    def compute_top_tokens(self, microbatches: list[PackedMicrobatch], *, k: int) -> list[TopTokens]:
        """The k likeliest tokens, of those that the policy has too, in the place of the N trained ones: one pair
        [N, k] per microbatch on the ranks of the last stage, [] elsewhere. Collective."""
        self._move_to(process_groups.device())
        found = compute_top_tokens(
            self._chunks,
            microbatches,
            k=k,
            vocab_size=self._vocab_size,
            ids_below=self._policy_vocab_size,
            temperature=self._temperature,
        )
        self._move_to(torch.device("cpu"))
        return found

    def _move_to(self, device: torch.device) -> None:
        for chunk in self._chunks:
            chunk.to(device)
