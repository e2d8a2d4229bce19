"""What rank 0 alone owns: the rows, the fleet and its episodes, and everything that is written about a run."""

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launch import ray_cluster
from megatron_agent.batching import TrainingBatch
from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import checkpoint_folder, fleet_gpus, run_folder
from megatron_agent.console import TrainingDisplay
from megatron_agent.data import Row, RowIterator, load_rows, require_privileged
from megatron_agent.dynamic_sampling import TrainingRounds
from megatron_agent.errors import ConfigError, DataError
from megatron_agent.flows.registry import make_flow
from megatron_agent.metrics import MetricsLogger, cut_jsonl
from megatron_agent.overlap import EpisodePlayer, Play
from megatron_agent.registry import resolve
from megatron_agent.report import write_report
from megatron_agent.rewards import REWARDS
from megatron_agent.rollout_metrics import rollout_metrics
from parallel import checkpoint
from rollout.episodes import RolloutManager, RolloutResult
from rollout.fleet import Fleet
from rollout.recorder import FILE_NAME, TrajectoryRecorder
from rollout.replay import RecordedEpisodes
from rollout.teacher import TeacherFleet
from trajectory.advantages.registry import NEEDS
from trajectory.steps import TrajectoryGroup


@dataclass(kw_only=True)
class RolloutSide:
    """Rank 0's part of a run; none of its methods is collective."""

    config: ExperimentConfig
    fleet: Fleet | None
    """None where recorded episodes are replayed."""
    episodes: RolloutManager | RecordedEpisodes
    teacher: TeacherFleet | None
    """Where the teacher has engines of its own."""
    rows: RowIterator
    eval_rows: list[Row]
    logger: MetricsLogger
    recorder: TrajectoryRecorder
    display: TrainingDisplay
    player: EpisodePlayer
    _play: Play | None = None
    """What the player has to do, or to do again."""
    _rows_before: dict[str, int] | None = None
    """The data position before the rows whose episodes no training step has used yet."""

    def start_training(self, step: int, *, kept: Callable[[Sequence[TrajectoryGroup]], int]) -> None:
        """Begin to play the episodes of a training step; `kept` counts the groups that it would train on."""
        options = self.config.rollout
        self._rows_before = self.rows.state_dict()

        def start_rows(count: int, first_place: int) -> None:
            self.episodes.start(
                self.rows.take(count),
                step=step,
                group_size=options.group_size,
                temperature=options.temperature,
                phase="train",
                with_greedy=NEEDS.get(self.config.algorithm.advantage.name) == "greedy",
                first_place=first_place,
            )

        rounds = TrainingRounds(self.config, self.episodes, start_rows=start_rows, num_kept=kept)
        self._begin(rounds.play)

    def start_evaluation(self, step: int, phase: str) -> None:
        """Begin to play the held-out episodes."""
        options = self.config.eval
        self.episodes.start(
            self.eval_rows[: options.rows],
            step=step,
            group_size=options.samples,
            temperature=options.temperature,
            phase=phase,
        )
        self._begin(self.episodes.run)

    def _begin(self, play: Play) -> None:
        self._play = play
        self.player.start(play)

    def finish_episodes(self, phase: str, *, while_waiting: Callable[[], None]) -> RolloutResult | None:
        """Wait for what was started; None where restarted replicas want weights first, then call it again.

        `while_waiting` is called about once a second.
        """

        def progress(done: int, total: int) -> None:
            if total:  # 0 until the first second is over
                self.display.phase(f"{phase} {done}/{total} episodes")
            while_waiting()

        if not self.player.is_busy:  # the replicas have their weights now
            assert self._play is not None
            self.player.start(self._play)
        return self.player.wait(progress)

    def take(self, result: RolloutResult, *, step: int, phase: str) -> None:
        """Record episodes when their step uses them: the file's lines are in the order of the steps, and an
        interrupted run plays the rows of those that no step has used again."""
        if phase == "train":
            self._rows_before = None
        if self.config.logging.trajectories:
            self.recorder.write(result.groups, step=step, phase=phase)

    def step_metrics(
        self,
        step: int,
        result: RolloutResult,
        batch: TrainingBatch,
        updates: Sequence[Mapping[str, float]],
        critic_updates: Sequence[Mapping[str, float]],
        sync: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> dict[str, float]:
        """The record of one training step: the mean over its updates beside what rollout, packing and sync report."""
        metrics = (
            {"logprob_gap_mean": math.nan}
            | rollout_metrics(result.groups, step=step)
            | batch.metrics
            | dict(sync)
            | dict(seconds)
        )
        everything = [*updates, *critic_updates]
        for name in sorted({name for update in everything for name in update}):
            values = [update[name] for update in everything if name in update]
            metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        # The gap between trainer and fleet is that of the first update: later ones train other weights.
        metrics |= {name: value for name, value in (updates[0] if updates else {}).items() if "logprob_gap" in name}
        # What this step did not wait for: the time that its episodes were played while the step before was trained.
        hidden_s = max(0.0, result.seconds - seconds["rollout_s"]) if self.config.rollout.overlap else 0.0
        # Before prefix sharing: what is saved is not trained slower.
        trained = batch.metrics.get("sample_tokens", 0.0) * len(updates) / max(1, len(batch.minibatches))
        metrics |= {
            "num_updates": float(len(updates)),
            "episode_retries": float(result.num_retries),
            "rollout_hidden_s": hidden_s,
            "rollout_tokens_per_s": metrics["response_tokens"] / max(1e-9, seconds["rollout_s"] + hidden_s),
            "train_tokens_per_s": trained / max(1e-9, seconds["logprobs_s"] + seconds["update_s"]),
        }
        return metrics

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write one record and show it."""
        self.logger.log(metrics, step=step)
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        if "return_mean" in metrics:
            self.display.step(metrics, step=step)
        if "eval_return_mean" in evaluated:
            self.display.message(
                f"{step:6d}  evaluation: return {evaluated['eval_return_mean']:.3f}, "
                f"success {evaluated['eval_success_rate']:.0%} of {evaluated['eval_episodes']:.0f} episodes"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of rank 0."""
        return {"rows": self._rows_before or self.rows.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of `state`: data position, and files without what came later."""
        self.rows.load_state_dict(state["rows"])
        self.forget_after(state["step"])
        self.display.resume(state["step"])

    def forget_after(self, step: int) -> None:
        """Cut what was written about later steps, by a run that was interrupted; -1 begins anew."""
        self.logger.cut_after(step)
        cut_jsonl(self.recorder.path, step)

    def write_report(self) -> None:
        """Write report.html, where configured, and say where it is."""
        if self.config.logging.report:
            path = write_report(run_folder(self.config), num_episodes=self.config.run.report_episodes)
            self.display.message(f"report: {path}")


def _load_rows(
    config: ExperimentConfig, source: str, arguments: Mapping[str, Any], *, privileged: str | None = None
) -> list[Row]:
    """The rows, whose flows and rewards exist, and what the critic sees of them (`privileged` names it): found here,
    before a fleet has started for them."""
    rows = load_rows(source, arguments)
    if privileged is not None:
        for row in rows:
            require_privileged(row, privileged, where=f"{source} row {row.index}")
    try:
        for flow in {row.agent_name for row in rows if row.agent_name}:
            make_flow(flow)
        styles = {row.reward_style for row in rows if row.reward_style and row.ground_truth is not None}
        for style in styles if config.agent.reward is None else ():
            resolve("reward_model.style", style, REWARDS)
    except ConfigError as error:
        raise DataError(f"{source}: {error}; agent.reward, where it is set, scores all rows") from error
    return rows


def _connect_ray(config: ExperimentConfig, stack: ExitStack) -> None:
    ray_cluster.connect(
        config.cluster.ray_address,
        num_cpus=os.cpu_count() or 1,
        timeout_s=config.rollout.start_timeout_s,
        num_nodes=max(1, config.cluster.rollout_nodes),
        gpu_ids=fleet_gpus(config),
    )
    stack.callback(ray_cluster.disconnect)


def _start_teacher(config: ExperimentConfig, stack: ExitStack) -> TeacherFleet:
    teacher = TeacherFleet(config)
    stack.callback(teacher.shutdown)
    teacher.start()
    return teacher


def _start_fleet(config: ExperimentConfig, stack: ExitStack) -> Fleet:
    resumed_from = checkpoint.latest(checkpoint_folder(config))
    fleet = Fleet(config, start_name=resumed_from.name if resumed_from else "")
    stack.callback(fleet.shutdown)
    fleet.start()
    return fleet


def _lock(folder: Path) -> IO[str]:
    """Claim the run's folder until the file is closed, as it is when this process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"{folder} is being written by another process; wait for it, end it, or choose another run.name"
        ) from error
    return file


@contextmanager
def open_rollout_side(config: ExperimentConfig, *, for_training: bool = True) -> Iterator[RolloutSide]:
    """Load the rows, join or start Ray, start fleet and runners; end all of it afterwards.

    What is not `for_training` may run beside a training run: its episodes go to a file of their own.
    """
    critic = config.algorithm.critic
    rows = _load_rows(
        config, config.data.train, config.data.train_args, privileged=critic.privileged if critic else None
    )
    eval_rows = _load_rows(config, config.data.eval, config.data.eval_args) if config.data.eval else []
    folder = run_folder(config)
    with ExitStack() as stack:
        if for_training:
            stack.enter_context(_lock(folder))
        display = TrainingDisplay(config.run.steps)
        stack.callback(display.close)
        logger = MetricsLogger(folder, config.logging, run_name=config.run.name)
        stack.callback(logger.close)
        teacher = config.algorithm.teacher if for_training else None
        has_engines = teacher is not None and teacher.replicas > 0
        if has_engines or not config.rollout.replay:
            _connect_ray(config, stack)
        if config.rollout.replay:
            fleet, episodes = None, RecordedEpisodes(config.rollout.replay)
        else:
            display.phase("starting the fleet")
            fleet = _start_fleet(config, stack)
            episodes = RolloutManager(config, fleet)
        stack.callback(episodes.shutdown)
        player = EpisodePlayer()
        stack.callback(player.close)  # before the runners end: their death would have it start others
        if has_engines:
            display.phase("starting the teacher")
        yield RolloutSide(
            config=config,
            fleet=fleet,
            episodes=episodes,
            teacher=_start_teacher(config, stack) if has_engines else None,
            rows=RowIterator(rows, seed=config.run.seed, shuffle=config.data.shuffle),
            eval_rows=eval_rows,
            logger=logger,
            recorder=TrajectoryRecorder(folder, FILE_NAME if for_training else "evaluations.jsonl"),
            display=display,
            player=player,
        )
