"""FrozenLake of gymnasium as text: the agent reads which square it is on and answers with a direction."""

import random
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Observation

MOVES = ("left", "down", "right", "up")
"""gymnasium's action numbers, in order."""
DEFAULT_MAP = ("SFFF", "FHFH", "FFFH", "HFFG")


class FrozenLake(AgentEnv):
    """Reward 1 on the goal, 0 elsewhere; a hole ends the episode. A reply without a direction is no move.

    `start` is a square such as `b3` (column letter, row number from the top); `show_map` adds the map to the first
    observation.
    """

    def __init__(
        self,
        *,
        desc: tuple[str, ...] | list[str] = DEFAULT_MAP,
        start: str | None = None,
        is_slippery: bool = False,
        show_map: bool = False,
        seed: int = 0,
    ) -> None:
        self._desc = list(desc)
        self._start = start
        self._show_map = show_map
        self._is_slippery = is_slippery
        self._seed = seed
        self._env: Any = None

    def reset(self, row: Any) -> Observation:
        import gymnasium

        self._env = gymnasium.make("FrozenLake-v1", desc=self._desc, is_slippery=self._is_slippery).unwrapped
        state, _ = self._env.reset(seed=self._seed)
        if self._start is not None:
            state = _state_of(self._start, self._desc)
            self._env.s = state
        text = self._describe(int(state))
        if self._show_map:
            text = "\n".join(self._desc) + "\n" + text
        return Observation(messages=[*row.prompt, {"role": "user", "content": text}])

    def step(self, action: Action) -> EnvStep:
        move = named_move(action.text)
        if move is None:
            return EnvStep(messages=self._message(int(self._env.s)), info={"bad_actions": 1})
        state, reward, terminated, truncated, _ = self._env.step(MOVES.index(move))
        return EnvStep(
            messages=self._message(int(state)),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=bool(reward > 0) if terminated else False,
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _message(self, state: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._describe(state)}]

    def _describe(self, state: int) -> str:
        return f"at {_square_of(state, self._desc)}"


def named_move(text: str) -> str | None:
    """The first direction that a reply names; None where it names none."""
    return next((word for word in re.findall(r"[a-z]+", text.lower()) if word in MOVES), None)


def rows(*, desc: tuple[str, ...] | list[str] = DEFAULT_MAP) -> Iterator[dict[str, Any]]:
    """One row for each square that an episode can start on."""
    for state, cell in enumerate("".join(desc)):
        if cell in "SF":
            yield {
                "prompt": [],
                "env_kwargs": {"desc": list(desc), "start": _square_of(state, desc)},
                "data_source": "frozen_lake",
            }


def format_demonstrations(
    *, num_rows: int = 640, seed: int = 0, desc: tuple[str, ...] | list[str] = DEFAULT_MAP
) -> Iterator[dict[str, Any]]:
    """Episodes of valid but random moves: they teach the form of a reply and nothing about where to go."""
    rng = random.Random(seed)
    starts = list(rows(desc=desc))
    for _ in range(num_rows):
        env = FrozenLake(**rng.choice(starts)["env_kwargs"])
        messages = list(env.reset(_NoPrompt).messages)
        for _ in range(8):
            move = rng.choice(MOVES)
            outcome = env.step(Action(text=move))
            messages.append({"role": "assistant", "content": move})
            if outcome.terminated:
                break
            messages += outcome.messages
        yield {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


class _NoPrompt:
    prompt: ClassVar[list[dict[str, str]]] = []


def _state_of(square: str, desc: list[str]) -> int:
    return (int(square[1:]) - 1) * len(desc[0]) + ord(square[0]) - ord("a")


def _square_of(state: int, desc: tuple[str, ...] | list[str]) -> str:
    row, column = divmod(state, len(desc[0]))
    return f"{chr(ord('a') + column)}{row + 1}"
