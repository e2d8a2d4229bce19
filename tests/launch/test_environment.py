"""Environment variables of trainer ranks."""

import os

import pytest

from launch import environment
from launch.environment import THREAD_VARIABLES, local_environment, torchrun_environment
from megatron_agent.config import ExperimentConfig


def experiment(**parallel) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {"run": {"name": "walk"}, "model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "parallel": parallel}
    )


@pytest.mark.parametrize(
    ("cores", "ranks", "option", "threads"),
    [
        (16, 4, 0, "4"),
        (7, 2, 0, "3"),  # never more threads than cores
        (2, 8, 0, "1"),  # but one at least
        (16, 4, 6, "6"),  # parallel.threads_per_rank decides
    ],
)
def test_threads(monkeypatch, cores, ranks, option, threads):
    monkeypatch.setattr(environment, "available_cores", lambda: cores)
    variables = local_environment(experiment(threads_per_rank=option), ranks)
    assert {variables[name] for name in THREAD_VARIABLES} == {threads}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_only_allowed_cores_count():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert environment.available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_users_environment_is_kept(monkeypatch):
    monkeypatch.setenv("WALK_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")  # parallel.threads_per_rank is the option for this
    variables = local_environment(experiment(threads_per_rank=2), 1)
    assert variables["WALK_TOKEN"] == "secret"
    assert variables["OMP_NUM_THREADS"] == "2"


def test_one_machine_talks_over_loopback():
    if os.path.exists("/sys/class/net/lo"):
        assert local_environment(experiment(), 1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in torchrun_environment()  # several machines cannot


def test_megatron_needs_one_queue():
    assert torchrun_environment()["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
