"""What the benchmarks that need a trainer rank or a fleet share: a process of one rank, and a run's session in it."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_agent.config import ExperimentConfig
from megatron_agent.session import Session, open_session


def set_single_rank_environment() -> None:
    """What torchrun would set for a run of one rank."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


@contextmanager
def single_rank_session(*, for_training: bool = False, **sections: dict[str, Any]) -> Iterator[Session]:
    """A session on CPU as a run has it: Megatron model, fleet, runners. Its files are removed.

    With `for_training` the model has gradients, and megatron_agent.train.start begins the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = ExperimentConfig.model_validate(
            {
                "run": {"name": "benchmark", "dir": folder},
                "logging": {"tensorboard": False},
                "cluster": {"device": "cpu"},
                **sections,
            }
        )
        set_single_rank_environment()
        with open_session(config, for_training=for_training) as session:
            yield session
