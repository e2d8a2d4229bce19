"""Claim: with rollout.overlap a training step takes at most 1.15 x the longer of its rollout and its training.

    python benchmarks/step.py [--cases quickstart stories smollm2] [--steps 3] [--threads 1] [--no-pin]

Whole steps of a run: train_step of the loop, with fleet, runner, environment, credit, log-probs, update, weight sync.
In one session, first in turn, then overlapped. "Rollout" is that of a step in turn, while the trainer is idle;
"training" is all the rest of such a step, the sync included, while the fleet is idle. The fastest of each counts,
because other work on the machine only adds time. The learning rate is next to nothing, so that every step has the same
work.

On a machine without GPUs fleet and trainer share the cores, where overlapping gains only what either leaves idle. So
each gets --threads threads and, with two cores or more, cores of its own: the trainer the first --threads of them; the
fleet, its runner and Ray the next. Both sides of the comparison run like that, so the claim is about the loop: who
waits for whom, and what the thread that plays costs the trainer. It is not about what two cores gain.

    quickstart   352 episodes of up to 8 steps of up to 4 tokens; the quickstart's model of 120,000 parameters
    stories      128 episodes of 3 steps of up to 64 tokens; the same model. Rollout and training take about as long
    smollm2      8 episodes of one step of up to 48 tokens; SmolLM2-135M in fp32

The value is the larger of the cases'. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from single_rank import single_rank_session

from megatron_agent.session import Session
from megatron_agent.train import start, train_step

GOAL = 1.15
PHASES = ("rollout", "rollout_hidden", "credit", "logprobs", "update", "sync", "step")
LAKE = "megatron_agent.envs.frozen_lake"
TINY = {
    "path": "models/quickstart",
    "dtype": "fp32",
    "builder": {"name": "tiny_qwen3", "args": {"initializer_range": 0.125}},
}
TELL = {"env": "conversation:Conversation", "reward": "conversation:share_of_vowels"}
CASES: dict[str, dict[str, Any]] = {
    "quickstart": {
        "model": TINY,
        "data": {"train": f"{LAKE}:rows"},
        "agent": {"env": "frozen_lake", "max_steps": 8, "max_response_tokens": 4, "max_episode_tokens": 256},
        "sft": {"data": f"{LAKE}:format_demonstrations", "steps": 20, "batch_size": 32, "lr": 3e-3},
        "rollout": {"prompts_per_step": 11, "group_size": 32, "max_model_len": 256, "kv_cache_gib": 0.5},
    },
    "stories": {
        "model": TINY,
        "data": {"train": "conversation:rows", "train_args": {"num_rows": 64}},
        "agent": {**TELL, "max_steps": 3, "max_response_tokens": 64, "max_episode_tokens": 2048},
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_model_len": 2048, "kv_cache_gib": 1.0},
    },
    "smollm2": {
        "model": {"path": "models/smollm2", "dtype": "fp32", "builder": {"name": "smollm2"}},
        "data": {"train": "conversation:rows", "train_args": {"num_rows": 64}},
        "agent": {**TELL, "max_steps": 1, "max_response_tokens": 48, "max_episode_tokens": 512},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_model_len": 512, "kv_cache_gib": 1.0},
    },
}
Metrics = dict[str, float]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    measured = {}
    for name in arguments.cases:
        measured[name] = run_case(CASES[name], arguments)
        show(name, *measured[name])
    report(measured, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=3, help="that count, in turn and overlapped (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer, and of the engine (default: 1)")
    parser.add_argument("--no-pin", action="store_true", help="leave it to the kernel who gets which core")
    return parser.parse_args()


def run_case(case: dict[str, Any], arguments: argparse.Namespace) -> tuple[list[Metrics], list[Metrics]]:
    """The metrics of each step that counts: (in turn, overlapped)."""
    sections = case | {
        "rollout": case["rollout"] | {"engine_threads": arguments.threads},
        "algorithm": {"correction": {"tis": "token"}},
        "optimizer": {"lr": 1e-12},
    }
    with ExitStack() as stack:
        session = stack.enter_context(single_rank_session(for_training=True, **sections))
        if not arguments.no_pin:
            stack.enter_context(cores_of_their_own(arguments.threads))
        done = start(session)
        in_turn = steps(session, range(done + 1, done + 2 + arguments.steps), overlap=False)
        done += len(in_turn)
        # The first one of these has to wait for its episodes, and behind the last one no others are played.
        overlapped = steps(session, range(done + 1, done + 3 + arguments.steps), overlap=True)
    return in_turn[1:], overlapped[1:-1]


def steps(session: Session, numbers: range, *, overlap: bool) -> list[Metrics]:
    """Training steps in a row, of which the last one starts no other."""
    config = session.config
    session.config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"overlap": overlap}),
            "run": config.run.model_copy(update={"steps": numbers[-1]}),
        }
    )
    assert session.rollout is not None
    session.rollout.config = session.config
    if overlap:
        session.refresh_fleet(version=numbers[0] - 1)
    return [train_step(session, number) for number in numbers]


@contextmanager
def cores_of_their_own(threads: int) -> Iterator[None]:
    """This process, which is the trainer, on the first cores; all that it has started on the next.

    Afterwards this process has all its cores again: the next case's fleet would have only the trainer's otherwise.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * threads:
        print(f"{len(cores)} cores are not enough for {threads} of trainer and fleet each: they share them", flush=True)
        yield
        return
    own = psutil.Process()
    set_cores([own], cores[:threads])
    set_cores(own.children(recursive=True), cores[threads : 2 * threads])
    try:
        yield
    finally:
        set_cores([own], cores)


