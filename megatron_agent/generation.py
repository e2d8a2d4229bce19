"""The seam between agent code and whatever generates tokens: ids in, ids and log-probs out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled. Log-probs are of softmax(logits / temperature)."""

    temperature: float = 1.0
    """0 means greedy (evaluation only: such log-probs cannot be trained on)."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-turn token, which always stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled for one prompt."""

    token_ids: list[int]
    """Sampled ids, the stop token included when the model sampled it."""
    logprobs: list[float]
    """The engine's log-prob of each sampled id; same length as token_ids."""
    finish_reason: str
    """``stop`` (end-of-turn token or stop string) or ``length``."""
    policy_version: int
    """The version of the weights that sampled it."""
    num_cached_tokens: int = 0
    """How many prompt tokens came from the prefix cache."""
    cache_block_tokens: int = 0
    """The prefix cache's unit: prompts share whole blocks of this many tokens; 0 where there is no such cache."""
    info: dict[str, float] = field(default_factory=dict)


class GenerateFn(Protocol):
    """Generates one completion. `session_id` pins an episode to one replica, so its prefix stays cached."""

    async def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Completion: ...
