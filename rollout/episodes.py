"""Has episodes played: hundreds at once, on actors that each play many.

    RolloutManager (rank 0) --take(requests)----> EpisodeRunner actors --ids, over TCP--> replicas (FleetClient)
            ^                                       |  one task per episode
            +------ finished(): waits for the next ones, takes all there are

The manager waits for whichever runner has something, and starts the next episode as one ends: nobody waits for a whole
round. An episode whose replica died is handed back and run again; when no replica has weights, `run` returns and the
loop syncs before it goes on.
"""

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatron_agent.config import ExperimentConfig
from megatron_agent.data import Row
from megatron_agent.errors import FleetError, MegatronAgentError
from rollout.dispatch import EpisodeRequest, ReplicaQueues
from rollout.episode_runner import EpisodeRunner
from rollout.fleet import Fleet, last_line
from trajectory.steps import Trajectory, TrajectoryGroup, TrajectoryStatus

POLL_S = 1.0
"""How often `progress` is called where nothing happens."""
LONG_POLL_S = 30.0
"""How long a runner keeps the question for finished episodes before it answers that there are none."""
SILENT_S = 300.0
"""A runner that answers nothing for so long beyond that is stuck."""
MAX_CALLS = 16
"""Ray calls that a runner takes at once; episodes are not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The groups of one collection, in the order of the rows, and what it took."""

    groups: list[TrajectoryGroup]
    seconds: float
    num_retries: int


