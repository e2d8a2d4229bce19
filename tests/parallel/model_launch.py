"""Starts groups of ranks that run lists of model jobs."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import rendezvous

WORKER = Path(__file__).with_name("model_worker.py")


def launch(jobs_of_size: dict[int, list[dict]], folder: Path, *, timeout_s: float = 120) -> None:
    """For each world size, run its jobs one after the other on a group of that many ranks.

    Raises AssertionError with the ends of the ranks' logs where a rank fails. No rank outlives the call.
    """
    stores = {job["name"]: rendezvous.open_store() for jobs in jobs_of_size.values() for job in jobs}
    groups = [
        [world_size, [job | {"port": stores[job["name"]].port} for job in jobs]]
        for world_size, jobs in jobs_of_size.items()
    ]
    (folder / "groups.json").write_text(json.dumps(groups))
    with open(folder / "worker.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env=os.environ | rendezvous.ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the ranks are its children, so all can be ended together
        )
        try:
            code = process.wait(timeout=timeout_s * len(jobs_of_size))
        except subprocess.TimeoutExpired:
            code = f"none after {timeout_s * len(jobs_of_size)} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    assert code == 0, f"exit code {code}\n{(folder / 'worker.log').read_text()[-6000:]}"
