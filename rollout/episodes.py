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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray

from megatron_agent.config import ExperimentConfig
from megatron_agent.data import Row
from megatron_agent.errors import FleetError, MegatronAgentError
from megatron_agent.flows.base import EpisodeEnd, FlowContext
from megatron_agent.flows.registry import make_flow
from megatron_agent.rewards import score
from megatron_agent.tools.formats import get_tool_format
from rollout.chat_renderer import TemplateRenderer
from rollout.fleet import Fleet, FleetClient, ReplicaDiedError
from trajectory.steps import Step, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus

THREADS_PER_RUNNER = 64
"""Synchronous environment code runs on these; a hanging call keeps its thread until it returns."""
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
    """Ray actor that plays episodes concurrently; holds tokenizer, template and threads for synchronous code."""

    def __init__(self, config: ExperimentConfig, client: FleetClient) -> None:
        self._config = config
        self._client = client
        self._renderer = TemplateRenderer(config.model.path, get_tool_format(config.agent.tool_format))
        self._threads = ThreadPoolExecutor(THREADS_PER_RUNNER, thread_name_prefix="environment")

    async def ready(self) -> bool:
        """True once constructed."""
        return True

    async def play(self, request: EpisodeRequest) -> Trajectory | None:
        """One episode's trajectory; None where its replica died and it has to be played again."""
        loop = asyncio.get_running_loop()
        context = FlowContext(
            generate=self._client,
            renderer=self._renderer,
            agent=self._config.agent,
            limits=self._config.rollout,
            temperature=request.temperature,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            run_sync=lambda function: loop.run_in_executor(self._threads, function),
        )
        flow = make_flow(request.row.agent_name or self._config.agent.flow)
        started = time.monotonic()
        try:
            trajectory = await self._play(flow, request, context)
        except ReplicaDiedError:
            return None
        finally:
            self._client.forget(request.trajectory_id)
        trajectory.timings["total_s"] = time.monotonic() - started
        return trajectory

    async def _play(self, flow: Any, request: EpisodeRequest, context: FlowContext) -> Trajectory:
        """The boundary where failures of user code become data."""
        row = request.row
        try:
            async with asyncio.timeout(self._config.rollout.episode_timeout_s) as deadline:
                end: EpisodeEnd = await flow.run(row, context)
            end = await self._score(end, row, context.steps)
        except TimeoutError as error:
            if not deadline.expired():
                return _trajectory(
                    request, context, status=TrajectoryStatus.ENV_FAILED, error=_describe(error, context)
                )
            steps = _cut(context.steps)
            return _trajectory(
                request, context, status=TrajectoryStatus.TRUNCATED, error="episode time-out", steps=steps
            )
        except MegatronAgentError:
            raise
        except Exception as error:  # whatever user code raises costs this episode only
            return _trajectory(request, context, status=TrajectoryStatus.ENV_FAILED, error=_describe(error, context))
        truncated = bool(context.steps) and context.steps[-1].truncated
        status = TrajectoryStatus.TRUNCATED if truncated else TrajectoryStatus.OK
        return _trajectory(request, context, status=status, end=end)

    async def _score(self, end: EpisodeEnd, row: Row, steps: Sequence[Step]) -> EpisodeEnd:
        reward = self._config.agent.reward or (row.reward_style if row.ground_truth is not None else None)
        if reward is None:
            return end
        outcome, parts = await score(reward, [step.response_text for step in steps], row)
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
        options = config.rollout
        per_runner = -(-options.max_concurrent_episodes // options.runners)
        actor = ray.remote(EpisodeRunner).options(num_cpus=0, max_concurrency=per_runner + 1)
        self._runners: list[Any] = [actor.remote(config, fleet.client()) for _ in range(options.runners)]
        try:
            ray.get([runner.ready.remote() for runner in self._runners], timeout=options.start_timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise FleetError(
                f"the {options.runners} episode runners were not up after {options.start_timeout_s:g} s; "
                "raise rollout.start_timeout_s or lower rollout.runners"
            ) from error
        self._waiting: list[EpisodeRequest] = []
        self._finished: dict[str, Trajectory] = {}
        self._order: list[tuple[str, list[str]]] = []
        self._started = 0.0
        self._num_retries = 0

    def start(
        self, rows: Sequence[Row], *, step: int, group_size: int, temperature: float, phase: str = "train"
    ) -> None:
        """Queue `group_size` episodes of every row; `run` plays them."""
        self._waiting, self._finished, self._order, self._num_retries = [], {}, [], 0
        self._started = time.monotonic()
        for place, row in enumerate(rows):
            group_id = f"{phase}-{step}-{place}-row{row.index}"
            ids = [f"{group_id}-{sample}" for sample in range(group_size)]
            self._order.append((group_id, ids))
            self._waiting += [
                EpisodeRequest(
                    row=row,
                    group_id=group_id,
                    trajectory_id=trajectory_id,
                    temperature=temperature,
                )
                for trajectory_id in ids
            ]

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> RolloutResult | None:
        """Play what is queued. None where replicas were restarted and want the weights first: sync, then run again.

        Raises FleetError where an episode lost its replica more than rollout.max_episode_retries times, or more than
        rollout.max_failed_frac of the episodes failed in environment code.
        """
        total = len(self._waiting) + len(self._finished)
        in_flight: dict[Any, EpisodeRequest] = {}
        lost: list[EpisodeRequest] = []
        turn = 0
        while self._waiting or in_flight:
            while self._waiting and not lost and len(in_flight) < self._config.rollout.max_concurrent_episodes:
                request = self._waiting.pop(0)
                in_flight[self._runners[turn % len(self._runners)].play.remote(request)] = request
                turn += 1
            if not in_flight:
                break
            done, _ = ray.wait(list(in_flight), num_returns=1, timeout=POLL_S)
            if done:  # take along whatever else is ready
                done, _ = ray.wait(list(in_flight), num_returns=len(in_flight), timeout=0)
            for reference in done:
                request = in_flight.pop(reference)
                trajectory = ray.get(reference)
                if trajectory is None:
                    lost.append(request)
                else:
                    self._finished[request.trajectory_id] = trajectory
            progress(len(self._finished), total)
        if lost:
            self._requeue(lost)
            self._fleet.ensure_healthy()
            return None if self._fleet.needs_weights else self.run(progress)
        return self._result()

    def _requeue(self, lost: list[EpisodeRequest]) -> None:
        self._num_retries += len(lost)
        limit = self._config.rollout.max_episode_retries
        for request in lost:
            if request.attempt >= limit:
                raise FleetError(
                    f"episode {request.trajectory_id} lost its replica {request.attempt + 1} times "
                    f"(rollout.max_episode_retries={limit}); see the engine logs in the run folder"
                )
        self._waiting += [replace(request, attempt=request.attempt + 1) for request in lost]

    def _result(self) -> RolloutResult:
        groups = [
            TrajectoryGroup(group_id=group_id, trajectories=tuple(self._finished[key] for key in ids))
            for group_id, ids in self._order
        ]
        failed = [t for t in self._finished.values() if t.status is TrajectoryStatus.ENV_FAILED]
        if len(failed) > self._config.rollout.max_failed_frac * len(self._finished):
            errors = [t.error or "" for t in failed]
            common = max(set(errors), key=errors.count)
            raise FleetError(
                f"{len(failed)} of {len(self._finished)} episodes failed in environment, tool or reward code, more than "
                f"rollout.max_failed_frac={self._config.rollout.max_failed_frac}; the most common error: {common}"
            )
        return RolloutResult(groups=groups, seconds=time.monotonic() - self._started, num_retries=self._num_retries)

    def shutdown(self) -> None:
        """End the runners."""
        for runner in self._runners:
            ray.kill(runner)


def _trajectory(
    request: EpisodeRequest,
    context: FlowContext,
    *,
    status: TrajectoryStatus,
    error: str | None = None,
    steps: list[Step] | None = None,
    end: EpisodeEnd | None = None,
) -> Trajectory:
    end = end or EpisodeEnd()
    return Trajectory(
        trajectory_id=request.trajectory_id,
        group_id=request.group_id,
        steps=tuple(context.steps if steps is None else steps),
        outcome_reward=end.outcome_reward,
        reward_parts=end.reward_parts,
        status=status,
        success=end.success,
        error=error,
        data_source=request.row.data_source,
        row_index=request.row.index,
        timings=context.timings,
    )


def _describe(error: Exception, context: FlowContext) -> str:
    return f"step {len(context.steps) + 1}: {type(error).__name__}: {error}"


def _cut(steps: Sequence[Step]) -> list[Step]:
    """The steps of an episode that ran out of time: its last one is truncated."""
    if not steps or steps[-1].terminated or steps[-1].truncated:
        return list(steps)
    return [*steps[:-1], replace(steps[-1], truncated=True, stop_reason=StopReason.TIME_LIMIT)]
