"""Where a run's numbers go: metrics.jsonl always, TensorBoard and Weights & Biases where configured."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_agent.config import LoggingConfig
from megatron_agent.errors import ConfigError

FILE_NAME = "metrics.jsonl"


class MetricsLogger:
    """Writes one record per training step. After a resume, records behind the checkpoint are cut first."""

    def __init__(self, run_dir: Path, options: LoggingConfig, *, run_name: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE_NAME
        self._tensorboard: Any = None
        self._wandb: Any = None
        if options.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"))
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
        if self._tensorboard:
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
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def cut_jsonl(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is at most `step`; a line that was half written goes as well."""
    if not path.exists():
        return
    kept = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            if json.loads(line)["step"] <= step:
                kept.append(line)
    temporary = path.with_name(path.name + ".incomplete")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
