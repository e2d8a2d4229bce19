"""What rollout.py and step.py play: an environment that keeps the conversation going, and prompts with long answers."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Observation

SUBJECTS = ("a lighthouse", "the sea", "a train at night", "two brothers", "a lost dog", "the first snow", "a market")


class Conversation(AgentEnv):
    """Asks for more after every reply, so that agent.max_steps ends an episode. Each step takes `tool_s`."""

    def __init__(self, *, tool_s: float = 0.0) -> None:
        self._tool_s = tool_s

    def reset(self, row: Any) -> Observation:
        return Observation(messages=row.prompt)

    def step(self, action: Action) -> EnvStep:
        if self._tool_s:
            time.sleep(self._tool_s)
        return EnvStep(messages=[{"role": "user", "content": "Go on, what happens then?"}])


def rows(*, num_rows: int) -> Iterator[dict[str, Any]]:
    """Prompts of about 40 words, each with a beginning of its own."""
    for number in range(num_rows):
        subject = SUBJECTS[number % len(SUBJECTS)]
        text = (
            f"Story {number}. Write a long story about {subject}. Describe the place, the weather and the people, say "
            "what each of them wants, and do not come to an end before something has gone wrong for all of them."
        )
        yield {"prompt": [{"role": "user", "content": text}]}


def share_of_vowels(replies: Sequence[str], row: Any) -> float:
    """A reward that differs from episode to episode."""
    text = "".join(replies)
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
