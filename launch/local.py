"""Starts the trainer ranks of one machine through torchrun, and ends all of them, whatever happens."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from launch.environment import local_environment
from launch.process_tree import adopt_orphans, descendants, end_descendants
from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import log_folder, trainer_layout
from megatron_agent.errors import ConfigError

GRACE_S = 25.0
"""How long torchrun gets to stop its ranks, which it kills itself after 10 s, and what they left behind."""


class Stopped(BaseException):
    """SIGTERM or SIGHUP arrived; like KeyboardInterrupt, not an error to handle on the way."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def run_ranks(config: ExperimentConfig, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` on every trainer rank of this machine and wait for the end.

    Rank 0 writes to this process's stdout and stderr. What the others write, and rank 0's stderr, is kept in the run
    folder's logs/, one folder per start. Returns the exit code of the first rank that failed, else 0. When this
    returns or raises, no process is left. Raises ConfigError where the ranks need more than one machine or
    cluster.master_port is taken.
    """
    layout = trainer_layout(config)
    if layout.nodes > 1:
        raise ConfigError(
            f"cluster.trainer_nodes is {layout.nodes}, which one machine cannot start; "
            "use `megatron-agent launch slurm`, or torchrun on each node"
        )
    port = config.cluster.master_port
    if port and not _is_free(port):
        raise ConfigError(
            f"cluster.master_port {port} is taken by another process; choose another, or 0 for a free one"
        )
    logs = log_folder(config) / time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir {config.run.dir}: cannot write {logs}: {error.strerror}; choose another") from error
    command = _torchrun_command(layout.ranks_per_node, port, logs, module, arguments)
    environment = local_environment(config, layout.ranks_per_node)
    adopt_orphans()
    spared = descendants()
    with _signals_as_exceptions():
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            return process.wait()
        finally:
            _stop(process)
            end_descendants(spared, grace_s=1.0)  # what is left where torchrun was killed itself


def output_options(ranks: int) -> list[str]:
    """torchrun's options that keep each rank's output in a file and show what rank 0 writes."""
    # torchrun's codes: 2 is stderr, 3 both streams. Rank 0 keeps its stdout, which the live display needs.
    redirects = ",".join(f"{rank}:3" for rank in range(1, ranks))
    return ["--tee", "0:2", "--role", "", *(("--redirects", redirects) if redirects else ())]


def _torchrun_command(ranks: int, port: int, logs: Path, module: str, arguments: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "launch.torchrun"),
        *("--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
        *("--log-dir", str(logs), *output_options(ranks)),
        *("-m", module, *arguments),
    ]


def _stop(process: subprocess.Popen) -> None:
    """SIGTERM to torchrun, which stops its ranks; a second Ctrl-C cuts the wait short."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, Stopped):
        process.kill()
        process.wait()


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that `finally` blocks end the ranks."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    previous = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
