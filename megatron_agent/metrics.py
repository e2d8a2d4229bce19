"""Where a run's numbers go: metrics.jsonl always, TensorBoard and Weights & Biases where configured."""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_agent.config import LoggingConfig
from megatron_agent.errors import ConfigError

FILE_NAME = "metrics.jsonl"
_STEP = re.compile(rb'\{"step": (\d+)')


class MetricsLogger:
    """Writes one record per training step. After a resume, records behind the checkpoint are cut first."""

    def __init__(self, run_dir: Path, options: LoggingConfig, *, run_name: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE_NAME
        self._tensorboard_dir = run_dir / "tensorboard" if options.tensorboard else None
        self._tensorboard: Any = None
        self._wandb: Any = None
        if options.wandb:
            try:
                import wandb  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise ConfigError(
                    "logging.wandb is set but wandb is not installed; pip install 'megatron-agent[wandb]'"
                ) from error
            self._wandb = wandb.init(
                project=options.wandb.project,
                entity=options.wandb.entity,
                mode=options.wandb.mode,
                name=run_name,
                dir=str(run_dir),
            )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one record; values that are not finite are written as null."""
        record = {"step": step, "time": time.time(), **{name: _finite(value) for name, value in metrics.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._tensorboard_dir:
            self._tensorboard = self._tensorboard or _summary_writer(self._tensorboard_dir, step)
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def cut_after(self, step: int) -> None:
        """Forget the records of steps after `step`, atomically; a run that goes on from `step` writes them again."""
        cut_jsonl(self._path, step)

    def close(self) -> None:
        """Flush what is buffered."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run leaves half a line


def cut_jsonl(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file up to the first whose `step` is above `step`, or that is only half written.

    Lines are in the order of their steps and begin with `{"step": N`, so a file of gigabytes is not parsed.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            match = _STEP.match(line)
            if match is None or int(match[1]) > step or not line.endswith(b"\n"):
                break
            end += len(line)
    os.truncate(path, end)


class PhaseClock:
    """Seconds by phase of one training step."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    @property
    def seconds(self) -> dict[str, float]:
        """`<phase>_s` of each phase, and `step_s` since the clock was made."""
        return {f"{name}_s": value for name, value in self._seconds.items()} | {
            "step_s": time.monotonic() - self._started
        }


def _summary_writer(folder: Path, first_step: int) -> Any:
    """A writer whose events replace those of `first_step` and later, which an interrupted run may have written."""
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
