"""Connecting to Ray: the messages of a connection that fails, and one real local cluster."""

import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from launch import ray_cluster
from megatron_agent.errors import FleetError


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nobody_answers(closed_port):
    started = time.monotonic()
    with pytest.raises(FleetError) as failure:
        ray_cluster.connect(f"127.0.0.1:{closed_port}", num_cpus=1, timeout_s=1.0)
    assert time.monotonic() - started < 10
    assert str(failure.value).startswith(f"cluster.ray_address 127.0.0.1:{closed_port}: no answer within 1 s (")
    assert "start the cluster with `ray start --head`" in str(failure.value)


@pytest.mark.parametrize("address", ["localhost", "ray://", "host:port"])
def test_not_an_address(address):
    with pytest.raises(FleetError, match="is neither host:port nor auto"):
        ray_cluster.connect(address, num_cpus=1, timeout_s=1.0)


def test_missing_nodes(monkeypatch):
    import ray

    nodes = [{"NodeManagerHostname": "n1", "Alive": True}, {"NodeManagerHostname": "n2", "Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(FleetError, match=r"Ray cluster h:1: 1 of 2 nodes joined within 5 s \(n1\); see the logs"):
        ray_cluster._await_nodes("h:1", 2, deadline=time.monotonic(), timeout_s=5)


def test_command_line_of_the_wait(closed_port, capsys):
    assert ray_cluster.main([f"127.0.0.1:{closed_port}", "--head-only", "--timeout-s", "0.1"]) == FleetError.exit_code
    assert "error: cluster.ray_address" in capsys.readouterr().err


def test_command_line_finds_the_head():
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        assert ray_cluster.main([f"127.0.0.1:{head.getsockname()[1]}", "--head-only", "--timeout-s", "5"]) == 0


def test_folder_of_a_killed_process_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_cluster, "MAX_TEMP_DIR_LENGTH", 500)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"ma-ray-{gone.pid}-abc", f"ma-ray-{os.getpid()}-abc", "other"):
        (tmp_path / name).mkdir()
    own = ray_cluster._make_temp_dir()
    assert {path.name for path in tmp_path.iterdir()} == {f"ma-ray-{os.getpid()}-abc", "other", own.name}


LOCAL = """
    import os
    import ray
    from launch.ray_cluster import connect, disconnect

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    connect(None, num_cpus=3, timeout_s=60, gpu_ids=[1, 2])
    connect(None, num_cpus=99, timeout_s=60)  # a second call does nothing
    resources = ray.cluster_resources()
    assert (resources["CPU"], resources["GPU"]) == (3, 2), resources
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before, "the driver's own GPUs changed"
    assert ray.get_runtime_context().namespace == "megatron_agent"

    @ray.remote(num_cpus=0, num_gpus=1)
    def own_gpu():
        import os, time
        time.sleep(1)  # so that both run at once
        return os.environ["CUDA_VISIBLE_DEVICES"]

    gpus = sorted(ray.get([own_gpu.remote(), own_gpu.remote()]))
    from launch import ray_cluster
    folder = ray_cluster._local_temp_dir
    assert folder.is_dir()
    disconnect()
    print(gpus, folder.exists())
"""


def test_local_cluster():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOCAL)], env=environment, capture_output=True, text=True, timeout=120
    )
    # Of the GPUs 4, 5 and 6 that this process may see, the fleet gets the second and the third.
    assert result.stdout == "['5', '6'] False\n", result.stderr
