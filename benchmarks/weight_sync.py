"""Claim: one weight sync of SmolLM2-135M in fp32 (538 MB) into one vLLM replica takes at most 3 copies of these bytes.

    python benchmarks/weight_sync.py [--dtype fp32] [--cases 1x1 2x1 1x1:qwen3_132m 1x2:qwen3_132m] [--repeats 5]

A case is REPLICASxTENSOR[:MODEL]: replicas of the fleet, tensor-parallel trainer ranks, and smollm2 unless another
model is named. SmolLM2's 9 heads cannot be split in two, so the cases of two ranks take a random Qwen3 of the same
size. Trainer, fleet and transport are those of a run. A sync counts "all in", from the call of the sender until the
replicas serve again, and the median of the
repeats counts; every one brings other values in all tensors. The copy is one `copy_` between two tensors that are in
memory already, best of 5, with the threads that the trainer has. Then `sync.delta`, with nothing and with everything
changed.

Beside the seconds of each phase the table gives the processor seconds of rank 0 and of all replicas. Prints one table
per case, and one JSON object as the last line. The load average is in it: on a machine that is busy with other things
the copy, which is over in an instant, suffers less than the sync.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOAL = 3.0
MODELS = {
    "smollm2": {"path": "models/smollm2", "builder": {"name": "smollm2"}},
    "qwen3_132m": {
        "path": "models/qwen3_132m",
        "builder": {
            "name": "tiny_qwen3",
            "args": {
                "hidden_size": 768,
                "num_layers": 21,
                "num_heads": 12,
                "num_kv_heads": 4,
                "head_dim": 64,
                "intermediate_size": 2048,
            },
        },
    },
    "quickstart": {
        "path": "models/quickstart",
        "builder": {"name": "tiny_qwen3", "args": {"initializer_range": 0.125}},
    },
}
CASES = ["1x1", "2x1", "1x1:qwen3_132m", "1x2:qwen3_132m"]
ROWS = {
    "total": "all in",
    "begin": "replicas healthy, idle, out of service",
    "load": "replicas: load the buckets; rank 0 fills the next one meanwhile",
    "finish": "vLLM closes the update",
    "commit": "caches reset, back in service",
    "rest": "rank 0: fill the first bucket, wait",
    "fill_alone": "not part of the total: fill all buckets, with replicas that do nothing",
    "processor_rank_0": "processor seconds of rank 0, all threads",
    "processor_replicas": "processor seconds of all replicas, all threads",
}
TIMED = {
    "begin": "begin",
    "start_weight_update": "load",
    "update_weights": "load",
    "finish_weight_update": "finish",
    "commit": "commit",
}


class TimedClient:
    """The fleet's sync client, with the seconds of each kind of call, and of each replica's loads."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._client = fleet.sync_client()
        self.seconds: dict[str, float] = defaultdict(float)
        self.replica_seconds: list[float] = [0.0] * len(fleet.actors())

    def __getattr__(self, name: str) -> Any:
        method = self._each_loads if name == "update_weights" else getattr(self._client, name)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments)
            self.seconds[TIMED[name]] += time.perf_counter() - started
            return result

        return timed

    def _each_loads(self, update_info: Any) -> None:
        """As the client does, but notes when each replica is done."""
        import ray

        started = time.perf_counter()
        waiting = {actor.update_weights.remote(update_info): index for index, actor in enumerate(self._fleet.actors())}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1, timeout=300)
            ray.get(done)
            self.replica_seconds[waiting.pop(done)] += time.perf_counter() - started


