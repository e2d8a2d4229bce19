"""Several nodes, here as two torchruns on one machine, started as the SLURM script starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from launch.local import output_options


def test_failure_on_another_node_is_told_there(tmp_path):
    """Rank 3 is the second rank of node 1, whose torchrun shows its last lines and ends with its code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "launch.torchrun"),
                *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)),
                *("--master-addr", "127.0.0.1", "--master-port", port, "--log-dir", str(tmp_path / f"node-{node}")),
                *(*output_options(2), "-m", "rank_program", "fail-3", str(tmp_path)),
            ],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            text=True,
            stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]
    try:
        _, errors = nodes[1].communicate(timeout=60)
        assert nodes[1].returncode == 7
        assert "rank 3 has no luck" in errors
        assert f"rank 3 ended with exit code 7; all ranks were stopped. Logs: {tmp_path}/node-1" in errors
    finally:
        nodes[0].terminate()  # as srun's --kill-on-bad-exit does
        nodes[0].communicate(timeout=60)
        nodes[1].kill()
    assert nodes[0].returncode == 143
