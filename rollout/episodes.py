"""Plays episodes: hundreds at once, each with its time-outs, none able to harm another.

    RolloutManager (rank 0) --requests--> EpisodeRunner actors --ids--> replicas (FleetClient)
            ^                                   |
            +------ finished trajectories ------+

A runner plays its requests concurrently. An episode whose replica died is handed back and run again; when no replica
has weights, `collect` hands out what it has and the loop syncs before it goes on. What environments, tools and rewards
raise ends in the trajectory; nothing else is caught.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatron_agent.config import ExperimentConfig
from megatron_agent.data import Row
from megatron_agent.errors import FleetError, MegatronAgentError
from megatron_agent.flows.base import AgentFlowBase, EpisodeEnd, FlowContext
from megatron_agent.flows.registry import make_flow
from megatron_agent.rewards import score
from megatron_agent.tools.formats import get_tool_format
from megatron_agent.worker_thread import WorkerThread
from rollout.chat_renderer import TemplateRenderer
from rollout.fleet import Fleet, FleetClient, ReplicaDiedError, last_line
from trajectory.steps import Step, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus

POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to play."""

    row: Row
    group_id: str
    trajectory_id: str
    temperature: float
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The groups of one collection, in the order of the rows, and what it took."""

    groups: list[TrajectoryGroup]
    seconds: float
    num_retries: int


class EpisodeRunner:
    """Ray actor that plays episodes concurrently; each one's synchronous code has a thread of its own."""

    def __init__(self, config: ExperimentConfig, client: FleetClient) -> None:
        self._config = config
        self._client = client
        self._renderer = TemplateRenderer(config.model.path, get_tool_format(config.agent.tool_format))

    async def ready(self) -> bool:
        """True once constructed."""
        return True

    async def play(self, request: EpisodeRequest) -> Trajectory | None:
        """One episode's trajectory; None where its replica died and it has to be played again."""
        thread = WorkerThread()
        context = FlowContext(
            generate=self._client,
            renderer=self._renderer,
            agent=self._config.agent,
            limits=self._config.rollout,
            temperature=request.temperature,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            run_sync=thread.submit,
        )
        flow = make_flow(request.row.agent_name or self._config.agent.flow)
        started = time.monotonic()
        try:
            trajectory = await self._play(flow, request, context)
        except ReplicaDiedError:
            return None
        finally:
            thread.stop()
            self._client.forget(request.trajectory_id)
        trajectory.timings["total_s"] = time.monotonic() - started
        return replace(trajectory, privileged_ids=self._privileged_ids(request.row))

    def _privileged_ids(self, row: Row) -> np.ndarray | None:
        """What only the critic sees of the row. It is encoded after the episode, whose context never held it."""
        critic = self._config.algorithm.critic
        text = row.privileged_text(critic.privileged) if critic and critic.privileged is not None else None
        return None if text is None else np.asarray(self._renderer.encode_line(text), dtype=np.int32)

    async def _play(self, flow: AgentFlowBase, request: EpisodeRequest, context: FlowContext) -> Trajectory:
        """The boundary where failures of user code become data."""
        end, error, played = EpisodeEnd(), None, False
        try:
            try:
                async with asyncio.timeout(self._config.rollout.episode_timeout_s) as deadline:
                    end = await flow.run(request.row, context)
            except TimeoutError:
                if not deadline.expired():
                    raise
                error = "episode time-out"
                _cut(context.steps, StopReason.TIME_LIMIT)
            played = True
            end = await self._score(end, request.row, context)
        except (MegatronAgentError, ReplicaDiedError):
            raise
        except Exception as failure:  # whatever user code raises costs this episode only
            where = "reward" if played else f"step {len(context.steps) + 1}"
            _cut(context.steps, StopReason.ENV_FAILED)
            return _trajectory(
                request,
                context,
                EpisodeEnd(),
                TrajectoryStatus.ENV_FAILED,
                f"{where}: {type(failure).__name__}: {failure}",
            )
        truncated = context.steps[-1].truncated if context.steps else error is not None
        status = TrajectoryStatus.TRUNCATED if truncated else TrajectoryStatus.OK
        return _trajectory(request, context, end, status, error)

    async def _score(self, end: EpisodeEnd, row: Row, context: FlowContext) -> EpisodeEnd:
        reward = self._config.agent.reward or (row.reward_style if row.ground_truth is not None else None)
        if reward is None or not context.steps:
            return end
        replies = [step.response_text for step in context.steps]
        outcome, parts = await score(reward, replies, row, call=partial(context.call, phase="reward_s"))
        success = bool(parts["success"]) if "success" in parts else outcome > 0
        return EpisodeEnd(
            success=end.success if end.success is not None else success,
            outcome_reward=end.outcome_reward + outcome,
            reward_parts={**end.reward_parts, **parts},
        )


