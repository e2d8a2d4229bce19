"""Trajectories to JSONL, one episode a line with all its steps, and back into records."""

import json
from collections.abc import Generator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from trajectory.steps import ContextChange, Step, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus

FILE_NAME = "trajectories.jsonl"
GREEDY_PHASE = "greedy"
"""Of the episodes that were played without sampling, as baselines of training groups."""


class TrajectoryRecorder:
    """Appends episodes to a file; each line also says the training step and the phase it was played in."""

    def __init__(self, run_dir: Path, file_name: str = FILE_NAME) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / file_name

    def write(self, groups: Sequence[TrajectoryGroup], *, step: int, phase: str) -> None:
        """Append all episodes of `groups`; the greedy ones have a phase of their own."""
        with self.path.open("a", encoding="utf-8") as file:
            for group in groups:
                played = [(phase, trajectory) for trajectory in group.trajectories]
                played += [(GREEDY_PHASE, group.greedy)] if group.greedy else []
                for own_phase, trajectory in played:
                    record = {"step": step, "phase": own_phase, **asdict(trajectory)}
                    file.write(json.dumps(record, default=_plain, ensure_ascii=False) + "\n")


def read_trajectories(path: Path) -> Generator[tuple[int, str, Trajectory]]:
    """(step, phase, trajectory) of each line, as it was recorded; a last line that is half written is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            record = json.loads(line)
            step, phase = record.pop("step"), record.pop("phase")
            record["steps"] = tuple(_step(fields) for fields in record["steps"])
            record["status"] = TrajectoryStatus(record["status"])
            if record.get("privileged_ids") is not None:
                record["privileged_ids"] = np.array(record["privileged_ids"], dtype=np.int32)
            yield step, phase, Trajectory(**record)


def _step(fields: dict[str, Any]) -> Step:
    next_prompt = fields.get("next_prompt_ids")
    return Step(
        **fields
        | {
            "prompt_ids": np.array(fields["prompt_ids"], dtype=np.int32),
            "response_ids": np.array(fields["response_ids"], dtype=np.int32),
            "rollout_logprobs": np.array(fields["rollout_logprobs"], dtype=np.float32),
            "response_mask": np.array(fields["response_mask"], dtype=bool),
            "next_prompt_ids": None if next_prompt is None else np.array(next_prompt, dtype=np.int32),
            "stop_reason": StopReason(fields["stop_reason"]),
            "context_change": ContextChange(fields["context_change"]),
        }
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Enum):
        return value.value
    return str(value)  # whatever an environment put into its messages or counters must not end the run
