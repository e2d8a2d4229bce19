"""What every rank's process does around its job: read the configuration, report errors once, leave nothing behind."""

import os
import signal
import sys
from collections.abc import Callable

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_loading import load_config
from megatron_agent.errors import MegatronAgentError


def run_rank(config_path: str, overrides: list[str], job: Callable[[ExperimentConfig], None]) -> int:
    """Run `job` on this rank; returns the exit code.

    An error with a remedy is printed without a traceback by the rank that met it. SIGTERM (from torchrun, when
    another rank failed) unwinds like Ctrl-C, so that engines and shared memory are released.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        job(load_config(config_path, overrides))
    except MegatronAgentError as error:
        print(f"error (rank {os.environ.get('RANK', '0')}): {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
