"""What one step of an episode costs outside the engine: real runner, flow, chat template, client and connection, and in
the engine's place a replica that answers after a moment."""

import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import conversation
import psutil
import ray

from launch import ray_cluster
from megatron_agent.config import ExperimentConfig
from megatron_agent.data import parse_row
from megatron_agent.generation import Completion, SamplingParams
from megatron_agent.model_folders.registry import ensure_model_folder
from rollout.client import FleetClient
from rollout.episodes import RolloutManager, RolloutResult
from rollout.transport import ReplicaServer

NUM_STEPS = 8
RESPONSE_TOKENS = 48
ANSWER_S = 0.1


class EchoReplica:
    """Ray actor that answers every prompt with the same ids."""

    async def start(self) -> None:
        self._server = ReplicaServer(self.generate)
        await self._server.start(ray.util.get_node_ip_address())

    async def endpoint(self) -> Any:
        return self._server.endpoint

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        await asyncio.sleep(ANSWER_S)
        return Completion(
            token_ids=list(range(100, 100 + RESPONSE_TOKENS)),
            logprobs=[-0.5] * RESPONSE_TOKENS,
            finish_reason="length",
            policy_version=0,
        )


class EchoFleet:
    """What RolloutManager wants of a fleet."""

    needs_weights = False

    def __init__(self) -> None:
        self._name = f"echo-{uuid.uuid4().hex[:8]}"
        self.actor = ray.remote(EchoReplica).options(name=self._name, num_cpus=0, max_concurrency=1000).remote()
        ray.get(self.actor.start.remote(), timeout=60)

    def client(self) -> FleetClient:
        return FleetClient([self._name], timeout_s=60)

    def ensure_healthy(self) -> list[str]:
        return []


def processes(actors: Sequence[Any]) -> list[psutil.Process]:
    """This process and those of the actors."""
    pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors], timeout=60)
    return [psutil.Process(pid) for pid in (os.getpid(), *pids)]


def cpu_seconds(around: Sequence[psutil.Process]) -> float:
    """Processor time that these processes have had."""
    return sum(sum(process.cpu_times()[:2]) for process in around)


def step_overhead(model: dict[str, Any], *, episodes: int, repeats: int) -> dict[str, float]:
    """The least of `repeats` passes: CPU and wall ms for each step with so many episodes at once."""
    config = ExperimentConfig.model_validate(
        {
            "run": {"name": "benchmark"},
            "model": model,
            "data": {"train": "conversation:rows"},
            "agent": {
                "env": "conversation:Conversation",
                "max_steps": NUM_STEPS,
                "max_response_tokens": RESPONSE_TOKENS,
                "max_episode_tokens": 4096,
            },
            "rollout": {"max_concurrent_episodes": episodes},
        }
    )
    ensure_model_folder(config.model)
    ray_cluster.connect(None, num_cpus=os.cpu_count() or 1, timeout_s=120)
    try:
        fleet = EchoFleet()
        manager = RolloutManager(config, fleet)  # pyright: ignore[reportArgumentType]
        around = processes([fleet.actor, *manager._runners])
        rows = [
            parse_row(row, index=index, where="conversation")
            for index, row in enumerate(conversation.rows(num_rows=max(1, episodes // 8)))
        ]
        cpu, wall = [], []
        for number in range(1 + repeats):
            manager.start(rows, step=number, group_size=min(8, episodes), temperature=1.0)
            before, started = cpu_seconds(around), time.perf_counter()
            assert isinstance(manager.run(), RolloutResult)
            wall.append(1e3 * (time.perf_counter() - started) / (episodes * NUM_STEPS))
            cpu.append(1e3 * (cpu_seconds(around) - before) / (episodes * NUM_STEPS))
        manager.shutdown()
        return {"cpu_ms_per_step": min(cpu[1:]), "wall_ms_per_step": min(wall[1:])}
    finally:
        ray_cluster.disconnect()
