"""Claim: log-probs and entropy take at most a quarter of log_softmax's memory beside the logits, and no more time.

    python benchmarks/logprobs.py [--rows 768] [--vocabulary 49152 151936] [--dtypes fp32 bf16] [--repeats 5]

Forward and backward of `parallel.logprobs.token_logprobs`, and of the plain formulas: log_softmax of the logits in
fp32, gather, and -sum p log p, with autograd. Both get the same logits [rows, vocabulary], and both give the gradient
for them, which is as large as the logits and part of what is measured. Each runs in a process of its own: memory is the
peak of its resident set over what it was with the logits made; seconds are the fastest of the repeats. Log-probs,
entropies and gradients are compared.

The value is the largest quotient of the two peaks. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from single_rank import set_single_rank_environment

from megatron_agent.config import ParallelConfig
from parallel import process_groups
from parallel.logprobs import token_logprobs

GOAL = 0.25
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fused(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return token_logprobs(logits, torch.arange(len(token_ids)), token_ids, vocab_size=logits.shape[1], temperature=1.0)


def plain(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.float().log_softmax(dim=-1)
    return log_p.gather(1, token_ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


METHODS = {"fused": fused, "log_softmax": plain}


def run(method: str, vocabulary: int, dtype: str, options: argparse.Namespace, pipe: Connection) -> None:
    """One method in a process of its own."""
    torch.set_num_threads(options.threads)
    set_single_rank_environment()
    process_groups.initialize(ParallelConfig(), torch.device("cpu"), seed=0)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((options.rows, vocabulary), generator=generator)
    logits = logits.to(DTYPES[dtype]).requires_grad_()
    token_ids = torch.randint(0, vocabulary, (options.rows,), generator=generator)
    upstream = torch.randn((2, options.rows), generator=generator)

    def forward_backward() -> tuple[torch.Tensor, torch.Tensor]:
        logits.grad = None
        values = METHODS[method](logits, token_ids)
        torch.autograd.backward(list(values), list(upstream))
        return values

    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    logprobs, entropy = forward_backward()
    peak = _resident("VmHWM") - before
    assert logits.grad is not None
    found = [logprobs.detach(), entropy.detach(), logits.grad[:, :64].float()]
    seconds = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        forward_backward()
        seconds.append(time.perf_counter() - started)
    process_groups.shutdown()
    pipe.send((peak, min(seconds), [values.numpy() for values in found]))


def _resident(field: str) -> int:
    """Bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this benchmark reads the memory of a process from Linux' /proc")


def measure(vocabulary: int, dtype: str, options: argparse.Namespace) -> dict:
    """Both methods on one size."""
    case: dict = {"vocabulary": vocabulary, "dtype": dtype}
    found = []
    context = multiprocessing.get_context("spawn")
    for method in METHODS:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(method, vocabulary, dtype, options, sending))
        process.start()
        sending.close()
        peak, seconds, values = receiving.recv()
        process.join()
        case |= {f"{method}_mib": round(peak / 2**20), f"{method}_s": round(seconds, 3)}
        found.append(values)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other), rtol=2e-2, atol=1e-4)
    case["memory_ratio"] = round(case["fused_mib"] / case["log_softmax_mib"], 3)
    case["time_ratio"] = round(case["fused_s"] / case["log_softmax_s"], 3)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    raw = []
    for vocabulary in options.vocabulary:
        for dtype in options.dtypes:
            raw.append(measure(vocabulary, dtype, options))
            if len(raw) == 1:
                print("  ".join(f"{name:>15s}" for name in raw[0]))
            print("  ".join(f"{value!s:>15s}" for value in raw[-1].values()), flush=True)
    result = {
        "claim": f"peak memory of log-prob and entropy over log_softmax's, beside the logits, {options.rows} rows",
        "value": max(case["memory_ratio"] for case in raw),
        "goal": GOAL,
        "better": "lower",
        "raw": {"worst_time_ratio": max(case["time_ratio"] for case in raw), "cases": raw},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
