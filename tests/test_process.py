"""What a rank's process says and returns, by the way its job ended."""

import errno
import signal
from pathlib import Path

import pytest

from megatron_agent import process
from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import FleetError

CONFIG = "run: {name: r}\nmodel: {path: m}\ndata: {train: d.jsonl}\n"


@pytest.fixture(autouse=True)
def _handler_of_the_test_process():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(process, "check_config", lambda config: None)  # there is no model m
    path = tmp_path / "experiment.yaml"
    path.write_text(CONFIG)
    return str(path)


def raising(error: BaseException):
    def job(config: ExperimentConfig) -> None:
        raise error

    return job


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FleetError("a replica is gone; start it"), 4, "error (rank 0): a replica is gone; start it\n"),
        (OSError(errno.ENOSPC, "No space left", "metrics.jsonl"), 3, "the disk is full (metrics.jsonl)"),
        (OSError(errno.EACCES, "Permission denied"), 1, "Traceback"),
        (ValueError("a defect"), 1, "Traceback"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(config: str, capsys: pytest.CaptureFixture[str], error, code: int, said: str) -> None:
    assert process.run_rank(config, [], raising(error)) == code
    assert said in capsys.readouterr().err


def test_a_mistake_in_the_configuration_has_no_traceback(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert process.run_rank(config, ["run.stepz=3"], raising(ValueError())) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err


def test_a_surprised_rank_lets_the_first_failure_speak(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, and SIGTERM, which it gets when another rank ended first, ends the wait."""
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(process.time, "sleep", sleep)
    assert process.run_rank(config, [], raising(RuntimeError("Connection closed by peer"))) == 130
    assert waited == [process.PEER_GRACE_S]