class IdleClient:
    """Replicas that take everything at once."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: None


def main() -> None:
    options = parse_arguments()
    if options.rank_of:
        run_case(json.loads(options.rank_of))
        return
    measured = {case: start_case(case, options) for case in options.cases}
    for case, result in measured.items():
        print_table(case, result, options)
    first = measured[options.cases[0]]
    copies = {case: round(result["syncs"]["full"]["total"] / result["copy_s"], 1) for case, result in measured.items()}
    result = {
        "claim": f"memory copies that one weight sync takes: {options.dtype}, {first['num_bytes'] / 1e6:.0f} MB, "
        f"replicas x tensor ranks {options.cases[0]}",
        "value": copies[options.cases[0]],
        "goal": GOAL,
        "better": "lower",
        "raw": {
            "memory_copy_s": round(first["copy_s"], 4),
            "copies": copies,
            "cases": measured,
            "load_average": os.getloadavg(),
        },
    }
    print(json.dumps(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="REPLICASxTENSOR[:MODEL]")
    parser.add_argument("--bucket-mib", type=int, help="sync.bucket_mib, by default that of a run")
    parser.add_argument("--verify", action="store_true", help="with checksums of every tensor (sync.verify)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def parse_case(case: str) -> tuple[int, int, str]:
    """(replicas, tensor-parallel ranks, model) of REPLICASxTENSOR[:MODEL]."""
    sizes, _, model = case.partition(":")
    replicas, tensor = map(int, sizes.split("x"))
    return replicas, tensor, model or "smollm2"


def start_case(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case on its own ranks, as `megatron-agent train` starts them."""
    from launch.local import run_ranks
    from megatron_agent.config import ExperimentConfig

    replicas, tensor, model = parse_case(case)
    sync: dict[str, Any] = {"verify": options.verify}
    if options.bucket_mib:
        sync["bucket_mib"] = options.bucket_mib
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "run": {"name": "benchmark", "dir": folder},
            "model": {**MODELS[model], "dtype": options.dtype},
            "data": {"train": "megatron_agent.envs.arithmetic:rows", "train_args": {"num_rows": 1}},
            "rollout": {"max_model_len": 1024, "max_concurrent_episodes": 32, "replicas": replicas},
            "parallel": {"tensor": tensor},
            "sync": sync,
            "logging": {"tensorboard": False},
            "cluster": {"device": "cpu"},
        }
        result = Path(folder) / "result.json"
        job = {"config": config, "repeats": options.repeats, "result": str(result)}
        code = run_ranks(ExperimentConfig.model_validate(config), "weight_sync", ["--rank-of", json.dumps(job)])
        if code:
            raise SystemExit(f"error: the ranks of case {case} ended with {code}")
        return json.loads(result.read_text())


def run_case(job: dict[str, Any]) -> None:
    """What every rank of a case does; rank 0 writes the result."""
    import torch

    from megatron_agent.config import ExperimentConfig
    from megatron_agent.session import open_session
    from parallel.model import read_hf_config
    from parallel.shared_memory_sender import SharedMemorySender
    from parallel.weight_sender import WeightSender
    from parallel.weight_source import MegatronWeightSource

    config = ExperimentConfig.model_validate(job["config"])
    with open_session(config, for_training=False) as session:
        client: Any = TimedClient(session.rollout.fleet) if session.rollout else None
        source = MegatronWeightSource(session.model_chunks, read_hf_config(config.model.path))
        parameters = [parameter for chunk in session.model_chunks for parameter in chunk.parameters()]

        def repeat(sender: WeightSender, *, changing: bool) -> dict[str, Any]:
            syncs = []
            for version in range(job["repeats"]):
                if changing:
                    change(parameters, version)
                syncs.append(timed_sync(sender, client, version))
            return summary(syncs)

        full = WeightSender(source, config, client)
        first = timed_sync(full, client, 0)  # maps the buckets; every run makes it before its first step
        syncs = {"first": first, "full": repeat(full, changing=True)}
        delta_config = config.model_copy(update={"sync": config.sync.model_copy(update={"delta": True})})
        delta = WeightSender(source, delta_config, client)
        timed_sync(delta, client, 0)
        syncs |= {
            "delta, nothing changed": repeat(delta, changing=False),
            "delta, everything changed": repeat(delta, changing=True),
        }
        idle: Any = IdleClient() if session.rollout else None
        bucket_bytes = config.sync.bucket_mib * 2**20
        filler = SharedMemorySender(source, idle, bucket_bytes=bucket_bytes, verify=config.sync.verify)
        fills = []
        for _ in range(1 + job["repeats"]):
            started = time.perf_counter()
            filler.send(replicas_changed=False)
            fills.append(time.perf_counter() - started)
        syncs["full"]["fill_alone"] = round(statistics.median(fills[1:]), 4)
        num_bytes = sum(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in source.metadata())
        if session.rollout:
            result = {"num_bytes": num_bytes, "copy_s": copy_seconds(num_bytes), "syncs": syncs}
            Path(job["result"]).write_text(json.dumps(result))


