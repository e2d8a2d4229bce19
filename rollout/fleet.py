"""The fleet: replicas, their health, and the weights' way in.

    FleetClient     (in every runner) --requests over TCP--> replica 0..N-1 (ReplicaEngine actors)
    Fleet           (rank 0)          --start, version-----> each replica; waits, with time-outs, for Ray's answers
    FleetSyncClient (rank 0)          --begin, buckets, commit--> all replicas at once

Replicas are Ray actors with fixed names, so a client finds a restarted one under the name of the dead one. A restarted
replica refuses to serve until the next `commit`: `needs_weights` says that it waits.
"""

import time
import uuid
import zlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import log_folder, runs_on_gpus, sync_backend
from megatron_agent.errors import FleetError, WeightSyncError
from rollout.client import FleetClient
from rollout.engine import NO_WEIGHTS, ReplicaEngine

HEALTH_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 5.0
MAX_CALLS = 64
"""Ray calls that a replica takes at once: rank 0's, and each runner's question for its endpoint."""


class Fleet:
    """Owns the replicas. Used by rank 0 only; Ray must be connected."""

    def __init__(self, config: ExperimentConfig, *, start_name: str = "") -> None:
        """`start_name` tells the starts of one run apart, so that a resumed fleet does not sample as the first did."""
        if not ray.is_initialized():
            raise FleetError("Ray is not connected; call launch.ray_cluster.connect first")
        self._config = config
        self._on_cpu = not runs_on_gpus(config)
        self._backend = sync_backend(config)
        run = uuid.uuid4().hex[:8]
        self._names = [f"replica-{index}-{run}" for index in range(config.rollout.replicas)]
        self._actors: dict[str, Any] = {}
        self._start_name = start_name
        self._num_starts = 0

    def start(self) -> None:
        """Start all replicas; raises FleetError where they are not up within rollout.start_timeout_s."""
        for name in self._names:
            self._actors[name] = self._start_one(name)
        self._await_started(self._names)

    def _start_one(self, name: str) -> Any:
        index = self._names.index(name)
        log_path = log_folder(self._config) / f"replica-{index}.log"
        self._num_starts += 1
        seed = zlib.crc32(f"{self._config.run.seed}/{self._start_name}/{self._num_starts}".encode())
        gpus = 0 if self._on_cpu else self._config.rollout.tensor_parallel
        actor = ray.remote(ReplicaEngine).options(name=name, num_cpus=0, num_gpus=gpus, max_concurrency=MAX_CALLS)
        return actor.remote(
            self._config, seed=seed, on_cpu=self._on_cpu, backend=self._backend, log_path=str(log_path.absolute())
        )

    def _await_started(self, names: Sequence[str]) -> None:
        timeout_s = self._config.rollout.start_timeout_s
        folder = log_folder(self._config)
        try:
            ray.get([self._actors[name].start.remote() for name in names], timeout=timeout_s)
        except GetTimeoutError as error:
            raise FleetError(
                f"the replicas were not up after rollout.start_timeout_s={timeout_s:g}; see {folder}/replica-*.log"
            ) from error
        except RayError as error:
            raise FleetError(f"a replica could not start: {last_line(error)}; see {folder}/replica-*.log") from error

    def client(self) -> FleetClient:
        """A picklable client for runners."""
        return FleetClient(self._names, timeout_s=self._config.rollout.generate_timeout_s)

    def sync_client(self) -> "FleetSyncClient":
        """Drives weight updates."""
        return FleetSyncClient(self)

    def actors(self) -> list[Any]:
        """The replicas' handles, in order."""
        return [self._actors[name] for name in self._names]

    @property
    def needs_weights(self) -> bool:
        """True while some replica waits for weights."""
        return NO_WEIGHTS in self.versions()

    def versions(self) -> list[int]:
        """The version that each replica serves."""
        return ray.get([actor.version.remote() for actor in self.actors()], timeout=HEALTH_TIMEOUT_S)

    def ensure_healthy(self) -> list[str]:
        """Restart the replicas that died; returns their names. They serve after the next weight sync."""
        alive = self._alive()
        return self._restart([name for name in self._names if name not in alive])

    def ensure_ready_for_weights(self) -> list[str]:
        """Like `ensure_healthy`; replicas that were left in the middle of an update are restarted as well."""
        restarted = self.ensure_healthy()
        states = ray.get([actor.is_updating.remote() for actor in self.actors()], timeout=HEALTH_TIMEOUT_S)
        return restarted + self._restart([name for name, half in zip(self._names, states, strict=True) if half])

    def _restart(self, names: list[str]) -> list[str]:
        for name in names:
            ray.kill(self._actors[name])
            self._actors[name] = self._start_replacement(name)
        if names:
            self._await_started(names)
        return names

    def _start_replacement(self, name: str) -> Any:
        """A new actor under the dead one's name, which Ray frees a moment after the death."""
        deadline = time.monotonic() + HEALTH_TIMEOUT_S
        while True:
            try:
                return self._start_one(name)
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise FleetError(
                        f"{name} died and Ray still holds its name after {HEALTH_TIMEOUT_S:g} s"
                    ) from error
                time.sleep(0.2)

    def _alive(self) -> set[str]:
        """The replicas that answer; all are asked at once."""
        asked = {self._actors[name].version.remote(): name for name in self._names}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=HEALTH_TIMEOUT_S)
        alive = set()
        for reference in answered:
            try:
                ray.get(reference)
            except RayActorError:
                continue
            alive.add(asked[reference])
        return alive

    def shutdown(self) -> None:
        """End all replicas and their processes."""
        actors, self._actors = list(self._actors.values()), {}
        if not ray.is_initialized():
            return
        ray.wait([actor.shutdown.remote() for actor in actors], num_returns=len(actors), timeout=SHUTDOWN_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)


class FleetSyncClient:
    """Weight updates of all replicas at once: `begin`, vLLM's own protocol, `commit`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._timeout_s = fleet._config.sync.timeout_s
        self._tensor_parallel = fleet._config.rollout.tensor_parallel

    def begin(self) -> bool:
        """Restart what died or was left half updated, then take every replica out of service.

        True where one has no weights: it was restarted now, or earlier while episodes were played.
        """
        try:
            self._fleet.ensure_ready_for_weights()
            needs_weights = self._fleet.needs_weights
        except RayError as error:
            raise WeightSyncError(f"a replica died while the fleet was looked after: {last_line(error)}") from error
        self._all("begin_update")
        return needs_weights

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The handshake; replicas take the ranks behind the trainer's in the transport's group, one after another."""
        calls = []
        for index, actor in enumerate(self._fleet.actors()):
            own = dict(init_info)
            if "rank_offset" in own:
                own["rank_offset"] += index * self._tensor_parallel
            calls.append(actor.init_weight_transfer_engine.remote(own))
        self._wait(calls, "init_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")

    def commit(self, version: int) -> None:
        """Serve again, with weights of this version."""
        self._all("commit_update", version)

    def _all(self, method: str, *arguments: Any) -> None:
        self._wait([getattr(actor, method).remote(*arguments) for actor in self._fleet.actors()], method)

    def _wait(self, calls: list[Any], what: str) -> None:
        try:
            ray.get(calls, timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise WeightSyncError(f"{what} took longer than sync.timeout_s={self._timeout_s:g}") from error
        except RayError as error:
            raise WeightSyncError(f"{what} failed on a replica: {last_line(error)}") from error


def last_line(error: Exception) -> str:
    """What a Ray error is about: its text ends with the original exception."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