class RolloutManager:
    """Rank 0's side: turns rows into trajectory groups on the runners. Not thread-safe."""

    def __init__(self, config: ExperimentConfig, fleet: Fleet) -> None:
        """Starts the runners; raises FleetError where they are not up within rollout.start_timeout_s."""
        self._config = config
        self._fleet = fleet
        self._runners: list[Any] = [None] * config.rollout.runners
        self._start_runners(range(config.rollout.runners))
        self._waiting: list[EpisodeRequest] = []
        self._finished: dict[str, Trajectory] = {}
        self._order: list[tuple[str, list[str], str | None]] = []
        self._started = 0.0
        self._num_retries = 0

    def _start_runners(self, numbers: Iterable[int]) -> None:
        options = self._config.rollout
        per_runner = -(-options.max_concurrent_episodes // options.runners)
        actor = ray.remote(EpisodeRunner).options(num_cpus=0, max_concurrency=per_runner + 1)
        for number in numbers:
            self._runners[number] = actor.remote(self._config, self._fleet.client())
        try:
            ray.get([runner.ready.remote() for runner in self._runners], timeout=options.start_timeout_s)
        except GetTimeoutError as error:
            raise FleetError(
                f"the {options.runners} episode runners were not up after {options.start_timeout_s:g} s; "
                "raise rollout.start_timeout_s or lower rollout.runners"
            ) from error
        except RayActorError as error:
            raise FleetError(f"an episode runner could not start: {last_line(error)}") from error

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
        """Queue `group_size` episodes of every row; `run` plays them.

        `with_greedy` adds one episode of each row without sampling, the group's `greedy`. `first_place` is the number
        of rows that were started for the same step and phase before.
        """
        self._waiting, self._finished, self._order, self._num_retries = [], {}, [], 0
        self._started = time.monotonic()
        for place, row in enumerate(rows, start=first_place):
            group_id = f"{phase}-{step}-{place}-row{row.index}"
            ids = [f"{group_id}-{sample}" for sample in range(group_size)]
            greedy = f"{group_id}-greedy" if with_greedy else None
            self._order.append((group_id, ids, greedy))
            played = [(key, temperature) for key in ids] + ([(greedy, 0.0)] if greedy else [])
            self._waiting += [
                EpisodeRequest(row=row, group_id=group_id, trajectory_id=key, temperature=own) for key, own in played
            ]

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> RolloutResult | None:
        """Play what is queued. None where replicas were restarted and want the weights first: sync, then run again.

        Raises FleetError where an episode lost its replica more than rollout.max_episode_retries times, or more than
        rollout.max_failed_frac of the episodes failed in environment code.
        """
        total = len(self._waiting) + len(self._finished)
        in_flight: dict[Any, tuple[int, EpisodeRequest]] = {}
        lost: list[EpisodeRequest] = []
        dead_runners: set[int] = set()
        turn = 0
        while self._waiting or in_flight:
            while self._waiting and not lost and len(in_flight) < self._config.rollout.max_concurrent_episodes:
                request, runner = self._waiting.pop(0), turn % len(self._runners)
                in_flight[self._runners[runner].play.remote(request)] = (runner, request)
                turn += 1
            if not in_flight:
                break
            done, _ = ray.wait(list(in_flight), num_returns=1, timeout=POLL_S)
            if done:  # take along whatever else is ready
                done, _ = ray.wait(list(in_flight), num_returns=len(in_flight), timeout=0)
            for reference in done:
                runner, request = in_flight.pop(reference)
                try:
                    trajectory = ray.get(reference)
                except RayTaskError as error:
                    if isinstance(error.cause, MegatronAgentError):  # without the runner's traceback around it
                        raise error.cause from None
                    raise
                except RayActorError:  # out of memory, say: what it played is played again by another one
                    dead_runners.add(runner)
                    trajectory = None
                if trajectory is None:
                    lost.append(request)
                else:
                    self._finished[request.trajectory_id] = trajectory
            progress(len(self._finished), total)
        if lost:
            self._requeue(lost)
            self._start_runners(dead_runners)
            self._fleet.ensure_healthy()
            return None if self._fleet.needs_weights else self.run(progress)
        return self._result()

    def _requeue(self, lost: list[EpisodeRequest]) -> None:
        self._num_retries += len(lost)
        limit = self._config.rollout.max_episode_retries
        for request in lost:
            if request.attempt >= limit:
                raise FleetError(
                    f"episode {request.trajectory_id} lost its replica or runner {request.attempt + 1} times "
                    f"(rollout.max_episode_retries={limit}); see the logs in the run folder"
                )
        self._waiting += [replace(request, attempt=request.attempt + 1) for request in lost]

    def _result(self) -> RolloutResult:
        groups = [
            TrajectoryGroup(
                group_id=group_id,
                trajectories=tuple(self._finished[key] for key in ids),
                greedy=self._finished[greedy] if greedy else None,
            )
            for group_id, ids, greedy in self._order
        ]
        failed = [t for t in self._finished.values() if t.status is TrajectoryStatus.ENV_FAILED]
        if len(failed) > self._config.rollout.max_failed_frac * len(self._finished):
            errors = [t.error or "" for t in failed]
            common = max(set(errors), key=errors.count)
            raise FleetError(
                f"{len(failed)} of {len(self._finished)} episodes failed in environment, tool or reward code, more "
                f"than rollout.max_failed_frac={self._config.rollout.max_failed_frac}; the most common error: {common}"
            )
        return RolloutResult(groups=groups, seconds=time.monotonic() - self._started, num_retries=self._num_retries)

    def shutdown(self) -> None:
        """End the runners."""
        for runner in self._runners:
            ray.kill(runner)


def _trajectory(
    request: EpisodeRequest, context: FlowContext, end: EpisodeEnd, status: TrajectoryStatus, error: str | None
) -> Trajectory:
    return Trajectory(
        trajectory_id=request.trajectory_id,
        group_id=request.group_id,
        steps=tuple(context.steps),
        outcome_reward=end.outcome_reward,
        reward_parts=end.reward_parts,
        status=status,
        success=end.success,
        error=error,
        data_source=request.row.data_source,
        row_index=request.row.index,
        timings=context.timings,
    )


def _cut(steps: list[Step], reason: StopReason) -> None:
    """Note on the last step why no other followed; a step that ended the episode itself keeps its own reason."""
    if steps and steps[-1].stop_reason is StopReason.NONE:
        last = steps[-1]
        steps[-1] = replace(
            last, truncated=reason.is_truncation, stop_reason=reason, next_observation=list(last.feedback)
        )
