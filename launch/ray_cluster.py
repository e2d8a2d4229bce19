"""The Ray cluster that the fleet's actors live in: a small local one, or one that is running already.

`python -m launch.ray_cluster HOST:PORT --nodes 3` waits until a cluster has that many nodes, or with
`--head-only` until its head answers; the SLURM script uses it.
"""

import argparse
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_agent.errors import FleetError, MegatronAgentError

NAMESPACE = "megatron_agent"
OBJECT_STORE_BYTES = 512 * 2**20
"""Enough for episodes and requests; weights do not travel through Ray."""
MAX_TEMP_DIR_LENGTH = 36
"""Ray adds `/session_<date>_<pid>/sockets/plasma_store`, and a unix socket's path ends at 107 bytes."""
POLL_S = 0.5

_local_temp_dir: Path | None = None


def connect(
    address: str | None,
    *,
    num_cpus: int,
    timeout_s: float,
    num_nodes: int = 1,
    gpu_ids: Sequence[int] = (),
) -> None:
    """Connect this process to a Ray cluster; a second call does nothing.

    Without `address` a local one starts, with `num_cpus` slots for actors and the GPUs `gpu_ids`, and ends with this
    process. With one (`host:port`, or `auto` on a node of the cluster) that cluster is joined, and waited for until
    `num_nodes` nodes are alive. Raises FleetError after `timeout_s`, saying what was missing.
    """
    import ray

    if ray.is_initialized():
        return
    if address is None:
        _start_local(num_cpus, gpu_ids)
        return
    deadline = time.monotonic() + timeout_s
    if address != "auto":
        _await_port(address, deadline, timeout_s)
    try:
        with _kept_signal_handler():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise FleetError(
            f"cluster.ray_address {address}: cannot join: {error}; run `ray start --address={address}` on this machine"
        ) from error
    _await_nodes(address, num_nodes, deadline, timeout_s)


def disconnect() -> None:
    """Leave the cluster; a local one ends, and its logs with it."""
    global _local_temp_dir
    import ray

    ray.shutdown()
    if _local_temp_dir is not None:
        shutil.rmtree(_local_temp_dir, ignore_errors=True)
        _local_temp_dir = None


def _start_local(num_cpus: int, gpu_ids: Sequence[int]) -> None:
    global _local_temp_dir
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _local_temp_dir = _make_temp_dir()
    with _visible_gpus(gpu_ids), _kept_signal_handler():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=len(gpu_ids),
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(_local_temp_dir),
        )


def _make_temp_dir() -> Path:
    """A new folder with a short path; folders whose process was killed are removed on the way."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MAX_TEMP_DIR_LENGTH - len("/ma-ray-4194304-abcdefgh"):
        parent = Path("/tmp")
    for folder in parent.glob("ma-ray-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"ma-ray-{os.getpid()}-", dir=parent))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _kept_signal_handler() -> Iterator[None]:
    """Ray puts a handler of its own on SIGTERM, which prints a stack and ends the process without unwinding it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _visible_gpus(gpu_ids: Sequence[int]) -> Iterator[None]:
    """Let Ray hand out only these GPUs. This process's own CUDA context is not affected once it exists."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    physical = before.split(",") if before else None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(physical[index] if physical else str(index) for index in gpu_ids)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _await_port(address: str, deadline: float, timeout_s: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise FleetError(f"cluster.ray_address {address!r} is neither host:port nor auto")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(POLL_S, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise FleetError(
                    f"cluster.ray_address {address}: no answer within {timeout_s:.0f} s ({error}); "
                    "start the cluster with `ray start --head`, or remove cluster.ray_address for a local one"
                ) from error
        time.sleep(POLL_S)


def _await_nodes(address: str, num_nodes: int, deadline: float, timeout_s: float) -> None:
    import ray

    while True:
        alive = [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
        if len(alive) >= num_nodes:
            return
        if time.monotonic() >= deadline:
            raise FleetError(
                f"Ray cluster {address}: {len(alive)} of {num_nodes} nodes joined within {timeout_s:.0f} s "
                f"({', '.join(sorted(alive))}); see the logs of the missing nodes"
            )
        time.sleep(POLL_S)


def main(argv: Sequence[str]) -> int:
    """Wait for a cluster's nodes from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.ray_cluster", description="Wait until a Ray cluster is complete."
    )
    parser.add_argument("address", help="host:port of the head node")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--nodes", type=int, help="wait for this many nodes; this machine must be one of them")
    wanted.add_argument("--head-only", action="store_true", help="wait until the head answers")
    parser.add_argument("--timeout-s", type=float, default=300, help="how long to wait (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.head_only:
            _await_port(arguments.address, time.monotonic() + arguments.timeout_s, arguments.timeout_s)
            return 0
        connect(arguments.address, num_cpus=0, timeout_s=arguments.timeout_s, num_nodes=arguments.nodes)
    except MegatronAgentError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