def set_cores(processes: Iterable[psutil.Process], cores: list[int]) -> None:
    for process in processes:
        try:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it has ended meanwhile
            continue


def best(records: list[Metrics]) -> Metrics:
    """The fastest of each phase, and of the training as a whole."""
    found = {phase: min(record[f"{phase}_s"] for record in records) for phase in PHASES}
    return found | {"training": min(record["step_s"] - record["rollout_s"] for record in records)}


def ratio(in_turn: list[Metrics], overlapped: list[Metrics]) -> float:
    alone = best(in_turn)
    return best(overlapped)["step"] / max(alone["rollout"], alone["training"])


def in_turn_ratio(in_turn: list[Metrics]) -> float:
    """What the goal would say of steps in turn: 2 where rollout and training take equally long."""
    alone = best(in_turn)
    return alone["step"] / max(alone["rollout"], alone["training"])


def show(name: str, in_turn: list[Metrics], overlapped: list[Metrics]) -> None:
    print(f"{name:11s} {'':10s} " + " ".join(f"{phase:>14s}" for phase in PHASES) + "   seconds, fastest of each")
    for label, records in (("in turn", in_turn), ("overlapped", overlapped)):
        values = best(records)
        print(f"{name:11s} {label:10s} " + " ".join(f"{values[phase]:14.2f}" for phase in PHASES)
              + f"   steps {[round(record['step_s'], 2) for record in records]}")  # fmt: skip
    alone = best(in_turn)
    print(
        f"{name:11s} alone: rollout {alone['rollout']:.2f} s, training {alone['training']:.2f} s. Of the longer: "
        f"a step in turn {in_turn_ratio(in_turn):.3f}, an overlapped one {ratio(in_turn, overlapped):.3f}",
        flush=True,
    )


def report(measured: dict[str, tuple[list[Metrics], list[Metrics]]], arguments: argparse.Namespace) -> None:
    result = {
        "claim": "seconds of an overlapped training step over the longer of rollout alone and training alone",
        "value": round(max(ratio(*records) for records in measured.values()), 3),
        "goal": GOAL,
        "better": "lower",
        "raw": {
            name: {
                "ratio": round(ratio(in_turn, overlapped), 3),
                "ratio_in_turn": round(in_turn_ratio(in_turn), 3),
                "in_turn_s": {key: round(value, 3) for key, value in best(in_turn).items()},
                "overlapped_s": {key: round(value, 3) for key, value in best(overlapped).items()},
                "steps_in_turn_s": [round(record["step_s"], 3) for record in in_turn],
                "steps_overlapped_s": [round(record["step_s"], 3) for record in overlapped],
            }
            for name, (in_turn, overlapped) in measured.items()
        }
        | {"threads": arguments.threads, "pinned": not arguments.no_pin},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
