"""Recorded episodes in place of the fleet: the updates of a run, repeated from its trajectories.jsonl."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_agent.data import Row
from megatron_agent.errors import DataError
from rollout.episodes import RolloutResult
from rollout.recorder import GREEDY_PHASE, read_trajectories
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
        self,
        rows: Sequence[Row],
        *,
        step: int,
        group_size: int,
        temperature: float,
        phase: str = "train",
        with_greedy: bool = False,
        first_place: int = 0,
    ) -> None:
        """Choose the step that `run` gives; everything else is as it was recorded."""
        self._step, self._phase = step, phase

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> RolloutResult | None:
        """The recorded groups of the step; raises DataError where a training step was not recorded."""
        trajectories = self._read() if self._phase == "train" else []
        progress(len(trajectories), len(trajectories))
        if self._phase == "train" and not trajectories:
            raise DataError(f"rollout.replay {self._path}: no episodes of training step {self._step}; lower run.steps")
        members: dict[str, list[Trajectory]] = {}
        greedy: dict[str, Trajectory] = {}
        for phase, trajectory in trajectories:
            if phase == GREEDY_PHASE:
                greedy[trajectory.group_id] = trajectory
            else:
                members.setdefault(trajectory.group_id, []).append(trajectory)
        groups = [
            TrajectoryGroup(group_id=key, trajectories=tuple(group), greedy=greedy.get(key))
            for key, group in members.items()
        ]
        return RolloutResult(groups=groups, seconds=0.0, num_retries=0)

    def _read(self) -> list[tuple[str, Trajectory]]:
        """The episodes of this training step with their phases; earlier ones are passed over."""
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
            if step == self._step and phase in ("train", GREEDY_PHASE):
                found.append((phase, trajectory))

    def shutdown(self) -> None:
        """Close the file."""
        self._records.close()
