"""Claim: one weight sync of SmolLM2-135M in fp32 (538 MB), from Megatron to a vLLM replica, takes at most 3 s all in.

    python benchmarks/bench_weight_sync.py [--repeats 7] [--dtype fp32] [--replicas 1] [--model smollm2]

Trainer, fleet and transport are those of a run. "All in" is from the call of the sender until the replicas serve
again: taking them out of service, filling the buckets, loading them, vLLM's finish and the commit. The median counts.
The first sync, which every run makes before its first step, is shown but not counted. Prints a table, which also says
what one memory copy of the same bytes takes, and one JSON object as the last line.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from single_rank import single_rank_session

from megatron_agent.session import Session
from parallel.model import read_hf_config
from parallel.weight_sender import WeightSender
from parallel.weight_source import MegatronWeightSource

GOAL_S = 3.0
MODELS = {
    "smollm2": {"path": "models/smollm2", "builder": {"name": "smollm2"}},
    "quickstart": {
        "path": "models/quickstart",
        "builder": {"name": "tiny_qwen3", "args": {"initializer_range": 0.125}},
    },
}
PHASES = {
    "begin": "replicas healthy, idle, out of service",
    "start_weight_update": "vLLM opens the update",
    "fill": "trainer: gather, copy into shared memory",
    "update_weights": "replica: load the buckets",
    "finish_weight_update": "vLLM closes the update",
    "commit": "caches reset, back in service",
}


class TimedClient:
    """The fleet's sync client, with the seconds of each kind of call."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments)
            self.seconds[name] += time.perf_counter() - started
            return result

        return timed


def main() -> None:
    arguments = parse_arguments()
    with single_rank_session(
        model={**MODELS[arguments.model], "dtype": arguments.dtype},
        data={"train": "megatron_agent.envs.arithmetic:rows", "train_args": {"num_rows": 1}},
        rollout={"max_model_len": 1024, "max_concurrent_episodes": 32, "replicas": arguments.replicas},
        sync={"bucket_mib": arguments.bucket_mib, "verify": arguments.verify},
    ) as session:
        syncs, num_bytes = measure(session, repeats=arguments.repeats)
    report(syncs, num_bytes, copy_seconds(num_bytes), arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--verify", action="store_true", help="with checksums of every tensor (sync.verify)")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def measure(session: Session, *, repeats: int) -> tuple[list[dict[str, float]], int]:
    """Seconds by phase, and `total`, of the first sync and of `repeats` later ones; and the bytes of one."""
    assert session.rollout is not None
    assert session.rollout.fleet is not None
    client = TimedClient(session.rollout.fleet.sync_client())
    source = MegatronWeightSource(session.model_chunks, read_hf_config(session.config.model.path))
    sender = WeightSender(source, session.config, client)
    syncs, num_bytes = [], 0
    for version in range(1 + repeats):
        with torch.no_grad():  # each sync brings other values, as after an update
            for chunk in session.model_chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.0001)
        client.seconds.clear()
        started = time.perf_counter()
        num_bytes = int(sender.send(version)["sync_bytes"])
        total = time.perf_counter() - started
        syncs.append({**client.seconds, "fill": total - sum(client.seconds.values()), "total": total})
    return syncs, num_bytes


def copy_seconds(num_bytes: int) -> float:
    """The best of five copies of as many bytes within this process's memory."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return best


def report(syncs: Sequence[dict[str, float]], num_bytes: int, copy_s: float, arguments: argparse.Namespace) -> None:
    first, *later = syncs
    print(f"{arguments.model} {arguments.dtype}, {num_bytes / 1e6:.0f} MB, {arguments.replicas} replica(s)")
    print(f"{'seconds':22s} {'first':>7s} {'median':>7s} {'best':>7s}   each")
    for phase in (*PHASES, "total"):
        each = [sync.get(phase, 0.0) for sync in later]
        print(f"{phase:22s} {first.get(phase, 0.0):7.3f} {statistics.median(each):7.3f} {min(each):7.3f}   "
              f"{[round(value, 3) for value in each]}  {PHASES.get(phase, '')}")  # fmt: skip
    totals = [sync["total"] for sync in later]
    median = statistics.median(totals)
    print(f"one memory copy of the same bytes: {copy_s:.3f} s; a sync takes {median / copy_s:.1f} of them")
    result = {
        "claim": f"seconds of one weight sync, {arguments.model} {arguments.dtype}, {num_bytes / 1e6:.0f} MB, all in",
        "value": round(median, 3),
        "goal": GOAL_S,
        "better": "lower",
        "raw": {
            "seconds": [round(value, 3) for value in totals],
            "best": round(min(totals), 3),
            "first": round(first["total"], 3),
            "memory_copy_s": round(copy_s, 4),
            "memory_copies": round(median / copy_s, 1),
            "median_by_phase": {
                phase: round(statistics.median(sync.get(phase, 0.0) for sync in later), 3) for phase in PHASES
            },
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
