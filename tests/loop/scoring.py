"""A reward that even an untrained model gets different amounts of, so that every run has something to learn."""

from collections.abc import Sequence

from megatron_agent.data import Row


def by_length(replies: Sequence[str], row: Row) -> float:
    """Between 0 and 6, from the length of all that was said."""
    return float(sum(len(reply) for reply in replies) % 7)
