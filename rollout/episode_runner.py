"""Plays episodes: many at once, each with its time-outs, none able to harm another.

    take(requests) --> one task per episode: the flow --> replicas (FleetClient), environments in threads
    finished()     <-- what has ended

What environments, tools and rewards raise ends in the trajectory; nothing else is caught.
"""

import asyncio
import contextlib
import pickle
import time
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_agent.config import ExperimentConfig
from megatron_agent.data import Row
from megatron_agent.errors import DataError, MegatronAgentError
from megatron_agent.flows.base import AgentFlowBase, EpisodeEnd, FlowContext
from megatron_agent.flows.registry import make_flow
from megatron_agent.rewards import score
from megatron_agent.tools.formats import get_tool_format
from megatron_agent.worker_thread import WorkerThread
from rollout.chat_renderer import TemplateRenderer
from rollout.client import FleetClient, ReplicaDiedError
from rollout.dispatch import EpisodeRequest
from trajectory.steps import Step, StopReason, Trajectory, TrajectoryStatus


class EpisodeRunner:
    """Ray actor that plays episodes concurrently; each one's synchronous code has a thread of its own."""

    def __init__(self, config: ExperimentConfig, client: FleetClient) -> None:
        self._config = config
        self._client = client
        self._renderer = TemplateRenderer(config.model.path, get_tool_format(config.agent.tool_format))
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[str, bytes | None]] = []
        self._failure: BaseException | None = None
        self._something_ended = asyncio.Event()

    async def ready(self) -> bool:
        """True once constructed."""
        return True

    async def take(self, requests: list[EpisodeRequest]) -> None:
        """Start to play these; `finished` gives what became of them."""
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._play_and_keep(request))
            self._tasks.add(task)  # the loop itself holds no reference
            task.add_done_callback(self._tasks.discard)

    async def finished(self, timeout_s: float) -> list[tuple[str, bytes | None]]:
        """(id, pickled trajectory) of all that ended since the last call, None in place of those to be played again.

        Waits up to `timeout_s` for the first. Raises what ended the run of an episode and is not the episode's own.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._something_ended.wait(), timeout_s)
        self._something_ended.clear()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        ended, self._ended = self._ended, []
        return ended

    async def _play_and_keep(self, request: EpisodeRequest) -> None:
        try:
            trajectory = await self.play(request)
            # Here, and not by Ray, whose pickler of Python code takes ten times as long for many small arrays.
            self._ended.append((request.trajectory_id, None if trajectory is None else _packed(trajectory)))
        except BaseException as failure:  # whatever it is, the manager has to hear of it
            self._failure = failure
        self._something_ended.set()

    async def play(self, request: EpisodeRequest) -> Trajectory | None:
        """One episode's trajectory; None where its replica died and it has to be played again."""
        thread = WorkerThread()
        if request.replica is not None:
            self._client.place(request.trajectory_id, request.replica)
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


def _packed(trajectory: Trajectory) -> bytes:
    try:
        return pickle.dumps(trajectory, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"episode {trajectory.trajectory_id} cannot leave its runner: {error}; let environments and tools put only "
            "numbers, text and arrays into messages, rewards and `info`"
        ) from error


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
