"""What a user sees while a run goes on: one line per step, and below it a bar with the phase that is running."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("return", "return_mean", "7.3f"),
    ("success", "success_rate", "7.0%"),
    ("steps", "steps_per_episode", "6.2f"),
    ("roll tok/s", "rollout_tokens_per_s", "10,.0f"),
    ("train tok/s", "train_tokens_per_s", "11,.0f"),
    ("sync s", "sync_s", "6.2f"),
    ("gap", "logprob_gap_mean", "8.1e"),
    ("step s", "step_s", "6.1f"),
)
"""(heading, metric, format)."""
HEADER_EVERY = 20
QUIET_S = 30.0
"""Without a terminal, a phase is written as a line where nothing else was for so long."""


class TrainingDisplay:
    """Lines and a live bar on a terminal; to a file or pipe, lines only."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._lines = 0
        self._spoke = time.monotonic()
        self._progress.start()

    def phase(self, text: str) -> None:
        """Say what runs now."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal and time.monotonic() - self._spoke > QUIET_S:
            self.message(f"        {text}")

    def resume(self, done: int) -> None:
        """Go on after `done` steps."""
        self._progress.update(self._task, completed=done)

    def message(self, text: str) -> None:
        """One line above the bar."""
        self._spoke = time.monotonic()
        self._console.print(text, markup=False)

    def step(self, metrics: Mapping[str, float], *, step: int) -> None:
        """The line of a finished training step."""
        if self._lines % HEADER_EVERY == 0:
            self.message("  step  " + "  ".join(f"{h:>{_width(f, h)}}" for h, _, f in COLUMNS))
        self._lines += 1
        cells = [
            f"{format(metrics[name], spec) if name in metrics else '-':>{_width(spec, heading)}}"
            for heading, name, spec in COLUMNS
        ]
        self.message(f"{step:6d}  " + "  ".join(cells))
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()


def _width(spec: str, heading: str) -> int:
    digits = spec.split(".")[0].split(",")[0]
    return max(int(digits), len(heading))
