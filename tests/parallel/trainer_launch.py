"""Starts groups of trainer ranks that run lists of jobs, and reads what the jobs left behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import rendezvous
import torch

WORKER = Path(__file__).with_name("trainer_worker.py")


@dataclass(frozen=True)
class Group:
    """Ranks that run the same jobs, one after the other."""

    name: str
    world_size: int
    jobs: list[dict]


@dataclass(frozen=True)
class Result:
    """What rank 0 left behind for one job."""

    extra: dict
    weights: dict[str, torch.Tensor]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.extra["metrics"]


def launch(groups: list[Group], folder: Path, *, timeout_s: float = 120) -> dict[str, list[int]]:
    """Run the groups in turn; returns the exit codes of each one's ranks. No rank outlives the call."""
    stores = [[rendezvous.open_store() for _ in group.jobs] for group in groups]
    described = [
        vars(group) | {"ports": [store.port for store in own], "timeout_s": timeout_s}
        for group, own in zip(groups, stores, strict=True)
    ]
    (folder / "groups.json").write_text(json.dumps(described))
    with open(folder / "worker.log", "w") as log:
        subprocess.run(
            [sys.executable, str(WORKER), str(folder)],
            env=os.environ | rendezvous.ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout_s * (len(groups) + 1),
            check=False,
        )
    exit_codes = folder / "exit_codes.json"
    assert exit_codes.exists(), log_tail(folder)
    return dict(zip([group.name for group in groups], json.loads(exit_codes.read_text()), strict=True))


def log_tail(folder: Path) -> str:
    """The ends of all ranks' logs, for a failure message."""
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def result(folder: Path, name: str) -> Result:
    extra = json.loads((folder / f"{name}.json").read_text())
    return Result(extra, torch.load(folder / f"{name}.pt"))
