"""The episodes of one training step: one round, or with `filters.zero_variance` as many as fill the batch.

A group whose returns are all equal teaches a group-relative estimator nothing; further rows are played in its place
(dynamic sampling, Yu et al. 2025, DAPO).
"""

from collections.abc import Callable, Sequence

from megatron_agent.config import ExperimentConfig
from megatron_agent.overlap import Progress
from rollout.episodes import RolloutManager, RolloutResult
from rollout.replay import RecordedEpisodes
from trajectory.steps import TrajectoryGroup


class TrainingRounds:
    """All rounds of one training step. Rank 0 alone decides on them, so they need no other rank and may be played
    while all ranks train."""

    def __init__(
        self,
        config: ExperimentConfig,
        episodes: RolloutManager | RecordedEpisodes,
        *,
        start_rows: Callable[[int, int], None],
        num_kept: Callable[[Sequence[TrajectoryGroup]], int],
    ) -> None:
        """`start_rows(count, first_place)` queues further rows; `num_kept` says how many groups would be trained."""
        filters = config.algorithm.filters
        self._wanted = config.rollout.prompts_per_step
        # A recording holds all rounds.
        resamples = filters.zero_variance and isinstance(episodes, RolloutManager)
        self._rounds_left = filters.max_resample_rounds if resamples else 0
        self._episodes = episodes
        self._start_rows = start_rows
        self._num_kept = num_kept
        self._results: list[RolloutResult] = []
        self._num_started = 0
        self._start(self._wanted)

    def play(self, progress: Progress) -> RolloutResult | None:
        """All rounds together; None where restarted replicas want weights first, then call it again."""
        while True:
            result = self._episodes.run(progress)
            if result is None:
                return None
            self._results.append(result)
            missing = self._num_missing()
            if not missing:
                return _together(self._results)
            self._rounds_left -= 1
            self._start(missing)

    def _start(self, count: int) -> None:
        self._start_rows(count, self._num_started)
        self._num_started += count

    def _num_missing(self) -> int:
        """How many rows still have to give a group; 0 where nothing more can be played."""
        if not self._rounds_left:
            return 0
        groups = [group for result in self._results for group in result.groups]
        return max(0, self._wanted - self._num_kept(groups))


def _together(rounds: list[RolloutResult]) -> RolloutResult:
    return RolloutResult(
        groups=[group for result in rounds for group in result.groups],
        seconds=sum(result.seconds for result in rounds),
        num_retries=sum(result.num_retries for result in rounds),
    )
