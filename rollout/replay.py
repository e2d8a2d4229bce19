"""Recorded episodes in place of the fleet: the updates of a run, repeated from its trajectories.jsonl."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_agent.data import Row
from megatron_agent.errors import DataError
from rollout.episodes import RolloutResult
from rollout.recorder import read_trajectories
from trajectory.steps import Trajectory, TrajectoryGroup


class RecordedEpisodes:
    """What RolloutManager offers, from a recording: the groups of a training step are those recorded for that step.

    Evaluations give no episodes. The file is read once, forwards, one step's episodes in memory at a time.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises DataError where there is no such file."""
        self._path = Path(path)
        if not self._path.is_file():
            raise DataError(f"rollout.replay {path}: no such file; name the trajectories.jsonl of a run")
        self._records = read_trajectories(self._path)
        self._ahead: tuple[int, str, Trajectory] | None = None
        self._step = 0
        self._phase = ""

    def start(
        self, rows: Sequence[Row], *, step: int, group_size: int, temperature: float, phase: str = "train"
    ) -> None:
        """Choose the step that `run` gives; rows, group size and temperature are those of the recording."""
        self._step, self._phase = step, phase

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> RolloutResult | None:
        """The recorded groups of the step; raises DataError where a training step was not recorded."""
        trajectories = self._read() if self._phase == "train" else []
        progress(len(trajectories), len(trajectories))
        if self._phase == "train" and not trajectories:
            raise DataError(f"rollout.replay {self._path}: no episodes of training step {self._step}; lower run.steps")
        members: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            members.setdefault(trajectory.group_id, []).append(trajectory)
        groups = [TrajectoryGroup(group_id=key, trajectories=tuple(group)) for key, group in members.items()]
        return RolloutResult(groups=groups, seconds=0.0, num_retries=0)

    def _read(self) -> list[Trajectory]:
        """The episodes of this training step; earlier ones are passed over."""
        found = []
        while True:
            record = self._ahead or next(self._records, None)
            self._ahead = None
            if record is None:
                return found
            step, phase, trajectory = record
            if step > self._step:
                self._ahead = record
                return found
            if step == self._step and phase == "train":
                found.append(trajectory)

    def shutdown(self) -> None:
        """Close the file."""
        self._records.close()
