"""Checkpoints of a run, written so that an interruption at any moment leaves no half of one.

    folder/.incomplete-step_00000020/   every rank writes and fsyncs its part
    folder/step_00000020/               renamed by rank 0: complete from this moment on
    folder/step_00000020/critic/        the critic's tensors, where there is one

A folder named `step_*` is complete by construction, so the highest of them is the latest. Loading works under
other tensor-, pipeline- and data-parallel sizes. Every wait ends with the groups' time-out.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_agent.errors import CheckpointError
from parallel.checkpoint_tensors import CheckpointState, read_tensors, read_weights
from parallel.critic import CriticTrainer
from parallel.distribute import broadcast_object
from parallel.optimizer import LrScheduler
from parallel.random_state import random_state, set_random_state

_STATE_FILE = "state.json"
_COMPLETE = re.compile(r"step_(\d+)")
_INCOMPLETE = ".incomplete-"
_CRITIC = "critic"


def save(
    folder: str | Path,
    step: int,
    *,
    model_chunks: list[nn.Module],
    optimizer: Any,
    scheduler: LrScheduler,
    extra_state: dict[str, Any],
    keep_last: int,
    critic: CriticTrainer | None = None,
) -> Path:
    """Write the checkpoint of `step` under `folder` and remove all but the newest `keep_last`. Collective.

    `extra_state` is rank 0's JSON-serialisable state (counters, data position, fleet version); random number states
    are added. A `critic` goes into the same checkpoint. Returns the checkpoint's folder. Raises CheckpointError on
    every rank where it cannot be written; then the earlier checkpoints are as they were.
    """
    folder = Path(folder)
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_INCOMPLETE}{target.name}"
    run_state = {
        "step": step, "extra": extra_state, "scheduler": scheduler.state_dict(), "random": random_state()
    }  # fmt: skip
    if critic is not None:
        run_state["critic_scheduler"] = critic.scheduler.state_dict()
    try:
        _on_rank_0(lambda: _start(folder, temporary), f"start checkpoint {target}")
        _write_model(temporary, CheckpointState(model_chunks, optimizer), f"write checkpoint {target}")
        if critic is not None:
            state = CheckpointState(critic.model_chunks, critic.optimizer)
            _write_model(temporary / _CRITIC, state, f"write the critic into checkpoint {target}")
        _on_rank_0(lambda: _complete(temporary, target, run_state), f"complete checkpoint {target}")
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if dist.get_rank() == 0:
        _remove_old(folder, keep_last=keep_last)
    return target


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint under `folder`; None where there is none."""
    complete = _complete_checkpoints(Path(folder))
    return complete[-1] if complete else None


def load(
    checkpoint: str | Path,
    *,
    model_chunks: list[nn.Module],
    optimizer: Any,
    scheduler: LrScheduler,
    critic: CriticTrainer | None = None,
) -> dict[str, Any]:
    """Restore weights, optimizer, learning rate and random number states; returns the `extra_state`. Collective.

    `checkpoint` is a folder that `save` or `latest` returned, visible to all ranks. With a `critic`, its state is
    restored too; without one, what the checkpoint holds of it is left alone. Raises CheckpointError where the
    checkpoint cannot be read, and before anything is changed where a critic is asked for and it holds none.
    """
    checkpoint = Path(checkpoint)
    run_state = _read_run_state(checkpoint)
    if critic is not None and run_state["critic_scheduler"] is None:
        raise CheckpointError(
            f"{checkpoint}: holds no critic, but algorithm.critic is set; the run that wrote it had none. Choose "
            "another run.name, or a checkpoint of a run with a critic"
        )
    _read(checkpoint, lambda: read_tensors(checkpoint, model_chunks, optimizer))
    scheduler.load_state_dict(run_state["scheduler"])
    if critic is not None:
        _read(checkpoint, lambda: read_tensors(checkpoint / _CRITIC, critic.model_chunks, critic.optimizer))
        critic.scheduler.load_state_dict(run_state["critic_scheduler"])
    if dist.get_rank() == 0:
        set_random_state(run_state["random"])
    return run_state["extra"]


def load_weights(checkpoint: str | Path, *, model_chunks: list[nn.Module]) -> int:
    """Restore the policy's weights alone, for evaluation and export; returns the checkpoint's step. Collective.

    Raises CheckpointError where it cannot be read.
    """
    checkpoint = Path(checkpoint)
    run_state = _read_run_state(checkpoint)
    _read(checkpoint, lambda: read_weights(checkpoint, model_chunks))
    return run_state["step"]


def _read_run_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
        required = {name: state[name] for name in ("step", "extra", "scheduler", "random")}
        return required | {"critic_scheduler": state.get("critic_scheduler")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint}: {_STATE_FILE} cannot be read ({error}); choose another checkpoint of the run"
        ) from error


def _read(checkpoint: Path, read: Callable[[], None]) -> None:
    try:
        read()
    except Exception as error:  # what a damaged file leads to is not in any interface
        raise CheckpointError(
            f"{checkpoint}: cannot be read: {_reason(error)}; choose another checkpoint of the run"
        ) from error


def _on_rank_0(action: Callable[[], None], what: str) -> None:
    """Run the action on rank 0; where it fails, every rank raises, so that none waits for the others. Collective."""
    failure = None
    if dist.get_rank() == 0:
        try:
            action()
        except (OSError, RuntimeError, TypeError) as error:  # torch.save reports a full disk as RuntimeError
            failure = _reason(error)
    failure = broadcast_object(failure)
    if failure is not None:
        raise CheckpointError(f"cannot {what}: {failure}; earlier checkpoints are untouched. Is the disk full?")


def _write_model(folder: Path, state: CheckpointState, what: str) -> None:
    """One model's tensors into `folder`. Collective."""
    _on_rank_0(lambda: _write_common(folder, state), what)
    try:
        state.write_tensors(folder)
    except CheckpointException as error:  # raised on all ranks where one of them failed
        raise CheckpointError(
            f"cannot write {folder}: {_reason(error)}; earlier checkpoints are untouched. Is the disk full?"
        ) from error


def _write_common(folder: Path, state: CheckpointState) -> None:
    folder.mkdir(exist_ok=True)
    state.write_common(folder)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return f"{type(error).__name__}: {error}"


def _start(folder: Path, temporary: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{_INCOMPLETE}*"):  # of a run that was killed
        shutil.rmtree(left_over)
    temporary.mkdir()


def _complete(temporary: Path, target: Path, run_state: dict[str, Any]) -> None:
    with open(temporary / _STATE_FILE, "w", encoding="utf-8") as file:
        json.dump(run_state, file)
    for path in temporary.rglob("*"):
        _fsync(path)
    _fsync(temporary)
    if target.exists():  # the same step again, after resuming from an earlier one
        _remove(target)
    temporary.rename(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _COMPLETE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _remove_old(folder: Path, *, keep_last: int) -> None:
    for path in _complete_checkpoints(folder)[:-keep_last]:
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """Rename first: a removal that is interrupted must not leave something that looks complete."""
    doomed = checkpoint.with_name(f"{_INCOMPLETE}removed-{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