class RolloutManager:
    """Rank 0's side: turns rows into trajectory groups on the runners. Not thread-safe."""

    def __init__(self, config: ExperimentConfig, fleet: Fleet) -> None:
        """Starts the runners; raises FleetError where they are not up within rollout.start_timeout_s."""
        self._config = config
        self._fleet = fleet
        self._runners: list[Any] = [None] * config.rollout.runners
        self._playing: list[dict[str, EpisodeRequest]] = [{} for _ in self._runners]
        self._asked: dict[Any, tuple[int, float]] = {}
        """Calls of `finished` that are not answered -> (runner, when it was asked)."""
        self._handed: dict[Any, int] = {}
        """Calls of `take` that have not returned -> runner."""
        self._start_runners(range(config.rollout.runners))
        self._waiting = ReplicaQueues(config.rollout.replicas)
        self._finished: dict[str, Trajectory] = {}
        self._order: list[tuple[str, list[str], str | None]] = []
        self._started = 0.0
        self._num_retries = 0

    def _start_runners(self, numbers: Iterable[int]) -> None:
        options = self._config.rollout
        actor = ray.remote(EpisodeRunner).options(num_cpus=0, max_concurrency=MAX_CALLS)
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
        self._finished, self._order, self._num_retries = {}, [], 0
        self._waiting.clear()
        self._started = time.monotonic()
        for place, row in enumerate(rows, start=first_place):
            group_id = f"{phase}-{step}-{place}-row{row.index}"
            ids = [f"{group_id}-{sample}" for sample in range(group_size)]
            greedy = f"{group_id}-greedy" if with_greedy else None
            self._order.append((group_id, ids, greedy))
            played = [(key, temperature) for key in ids] + ([(greedy, 0.0)] if greedy else [])
            self._waiting.add(
                EpisodeRequest(row=row, group_id=group_id, trajectory_id=key, temperature=own) for key, own in played
            )

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> RolloutResult | None:
        """Play what is queued. None where replicas were restarted and want the weights first: sync, then run again.

        Raises FleetError where an episode lost its replica more than rollout.max_episode_retries times, or more than
        rollout.max_failed_frac of the episodes failed in environment code.
        """
        total = len(self._waiting) + len(self._finished)
        lost: list[EpisodeRequest] = []
        dead: set[int] = set()
        while self._waiting or any(self._playing):
            if not lost:
                self._dispatch()
            if not any(self._playing):
                break
            for runner, ended in self._await_some():
                playing = self._playing[runner]
                if ended is None:  # the runner died, out of memory, say: what it played is played again by another one
                    dead.add(runner)
                    ended = [(trajectory_id, None) for trajectory_id in playing]
                for trajectory_id, packed in ended:
                    request = playing.pop(trajectory_id)
                    assert request.replica is not None
                    self._waiting.finished(request.replica)
                    if packed is None:
                        lost.append(request)
                    else:
                        self._finished[trajectory_id] = pickle.loads(packed)
            progress(len(self._finished), total)
        if lost:
            self._requeue(lost)
            self._start_runners(dead)
            self._fleet.ensure_healthy()
            return None if self._fleet.needs_weights else self.run(progress)
        return self._result()

    def _dispatch(self) -> None:
        """Start as many of the waiting episodes as may be in flight, each on the runner that plays the fewest."""
        room = self._config.rollout.max_concurrent_episodes - sum(len(playing) for playing in self._playing)
        batches: dict[int, list[EpisodeRequest]] = {}
        for _ in range(min(room, len(self._waiting))):
            waiting, replica = self._waiting.pop()
            request = replace(waiting, replica=replica)
            runner = min(range(len(self._runners)), key=lambda number: len(self._playing[number]))
            self._playing[runner][request.trajectory_id] = request
            batches.setdefault(runner, []).append(request)
        for runner, requests in batches.items():
            self._handed[self._runners[runner].take.remote(requests)] = runner

    def _await_some(self) -> list[tuple[int, list[tuple[str, bytes | None]] | None]]:
        """(runner, what it finished) of the runners that answer within POLL_S; None in place of a dead one's."""
        asked = {runner for runner, _ in self._asked.values()}
        for runner, playing in enumerate(self._playing):
            if playing and runner not in asked:
                self._asked[self._runners[runner].finished.remote(LONG_POLL_S)] = (runner, time.monotonic())
        ray.wait(list(self._asked), num_returns=1, timeout=POLL_S)
        calls = [*self._asked, *self._handed]  # whatever is ready; a `take` that fails leaves `finished` without answer
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        ended: list[tuple[int, list[tuple[str, bytes | None]] | None]] = []
        dead: set[int] = set()
        for reference in ready:
            asked_of, _ = self._asked.pop(reference, (None, 0.0))
            runner = self._handed.pop(reference) if asked_of is None else asked_of
            try:
                answer = ray.get(reference)
            except RayTaskError as error:
                if isinstance(error.cause, MegatronAgentError):  # without the runner's traceback around it
                    raise error.cause from None
                raise
            except RayActorError:
                dead.add(runner)
            else:
                if asked_of is not None:
                    ended.append((runner, answer))
        if dead:  # its other calls fail, too, maybe only when another runner has its number
            self._asked = {call: asked for call, asked in self._asked.items() if asked[0] not in dead}
            self._handed = {call: runner for call, runner in self._handed.items() if runner not in dead}
        ended += [(runner, None) for runner in sorted(dead)]
        for runner, since in self._asked.values():
            if time.monotonic() - since > LONG_POLL_S + SILENT_S:
                raise FleetError(
                    f"episode runner {runner} has not answered for {LONG_POLL_S + SILENT_S:g} s with "
                    f"{len(self._playing[runner])} episodes; environment code that holds Python's lock stops it: move "
                    "that into a process of its own, or raise rollout.runners"
                )
        return ended

    def _requeue(self, lost: list[EpisodeRequest]) -> None:
        self._num_retries += len(lost)
        limit = self._config.rollout.max_episode_retries
        for request in lost:
            if request.attempt >= limit:
                raise FleetError(
                    f"episode {request.trajectory_id} lost its replica or runner {request.attempt + 1} times "
                    f"(rollout.max_episode_retries={limit}); see the logs in the run folder"
                )
        lost = sorted(lost, key=lambda request: request.group_id)
        self._waiting.add(replace(request, attempt=request.attempt + 1) for request in lost)

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
