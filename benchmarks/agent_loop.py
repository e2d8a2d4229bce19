"""What benchmarks/rollout.py measures: the agent loop, and the same requests bare."""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import conversation
import ray
from single_rank import single_rank_session
from step_overhead import cpu_seconds, processes, step_overhead

import rollout.fleet
from megatron_agent.data import parse_row
from megatron_agent.rollout_metrics import rollout_metrics
from megatron_agent.session import Session
from rollout.engine import ReplicaEngine
from rollout.episodes import RolloutResult
from trajectory.steps import Trajectory

GOAL = 0.95
VALUE = "smollm2, 32 episodes"
NUM_STEPS = 3
RESPONSE_TOKENS = 48
GROUP_SIZE = 8
TOOL_S = 0.2
OVERHEAD_EPISODES = (16, 256)
MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {"path": "models/smollm2", "builder": {"name": "smollm2"}},
    "tiny": {
        "path": "models/quickstart",
        "builder": {"name": "tiny_qwen3", "args": {"initializer_range": 0.125}},
    },
}
CONCURRENT = {"smollm2": [1, 32], "tiny": [1, 16, 64, 256]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many episodes at once, each step of which waits `tool_s` for its environment."""

    model: str
    episodes: int
    tool_s: float = 0.0

    @property
    def name(self) -> str:
        slow = f", {self.tool_s:g} s tools" if self.tool_s else ""
        return f"{self.model}, {self.episodes} episodes{slow}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One step as the bare side repeats it."""

    new_ids: list[int]
    """What the prompt adds to the previous prompt and response; all of it in the first step."""
    num_tokens: int
    """How many to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One pass over all episodes."""

    num_tokens: int
    num_steps: int
    seconds: float
    cpu_seconds: float
    """Processor time of the processes around the engine's own."""
    cached: float = 0.0
    """Prefix cache hits over what was possible; of the agent loop's passes."""
    tool_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


class BenchReplica(ReplicaEngine):
    """A replica that can also be driven without anything around its engine."""

    async def empty_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def bare(self, episodes: list[list[Request]], max_concurrent: int) -> tuple[int, float]:
        """Generate the episodes' requests; returns (tokens, seconds)."""
        places = asyncio.Semaphore(max_concurrent)
        started = time.perf_counter()
        counts = await asyncio.gather(*(self._bare_episode(requests, places) for requests in episodes))
        return sum(counts), time.perf_counter() - started

    async def _bare_episode(self, requests: list[Request], places: asyncio.Semaphore) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids: list[int] = []
        total = 0
        async with places:
            for request in requests:
                ids = ids + request.new_ids
                params = SamplingParams(
                    temperature=1.0,
                    max_tokens=request.num_tokens,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                self._next_request += 1
                prompt, name = {"prompt_token_ids": ids}, f"bare-{self._next_request}"
                (output,) = [output async for output in self._engine.generate(prompt, params, name)]
                ids = ids + list(output.outputs[0].token_ids)
                total += len(output.outputs[0].token_ids)
        return total


def main(description: str | None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--concurrent", nargs="+", type=int, help="episodes at once (default: by model)")
    parser.add_argument("--no-slow-tools", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    rollout.fleet.ReplicaEngine = BenchReplica
    measured: dict[str, tuple[list[Measurement], list[Measurement]]] = {}
    for model in arguments.models:
        counts = arguments.concurrent or CONCURRENT[model]
        cases = [Case(model=model, episodes=count) for count in counts]
        if model == "tiny" and not arguments.no_slow_tools:
            cases.append(Case(model=model, episodes=max(counts), tool_s=TOOL_S))
        measured |= run_cases(cases, arguments)
    overhead = {}
    for count in OVERHEAD_EPISODES:
        overhead[count] = step_overhead(MODELS["tiny"], episodes=count, repeats=arguments.repeats)
        costs = overhead[count]
        print(
            f"{f'no engine, {count} episodes':32s} {costs['cpu_ms_per_step']:.2f} ms of CPU and "
            f"{costs['wall_ms_per_step']:.2f} ms of wall time for each step",
            flush=True,
        )
    report(measured, overhead, arguments)


def run_cases(
    cases: list[Case], arguments: argparse.Namespace
) -> dict[str, tuple[list[Measurement], list[Measurement]]]:
    """Every pass (through the agent loop, bare) by case, after one of each that does not count; one engine start."""
    measured = {}
    with single_rank_session(
        model={**MODELS[cases[0].model], "dtype": arguments.dtype},
        data={"train": "conversation:rows", "train_args": {"num_rows": 1}},
        agent={
            "env": "conversation:Conversation",
            "max_steps": NUM_STEPS,
            "max_response_tokens": RESPONSE_TOKENS,
            "max_episode_tokens": 2048,
        },
        rollout={
            "max_model_len": 2048,
            "kv_cache_gib": 2.0,
            "replicas": arguments.replicas,
            "max_concurrent_episodes": max(case.episodes for case in cases),
        },
    ) as session:
        session.sync_weights(version=0)
        one_pass(session, cases[0], 0)
        for case in cases:
            passes = [one_pass(session, case, number) for number in range(1, 1 + arguments.repeats)]
            measured[case.name] = [agent for agent, _ in passes], [bare for _, bare in passes]
            show(case.name, *measured[case.name])
    return measured


def one_pass(session: Session, case: Case, number: int) -> tuple[Measurement, Measurement]:
    """The episodes through the agent loop, then the same requests bare."""
    assert session.rollout is not None
    assert session.rollout.fleet is not None
    replicas = session.rollout.fleet.actors()
    episodes = session.rollout.episodes
    around = processes(replicas + episodes._runners)
    group_size = min(GROUP_SIZE, case.episodes)
    rows = [
        parse_row(row | {"env_kwargs": {"tool_s": case.tool_s}}, index=index, where="conversation")
        for index, row in enumerate(conversation.rows(num_rows=case.episodes // group_size))
    ]
    ray.get([replica.empty_cache.remote() for replica in replicas])
    episodes.start(rows, step=number, group_size=group_size, temperature=1.0)
    before = cpu_seconds(around)
    result = episodes.run()
    cpu = cpu_seconds(around) - before
    assert isinstance(result, RolloutResult), "a replica died"
    trajectories = [trajectory for group in result.groups for trajectory in group.trajectories]
    metrics = rollout_metrics(result.groups, step=number)
    num_tokens = sum(len(step.response_ids) for trajectory in trajectories for step in trajectory.steps)
    num_steps = sum(len(trajectory.steps) for trajectory in trajectories)
    agent = Measurement(
        num_tokens=num_tokens,
        num_steps=num_steps,
        seconds=result.seconds,
        cpu_seconds=cpu,
        cached=metrics["prefix_cache_hit_frac"] / max(1e-9, metrics["prefix_cache_ideal_frac"]),
        tool_seconds=case.tool_s * num_steps,
    )
    ray.get([replica.empty_cache.remote() for replica in replicas])
    shares: list[list[list[Request]]] = [[] for _ in replicas]
    for index, group in enumerate(result.groups):
        shares[index % len(replicas)] += [requests_of(trajectory) for trajectory in group.trajectories]
    before = cpu_seconds(around)
    bare = ray.get([replica.bare.remote(share, case.episodes) for replica, share in zip(replicas, shares, strict=True)])
    assert sum(tokens for tokens, _ in bare) == num_tokens, "the bare side generated another number of tokens"
    return agent, Measurement(
        num_tokens=num_tokens,
        num_steps=num_steps,
        seconds=max(seconds for _, seconds in bare),
        cpu_seconds=cpu_seconds(around) - before,
    )


def requests_of(trajectory: Trajectory) -> list[Request]:
    """The trajectory's steps, for the bare side."""
    assert trajectory.error is None, trajectory.error
    requests: list[Request] = []
    so_far: list[int] = []
    for step in trajectory.steps:
        prompt = step.prompt_ids.tolist()
        assert prompt[: len(so_far)] == so_far, "the chat template rewrote the history"
        requests.append(Request(new_ids=prompt[len(so_far) :], num_tokens=len(step.response_ids)))
        so_far = prompt + step.response_ids.tolist()
    return requests


def ratio(agent: Sequence[Measurement], bare: Sequence[Measurement]) -> float:
    return max(p.speed for p in agent) / max(p.speed for p in bare)


def cpu_ms(passes: Sequence[Measurement]) -> float:
    return min(1e3 * p.cpu_seconds / p.num_steps for p in passes)


def show(name: str, agent: Sequence[Measurement], bare: Sequence[Measurement]) -> None:
    pairs = [round(a.speed / b.speed, 2) for a, b in zip(agent, bare, strict=True)]
    waited = agent[0].tool_seconds
    tools = f"   {waited:.0f} s of tools in {min(p.seconds for p in agent):.1f} s" if waited else ""
    print(
        f"{name:32s} {max(p.speed for p in agent):7.0f} of {max(p.speed for p in bare):7.0f} tokens/s   "
        f"ratio {ratio(agent, bare):.3f} (pairs {pairs})   CPU ms {cpu_ms(agent):.2f} ({cpu_ms(bare):.2f})   "
        f"cached {max(p.cached for p in agent):.2f}{tools}",
        flush=True,
    )


def report(
    measured: dict[str, tuple[list[Measurement], list[Measurement]]],
    overhead: dict[int, dict[str, float]],
    arguments: argparse.Namespace,
) -> None:
    name = VALUE if VALUE in measured else next(iter(measured))
    result = {
        "claim": f"rollout tokens/s through the agent loop over bare AsyncLLM.generate, same requests, {name}",
        "value": round(ratio(*measured[name]), 3),
        "goal": GOAL,
        "better": "higher",
        "raw": {
            name: {
                "ratio": round(ratio(agent, bare), 3),
                "agent_loop": [round(p.speed, 1) for p in agent],
                "bare": [round(p.speed, 1) for p in bare],
                "cpu_ms_per_step": round(cpu_ms(agent), 2),
                "bare_cpu_ms_per_step": round(cpu_ms(bare), 2),
                "cached_of_ideal": [round(p.cached, 3) for p in agent],
            }
            for name, (agent, bare) in measured.items()
        }
        | {f"no engine, {count} episodes": costs for count, costs in overhead.items()}
        | {"dtype": arguments.dtype, "replicas": arguments.replicas},
    }
    print(json.dumps(result))