def change(parameters: list[Any], version: int) -> None:
    """Other bytes in every tensor, as after an update."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.01 if version % 2 else 0.99)


def timed_sync(sender: Any, client: TimedClient | None, version: int) -> dict[str, Any]:
    """One sync's seconds by phase; {} on ranks that have no fleet."""
    if client is None:
        sender.send(version)
        return {}
    client.seconds.clear()
    client.replica_seconds = [0.0] * len(client.replica_seconds)
    replicas, rank_0 = replica_processor_seconds(), time.process_time()
    started = time.perf_counter()
    sent = sender.send(version)["sync_tensors_sent_frac"]
    total = time.perf_counter() - started
    return {
        **client.seconds,
        "total": total,
        "rest": total - sum(client.seconds.values()),
        "processor_rank_0": time.process_time() - rank_0,
        "processor_replicas": replica_processor_seconds() - replicas,
        "replicas": list(client.replica_seconds),
        "sent_frac": sent,
    }


def replica_processor_seconds() -> float:
    """User and system time of the processes that hold replicas."""
    import psutil

    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if any(name in " ".join(process.cmdline()) for name in ("ReplicaEngine", "VLLM::")):
                times = process.cpu_times()
                seconds += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return seconds


def summary(syncs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every phase, all totals, and how evenly the replicas' loads lie beside one another."""
    if not syncs[0]:
        return {}
    result: dict[str, Any] = {
        row: round(statistics.median(sync[row] for sync in syncs), 4) for row in ROWS if row in syncs[0]
    }
    result["totals"] = [round(sync["total"], 3) for sync in syncs]
    result["sent_frac"] = syncs[-1]["sent_frac"]
    loads = [sync["replicas"] for sync in syncs if all(sync["replicas"])]
    if loads:  # the first of N to be done is done after 1/N of the time where they load one after another
        result["first_replica_over_last"] = round(statistics.median(min(each) / max(each) for each in loads), 2)
    return result


def copy_seconds(num_bytes: int) -> float:
    """The best of five copies of as many bytes within this process's memory."""
    import torch

    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return best


def print_table(case: str, result: dict[str, Any], options: argparse.Namespace) -> None:
    replicas, tensor, model = parse_case(case)
    syncs, copy_s = result["syncs"], result["copy_s"]
    print(f"\n{model} {options.dtype}, {result['num_bytes'] / 1e6:.0f} MB, {replicas} replica(s), TP {tensor}; "
          f"one memory copy {copy_s:.3f} s")  # fmt: skip
    print(f"{'median seconds':20s}" + "".join(f"{name:>27s}" for name in syncs))
    for row, meaning in ROWS.items():
        values = "".join(f"{sync[row]:27.3f}" if row in sync else " " * 27 for sync in syncs.values())
        print(f"{row:20s}{values}  {meaning}")
    print(f"{'memory copies':20s}" + "".join(f"{sync['total'] / copy_s:27.1f}" for sync in syncs.values()))
    if "first_replica_over_last" in syncs["full"]:
        share = syncs["full"]["first_replica_over_last"]
        print(f"the first replica is done loading after {share:.0%} of the last one's time")
    print(f"totals of the full syncs: {syncs['full']['totals']}")


if __name__ == "__main__":
    sys.exit(main())
