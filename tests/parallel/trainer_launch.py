"""Starts groups of trainer ranks that run a list of jobs and reads what the jobs left behind."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

WORKER = Path(__file__).with_name("trainer_worker.py")


@dataclass(frozen=True)
class Result:
    """What rank 0 left behind for one job."""

    extra: dict
    weights: dict[str, torch.Tensor]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.extra["metrics"]


def launch(jobs: list[dict], folder: Path, *, world_size: int, timeout_s: float = 240) -> list[int]:
    """Run the jobs on `world_size` ranks; returns the exit codes. No rank outlives the call."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs_file = folder / f"jobs_{world_size}_{jobs[0]['name']}.json"
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in jobs]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        ports = [opened.getsockname()[1] for opened in sockets]
    jobs_file.write_text(json.dumps([job | {"port": port} for job, port in zip(jobs, ports, strict=True)]))
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
            }
            with open(folder / f"{jobs_file.stem}.rank{rank}.log", "w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), str(jobs_file)],
                        env=environment, stdout=log, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        return [process.wait(timeout=timeout_s) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def log_tail(folder: Path) -> str:
    """The ends of all ranks' logs, for a failure message."""
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def result(folder: Path, name: str) -> Result:
    extra = json.loads((folder / f"{name}.json").read_text())
    return Result(extra, torch.load(folder / f"{name}.pt"))
