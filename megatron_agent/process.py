"""What every rank's process does around its job: read the configuration, report errors once, leave nothing behind."""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_check import check_config
from megatron_agent.config_loading import load_config
from megatron_agent.errors import CheckpointError, MegatronAgentError

INTERRUPTED = 130
PEER_GRACE_S = 15.0
"""How long a rank that was surprised by an error waits to be stopped because of another one."""


def run_rank(config_path: str, overrides: list[str], job: Callable[[ExperimentConfig], None]) -> int:
    """Run `job` on this rank; returns the exit code.

    An error with a remedy is printed without a traceback by the rank that met it. SIGTERM (from torchrun, when
    another rank failed) unwinds like Ctrl-C, so that engines and shared memory are released.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        config = load_config(config_path, overrides)
        check_config(config)  # torchrun by hand comes here without the checks of the command line
        job(config)
    except MegatronAgentError as error:
        print(f"error (rank {os.environ.get('RANK', '0')}): {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            traceback.print_exc()
            return _let_first_failure_speak()
        print(
            f"error (rank {os.environ.get('RANK', '0')}): the disk is full ({error.filename or 'unknown file'}); free "
            "some space and start again, the run goes on from its newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        return CheckpointError.exit_code
    except Exception:
        traceback.print_exc()
        return _let_first_failure_speak()
    return 0


def _let_first_failure_speak() -> int:
    """Most tracebacks of a stopped run say that the connection to the rank that failed is gone.

    torchrun reports the rank that ends first and stops the others, so a rank that does not know the cause waits.
    """
    try:
        time.sleep(PEER_GRACE_S if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0.0)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 1


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
