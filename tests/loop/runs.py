"""Starts whole runs through the command line, as a user does, and reads what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

REPOSITORY = Path(__file__).parents[2]
COMMAND = [str(Path(sys.executable).with_name("megatron-agent"))]


def write_config(folder: Path, **sections: Any) -> Path:
    """A small experiment: the quickstart's lake and model, 2 steps of 4 rows x 4 episodes, without warm start."""
    config: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder / "runs"), "steps": 2},
        "model": {"path": str(folder / "model"), "dtype": "fp32", "builder": {"name": "tiny_qwen3"}},
        "data": {"train": "megatron_agent.envs.frozen_lake:rows"},
        "agent": {
            "env": "frozen_lake",
            "reward": "scoring:by_length",
            "max_steps": 3,
            "max_response_tokens": 4,
            "max_episode_tokens": 256,
        },
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_model_len": 256, "kv_cache_gib": 0.25},
        "optimizer": {"lr": 1e-3},
        "logging": {"tensorboard": False, "report": False},
    }
    for name, options in sections.items():
        config[name] = config.get(name, {}) | options
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(command: str, *arguments: str | Path) -> subprocess.Popen:
    """The command, with this checkout's code, in a process group of its own; stdout and stderr together."""
    return subprocess.Popen(
        [*COMMAND, command, *map(str, arguments)],
        cwd=REPOSITORY,
        # The repository too, so that a checkout tests itself and not the one that is installed.
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), str(REPOSITORY)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(command: str, *arguments: str | Path, timeout_s: float = 240) -> str:
    """Run the command to its end; its output. Fails where the exit code is not 0 or a process is left."""
    output, code = run_any(command, *arguments, timeout_s=timeout_s)
    assert code == 0, output[-6000:]
    return output


def run_any(command: str, *arguments: str | Path, timeout_s: float = 240) -> tuple[str, int]:
    """(output, exit code) of the command. Fails where a process is left."""
    process = start(command, *arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output[-6000:]}") from None
    assert_nothing_left(process)
    return output, process.returncode


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL to the command and everything below it, all at once."""
    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=20)


def assert_nothing_left(process: subprocess.Popen) -> None:
    """No process of the command's session or of its ranks is alive. The ranks inherit the launcher's arguments."""
    left = [other for other in psutil.process_iter(["pid", "cmdline"]) if _belongs(other, process)]
    assert not left, [other.info for other in left]


def _belongs(other: psutil.Process, process: subprocess.Popen) -> bool:
    line = other.info["cmdline"] or []
    return other.pid != process.pid and any(str(part).endswith(tuple(_files(process))) for part in line)


def _files(process: subprocess.Popen) -> list[str]:
    assert isinstance(process.args, list)
    return [part for part in process.args if str(part).endswith(".yaml")] or ["\0"]


def await_step(run_folder: Path, step: int, *, timeout_s: float = 200) -> None:
    """Until the step is in metrics.jsonl: its checkpoint, if it has one, is being written at that moment."""
    deadline, path = time.monotonic() + timeout_s, run_folder / "metrics.jsonl"
    while True:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n")):
            return
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.01)


def kill_one(launcher: int, title: str) -> None:
    """End one of the launcher's processes, whose title holds this, as a machine that is out of memory would."""
    family = psutil.Process(launcher).children(recursive=True)
    alive = [member for member in family if member.status() != psutil.STATUS_ZOMBIE]
    victim = next(member for member in alive if any(title in part for part in member.cmdline()))
    victim.send_signal(signal.SIGKILL)


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
