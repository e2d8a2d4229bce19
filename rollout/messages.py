"""What runners and replicas say to each other (`rollout/transport.py`), in msgpack."""

from typing import Any

import msgspec

from megatron_agent.generation import SamplingParams


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """Who does not know the replica's secret is not served."""

    secret: str


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """One completion, please."""

    number: int
    """Chosen by the asking side; one of its own for each request of a connection."""
    prompt_ids: bytes
    """int32 [P]."""
    temperature: float
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Nobody waits for this one any more."""

    number: int


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """A finished completion."""

    number: int
    token_ids: bytes
    """int32 [R]."""
    logprobs: bytes
    """float32 [R], which is what the engine computes in."""
    finish_reason: str
    policy_version: int
    num_cached_tokens: int
    cache_block_tokens: int


class Refusal(msgspec.Struct, tag="refusal", array_like=True):
    """A request that the replica could not serve."""

    number: int
    text: str


Message = Hello | Ask | Cancel | Answer | Refusal
ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(list[Message])
_PARAM_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "temperature": msgspec.msgpack.Decoder(float),
    "max_tokens": msgspec.msgpack.Decoder(int),
    "stop": msgspec.msgpack.Decoder(tuple[str, ...]),
    "stop_token_ids": msgspec.msgpack.Decoder(tuple[int, ...]),
}
"""Each sampling parameter as the replica reads it."""


def check_params(params: SamplingParams) -> None:
    """Raise TypeError for what no replica can read: it would end the connection, and all that others asked with it."""
    for name, decoder in _PARAM_DECODERS.items():
        value = getattr(params, name)
        try:
            decoder.decode(ENCODER.encode(value))
        except (TypeError, ValueError, OverflowError) as error:  # msgspec's own are ValueErrors
            raise TypeError(f"SamplingParams.{name}={value!r} cannot be sent to a replica: {error}") from error
