"""Claim: rollouts through the agent loop reach 0.9 or more of the tokens/s of a bare AsyncLLM.generate.

    python benchmarks/bench_rollout.py [--cases smollm2 quickstart short] [--dtype fp32] [--repeats 3]

The agent loop is that of a run: episodes through RolloutManager, runner actor, flow, environment with threads of its
own, chat template, fleet client and Ray, to a replica. The bare side is one coroutine per episode inside the same
replica's actor that calls the same AsyncLLM, with nothing between an episode's steps: it keeps the order of an
episode's steps, generates exactly as many tokens as the agent loop got for each prompt, and its prompts are as long
and as often cached (each step's prompt is the previous one, the tokens it sampled itself, and the recorded ids that
followed). Sampling parameters are the same, log-probs included. The two alternate, each with an empty prefix cache,
each bare run repeating the requests of the agent loop before it; the fastest of each counts, because other work on
the machine only adds time.

    smollm2      32 episodes of 3 steps of up to 64 tokens; SmolLM2-135M
    quickstart   128 episodes of 3 steps of up to 64 tokens; the quickstart's model of 120,000 parameters
    short        352 episodes of 8 steps of up to 4 tokens; the quickstart's model and sizes

The claim is about the first, and so is the value. The other two have next to no model in them: they show what a
request costs outside the engine. Prints a table, and one JSON object as the last line.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from single_rank import single_rank_session

import rollout.fleet
from megatron_agent.session import Session
from rollout.engine import ReplicaEngine
from rollout.episodes import RolloutResult
from trajectory.steps import Trajectory

GOAL = 0.9
QUICKSTART = {"path": "models/quickstart", "builder": {"name": "tiny_qwen3", "args": {"initializer_range": 0.125}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which model plays how many episodes of which size."""

    model: dict[str, Any]
    prompts: int
    group_size: int
    max_steps: int
    response_tokens: int

    @property
    def num_requests(self) -> int:
        """How many completions one pass asks for."""
        return self.prompts * self.group_size * self.max_steps


CASES = {
    "smollm2": Case(
        model={"path": "models/smollm2", "builder": {"name": "smollm2"}},
        prompts=8, group_size=4, max_steps=3, response_tokens=64,
    ),
    "quickstart": Case(model=QUICKSTART, prompts=16, group_size=8, max_steps=3, response_tokens=64),
    "short": Case(model=QUICKSTART, prompts=11, group_size=32, max_steps=8, response_tokens=4),
}  # fmt: skip


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
    seconds: float

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


def main() -> None:
    arguments = parse_arguments()
    rollout.fleet.ReplicaEngine = BenchReplica
    measured = {}
    for name in arguments.cases:
        measured[name] = run_case(CASES[name], arguments)
        show(name, *measured[name], CASES[name].num_requests)
    report(measured, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def run_case(case: Case, arguments: argparse.Namespace) -> tuple[list[Measurement], list[Measurement]]:
    """Every pass (through the agent loop, bare), after one of each that does not count."""
    with single_rank_session(
        model={**case.model, "dtype": arguments.dtype},
        data={"train": "conversation:rows", "train_args": {"num_rows": case.prompts}},
        agent={
            "env": "conversation:Conversation",
            "max_steps": case.max_steps,
            "max_response_tokens": case.response_tokens,
            "max_episode_tokens": 2048,
        },
        rollout={"max_model_len": 2048, "kv_cache_gib": 2.0},
    ) as session:
        session.sync_weights(version=0)
        passes = [one_pass(session, case, number) for number in range(1 + arguments.repeats)]
    return [agent for agent, _ in passes[1:]], [bare for _, bare in passes[1:]]


def one_pass(session: Session, case: Case, number: int) -> tuple[Measurement, Measurement]:
    """The episodes through the agent loop, then the same requests bare."""
    assert session.rollout is not None
    assert session.rollout.fleet is not None
    (replica,) = session.rollout.fleet.actors()
    episodes = session.rollout.episodes
    ray.get(replica.empty_cache.remote())
    episodes.start(session.rollout.rows.take(case.prompts), step=number, group_size=case.group_size, temperature=1.0)
    result = episodes.run()
    assert isinstance(result, RolloutResult), "a replica died"
    trajectories = [trajectory for group in result.groups for trajectory in group.trajectories]
    num_tokens = sum(len(step.response_ids) for trajectory in trajectories for step in trajectory.steps)
    ray.get(replica.empty_cache.remote())
    bare_tokens, bare_seconds = ray.get(
        replica.bare.remote(
            [requests_of(trajectory) for trajectory in trajectories], session.config.rollout.max_concurrent_episodes
        )
    )
    assert bare_tokens == num_tokens, f"{num_tokens} tokens through the agent loop, {bare_tokens} bare"
    return (
        Measurement(num_tokens=num_tokens, seconds=result.seconds),
        Measurement(num_tokens=bare_tokens, seconds=bare_seconds),
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


def show(name: str, agent: Sequence[Measurement], bare: Sequence[Measurement], num_requests: int) -> None:
    for label, passes in (("agent loop", agent), ("bare generate", bare)):
        print(f"{name:11s} {label:14s} {max(p.speed for p in passes):9.0f} tokens/s   "
              f"{[f'{p.num_tokens} in {p.seconds:.2f} s' for p in passes]}", flush=True)  # fmt: skip
    print(f"{name:11s} ratio of the best {ratio(agent, bare):.3f}, of each pair "
          f"{[round(a.speed / b.speed, 3) for a, b in zip(agent, bare, strict=True)]}; "
          f"{extra_ms(agent, bare, num_requests):.1f} ms more per request", flush=True)  # fmt: skip


def ratio(agent: Sequence[Measurement], bare: Sequence[Measurement]) -> float:
    return max(p.speed for p in agent) / max(p.speed for p in bare)


def extra_ms(agent: Sequence[Measurement], bare: Sequence[Measurement], num_requests: int) -> float:
    return 1e3 * (min(p.seconds for p in agent) - min(p.seconds for p in bare)) / num_requests


def report(measured: dict[str, tuple[list[Measurement], list[Measurement]]], arguments: argparse.Namespace) -> None:
    name, (agent, bare) = next(iter(measured.items()))
    result = {
        "claim": f"rollout tokens/s through the agent loop over bare AsyncLLM.generate, same requests, {name}",
        "value": round(ratio(agent, bare), 3),
        "goal": GOAL,
        "better": "higher",
        "raw": {
            name: {
                "ratio": round(ratio(agent, bare), 3),
                "agent_loop": [round(p.speed, 1) for p in agent],
                "bare": [round(p.speed, 1) for p in bare],
                "extra_ms_per_request": round(extra_ms(agent, bare, CASES[name].num_requests), 2),
            }
            for name, (agent, bare) in measured.items()
        }
        | {"dtype": arguments.dtype},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
