"""Which recorded episodes a report shows: the same dataset rows from before and after training, where there are any."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from rollout.recorder import read_trajectories
from trajectory.steps import Trajectory

LINE_START = re.compile(rb'\{"step": (\d+), "phase": "(\w+)"')
ROW_INDEX = b'"row_index": '


@dataclass(kw_only=True)
class PlayedRows:
    """What one phase of one training step played: where in the file the first episode of each dataset row is."""

    step: int
    phase: str
    """`eval_before`, `train`, `eval` or `eval_after`."""
    offsets: dict[int, int] = field(default_factory=dict)
    """Dataset row -> byte offset of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Episodes from early and late in a run."""

    before: PlayedRows
    after: PlayedRows | None
    """None where only one training step or evaluation was played."""
    pairs: list[tuple[Trajectory | None, Trajectory | None]]
    """(before, after); of the same dataset row where both sides played enough of the same ones."""


def read_comparison(path: Path, num_episodes: int) -> Comparison | None:
    """Held-out rows before training and in the latest evaluation; without those, the first and the last training step.

    None where nothing was recorded. Reads the file once without decoding it, then decodes the chosen lines alone: it
    may be larger than memory. A line that is still being written is left out.
    """
    first, last = _scan(path)
    before = first.get("eval")
    after = last.get("eval")
    if before is None or before.phase != "eval_before" or (before is after and "train" in first):
        before, after = first.get("train", before), last.get("train", after)
    if before is None:
        return None
    after = None if after is before else after
    rows = _choose_rows(list(before.offsets), list(after.offsets) if after else [], num_episodes)
    early = _read_rows(path, before, [row for row, _ in rows if row is not None])
    late = _read_rows(path, after, [row for _, row in rows if row is not None]) if after else {}
    return Comparison(before=before, after=after, pairs=[(early.get(a), late.get(b)) for a, b in rows])


def _scan(path: Path) -> tuple[dict[str, PlayedRows], dict[str, PlayedRows]]:
    """The first and the last that was played, by kind (`train`, `eval`)."""
    first: dict[str, PlayedRows] = {}
    last: dict[str, PlayedRows] = {}
    start = 0
    with path.open("rb") as lines:
        for line in lines:
            offset, start = start, start + len(line)
            head = LINE_START.match(line)
            if head is None or not line.endswith(b"\n"):
                continue
            step, phase = int(head[1]), head[2].decode()
            kind = "train" if phase == "train" else "eval"
            played = last.get(kind)
            if played is None or (played.step, played.phase) != (step, phase):
                last[kind] = played = PlayedRows(step=step, phase=phase)
                first.setdefault(kind, played)
            # The episode's own row_index follows its steps, so it is the last one of the line.
            row = int(line[line.rindex(ROW_INDEX) + len(ROW_INDEX) :].split(b",", 1)[0])
            played.offsets.setdefault(row, offset)
    return first, last


def _choose_rows(before: Sequence[int], after: Sequence[int], number: int) -> Sequence[tuple[int | None, int | None]]:
    """`number` pairs of rows: shared ones, spread evenly over all of them, then what is left of each side."""
    in_both = set(before) & set(after)
    shared = _spread([row for row in before if row in in_both], number)
    missing = number - len(shared)
    only_before = _spread([row for row in before if row not in in_both], missing)
    only_after = _spread([row for row in after if row not in in_both], missing)
    return [*((row, row) for row in shared), *zip_longest(only_before, only_after)]


def _spread(rows: Sequence[int], number: int) -> list[int]:
    number = min(number, len(rows))
    return [rows[index * len(rows) // number] for index in range(number)]


def _read_rows(path: Path, played: PlayedRows, rows: Sequence[int]) -> dict[int | None, Trajectory]:
    """The episodes of these dataset rows, through the recorder's own reader."""
    with path.open("rb") as file, tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / path.name
        with chosen.open("wb") as copy:
            for row in rows:
                file.seek(played.offsets[row])
                copy.write(file.readline())
        return dict(zip(rows, (trajectory for _, _, trajectory in read_trajectories(chosen)), strict=True))
