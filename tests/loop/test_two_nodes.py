"""Two torchruns as on two machines, joined over the loopback interface, train as one launcher with two ranks does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from recording import record_episodes
from runs import REPOSITORY, metrics, run, write_config


def test_two_torchruns_take_the_updates_of_one(tmp_path: Path) -> None:
    record_episodes(tmp_path, steps=2)
    options = {
        "rollout": {"replay": str(tmp_path / "trajectories.jsonl"), "max_model_len": 256},
        "parallel": {"tensor": 2},
    }
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    run("train", write_config(one, **options))
    config = write_config(two, **options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [_torchrun(node, port, config) for node in range(2)]
    try:
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    expected, found = metrics(one / "runs" / "run"), metrics(two / "runs" / "run")
    assert [record["step"] for record in found] == [record["step"] for record in expected] == [0, 1, 2]
    for name in ("loss", "grad_norm", "entropy"):
        for want, got in zip(expected[1:], found[1:], strict=True):
            assert got[name] == pytest.approx(want[name], rel=1e-6)


def _torchrun(node: int, port: int, config: Path) -> subprocess.Popen:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
        *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("-m", "megatron_agent.train", str(config)),
    ]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
