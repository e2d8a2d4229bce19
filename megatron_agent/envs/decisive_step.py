"""A problem of pure credit assignment: of ten moves only the third one matters, and the reward comes at the end.

Each row has a column, a or b, and each column its own right move. An observation is a square, column and number of the
step; the third move leads to column g or h, by whether it was right, and the walk goes on there. An estimator that puts
one scalar on the whole episode gives the nine other moves as much credit, which is noise; one that compares what can be
expected before and after each move finds that only the third changes it.
"""

import random
from collections.abc import Iterator
from typing import Any

from megatron_agent.envs.base import Action, AgentEnv, EnvStep, Observation
from megatron_agent.envs.frozen_lake import MOVES, named_move

COLUMNS = "ab"
WRONG, RIGHT = "gh"


class DecisiveStep(AgentEnv):
    """Reward 1 after `num_steps` moves if move number `decisive` was the column's, else 0.

    A reply without a direction counts as a wrong move.
    """

    def __init__(self, *, column: str = "a", num_steps: int = 10, decisive: int = 3) -> None:
        if column not in COLUMNS or not 1 <= decisive <= num_steps:
            raise ValueError(f"column is one of {COLUMNS}, and decisive one of the {num_steps} steps")
        self._column = column
        self._num_steps = num_steps
        self._decisive = decisive
        self._number = 1
        self._is_right = False

    def reset(self, row: Any) -> Observation:
        self._number, self._is_right = 1, False
        return Observation(messages=[*row.prompt, self._message()])

    def step(self, action: Action) -> EnvStep:
        move = named_move(action.text)
        if self._number == self._decisive:
            self._is_right = move == MOVES[COLUMNS.index(self._column)]
            self._column = RIGHT if self._is_right else WRONG
        ends = self._number == self._num_steps
        self._number += 1
        return EnvStep(
            messages=[] if ends else [self._message()],
            reward=float(ends and self._is_right),
            terminated=ends,
            success=self._is_right if ends else None,
            info={"bad_actions": 1} if move is None else {},
        )

    def _message(self) -> dict[str, str]:
        return {"role": "user", "content": f"at {self._column}{self._number}"}


def rows() -> Iterator[dict[str, Any]]:
    """One row for each column."""
    for column in COLUMNS:
        yield {"prompt": [], "env_kwargs": {"column": column}, "data_source": "decisive_step"}


def format_demonstrations(*, num_rows: int = 320, num_steps: int = 10, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Episodes of random moves: they teach the form of a reply and nothing about which move is right."""
    rng = random.Random(seed)
    for _ in range(num_rows):
        column = rng.choice(COLUMNS + WRONG + RIGHT)
        messages = []
        for number in range(1, num_steps + 1):
            messages.append({"role": "user", "content": f"at {column}{number}"})
            messages.append({"role": "assistant", "content": rng.choice(MOVES)})
        yield {"messages": messages}
