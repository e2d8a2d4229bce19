"""The launcher of one machine: exit codes, ports, and that no process outlives it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.local import run_ranks
from megatron_agent import config_loading
from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError

EXPERIMENT = "run: {name: walk}\nmodel: {path: models/none}\ndata: {train: rows.jsonl}\n"
LAUNCH = """
import sys
from launch.local import Stopped, run_ranks
from megatron_agent.config_loading import load_config
try:
    sys.exit(run_ranks(load_config(sys.argv[1], sys.argv[2:4]), "rank_program", sys.argv[4:]))
except Stopped as stopped:
    sys.exit(stopped.exit_code)
"""
START_S = 60


def load(folder: Path, *overrides: str) -> ExperimentConfig:
    (folder / "walk.yaml").write_text(EXPERIMENT)
    return config_loading.load_config(folder / "walk.yaml", overrides)


def launch(folder: Path, action: str) -> subprocess.Popen:
    """Two ranks of rank_program, started by a launcher of its own."""
    load(folder)
    return subprocess.Popen(
        [
            *(sys.executable, "-c", LAUNCH, str(folder / "walk.yaml")),
            *("parallel.data=2", f"run.dir={folder / 'runs'}", action, str(folder)),
        ],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def processes(folder: Path) -> list[psutil.Process]:
    """Everything that was started with `folder` among its arguments."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if not zombie and any(str(folder) in argument for argument in process.info["cmdline"] or ()):
            found.append(process)
    return found


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.1)


def test_all_ranks_run_and_the_first_is_shown(tmp_path):
    output, errors = (job := launch(tmp_path, "succeed")).communicate(timeout=START_S)
    assert (job.returncode, output, errors) == (0, "output of rank 0\n", "")
    logs = list((tmp_path / "runs/walk/logs").glob("*/*/attempt_0/1/stdout.log"))
    assert [log.read_text() for log in logs] == ["output of rank 1\n"]


def test_exit_code_of_a_failing_rank(tmp_path):
    _, errors = (job := launch(tmp_path, "fail-1")).communicate(timeout=START_S)
    assert job.returncode == 7
    assert "rank 1 has no luck" in errors
    assert "rank 1 ended with exit code 7; all ranks were stopped. Logs: " in errors
    assert "Traceback" not in errors
    assert processes(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's child subreaper")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_is_left(tmp_path, signum, code):
    job = launch(tmp_path, "fork")
    wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2, "start of both ranks")
    assert len(processes(tmp_path)) == 6  # launcher, torchrun, and two ranks with a child each
    job.send_signal(signum)
    _, errors = job.communicate(timeout=START_S)
    assert job.returncode in (code, -signum), errors
    # A killed launcher cannot wait for the others, which notice its death and end in their own time.
    wait_for(lambda: processes(tmp_path) == [], f"left: {processes(tmp_path)}")


def test_taken_port(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cluster.master_port {port} is taken by another process; choose another"
        ):
            run_ranks(load(tmp_path, f"cluster.master_port={port}"), "rank_program", [])


def test_several_nodes(tmp_path):
    config = load(tmp_path, "cluster.trainer_nodes=2", "parallel.data=2")
    with pytest.raises(ConfigError, match=r"cluster\.trainer_nodes is 2, which one machine cannot start; use"):
        run_ranks(config, "rank_program", [])
