"""Episodes on a thread beside the main loop, and the rounds of a training step that it plays there."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from made_records import one_step_group

from megatron_agent.config import ExperimentConfig
from megatron_agent.dynamic_sampling import TrainingRounds
from megatron_agent.errors import FleetError
from megatron_agent.overlap import EpisodePlayer
from megatron_agent.rollout_side import RolloutSide
from rollout.episodes import RolloutManager, RolloutResult
from trajectory.steps import TrajectoryGroup


def result_of(*groups: TrajectoryGroup) -> RolloutResult:
    return RolloutResult(groups=list(groups), seconds=1.5, num_retries=1)


def config(**sections: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **sections}
    )


def test_the_main_loop_goes_on_while_episodes_are_played():
    player, over = EpisodePlayer(), threading.Event()
    expected, seen = result_of(), []

    def play(progress: Callable[[int, int], None]) -> RolloutResult:
        progress(3, 8)
        assert over.wait(timeout=20)
        return expected

    def while_waiting(done: int, total: int) -> None:
        seen.append((done, total, threading.current_thread()))
        over.set()

    player.start(play)
    assert player.is_busy
    assert player.wait(while_waiting) is expected
    assert not player.is_busy
    assert seen == [(3, 8, threading.main_thread())], "whoever waits looks after the other ranks, in its own thread"


def test_what_is_raised_there_is_raised_where_the_main_loop_waits():
    def play(progress):
        raise FleetError("no replica left")

    player = EpisodePlayer()
    player.start(play)
    with pytest.raises(FleetError, match="no replica left"):
        player.wait(lambda done, total: None)
    player.start(lambda progress: None)  # replicas that want weights
    assert player.wait(lambda done, total: None) is None


def test_the_end_of_a_run_stops_what_is_played():
    player, playing, ended = EpisodePlayer(), threading.Event(), threading.Event()

    def play(progress):
        try:
            while True:
                playing.set()
                progress(0, 1)
        finally:
            ended.set()

    player.start(play)
    assert playing.wait(timeout=20)
    player.close()
    assert ended.is_set()
    EpisodePlayer().close()  # nothing was started


class ScriptedManager(RolloutManager):
    """Gives these results, one a call; a number is a round of so many groups with equal returns."""

    def __init__(self, results: Sequence[int | None]) -> None:
        self.results = list(results)
        self.first_places: list[tuple[int, int]] = []
        self.rows: list[int] = []

    def start(self, rows, *, first_place=0, **_) -> None:
        self.first_places.append((len(rows), first_place))
        self.rows += [row.index for row in rows]

    def run(self, progress=lambda done, total: None) -> RolloutResult | None:
        num_equal = self.results.pop(0)
        if num_equal is None:
            return None
        num_rows = self.first_places[-1][0]
        flat, varied = one_step_group(1.0, 1.0), one_step_group(0.0, 1.0)
        return result_of(*[flat] * num_equal, *[varied] * (num_rows - num_equal))


def num_varied(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len({t.outcome_reward for t in group.trajectories}) > 1 for group in groups)


def rounds_of(manager: ScriptedManager, max_rounds: int, *, zero_variance: bool = True) -> TrainingRounds:
    filters = {"zero_variance": zero_variance, "max_resample_rounds": max_rounds}

    def start_rows(count: int, first_place: int) -> None:
        manager.first_places.append((count, first_place))

    return TrainingRounds(
        config(rollout={"prompts_per_step": 4}, algorithm={"filters": filters}),
        manager,
        start_rows=start_rows,
        num_kept=num_varied,
    )


def test_rounds_go_on_until_the_batch_is_full():
    manager = ScriptedManager([3, None, 1, 0])  # in the second round a replica dies once
    rounds = rounds_of(manager, 4)
    assert rounds.play(lambda done, total: None) is None, "the main loop has to sync the weights first"
    result = rounds.play(lambda done, total: None)
    assert result is not None
    assert manager.first_places == [(4, 0), (3, 4), (1, 7)]
    assert (len(result.groups), num_varied(result.groups)) == (8, 4)
    assert (result.seconds, result.num_retries) == (4.5, 3)


def test_the_limit_of_rounds_holds():
    manager = ScriptedManager([4, 4, 4])
    assert rounds_of(manager, 1).play(lambda done, total: None)
    assert manager.results == [4], "one round and one more"
    manager = ScriptedManager([4, 4])
    assert rounds_of(manager, 3, zero_variance=False).play(lambda done, total: None)
    assert manager.results == [4]


def test_rows_whose_episodes_were_not_used_are_played_again_after_a_resume(tmp_path):
    """At the checkpoint of step 1 the episodes of step 2 are in flight: their rows are not behind the run yet."""
    from megatron_agent.data import Row, RowIterator

    def side_with(manager: ScriptedManager) -> RolloutSide:
        rows = RowIterator([Row(index=index, prompt=[]) for index in range(10)], seed=0, shuffle=True)
        own = config(rollout={"prompts_per_step": 3}, logging={"trajectories": False})
        unused = cast(Any, None)
        return RolloutSide(
            config=own, fleet=unused, episodes=manager, teacher=None, rows=rows, eval_rows=[], logger=unused,
            recorder=unused, display=unused, player=EpisodePlayer(),
        )  # fmt: skip

    def play(side: RolloutSide, step: int) -> RolloutResult:
        side.start_training(step, kept=len)
        result = side.player.wait(lambda done, total: None)
        assert result is not None
        return result

    manager = ScriptedManager([0, 0, 0])
    side = side_with(manager)
    side.take(play(side, 1), step=1, phase="train")
    after_step_1 = side.state_dict()
    ahead = play(side, 2)
    assert side.state_dict() == after_step_1, "played, and not used"
    side.take(ahead, step=2, phase="train")
    assert side.state_dict() != after_step_1

    resumed = ScriptedManager([0])
    other = side_with(resumed)
    other.rows.load_state_dict(after_step_1["rows"])
    play(other, 2)
    assert resumed.rows == manager.rows[3:6]
