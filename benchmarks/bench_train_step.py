"""Claim: training runs at 0.9 or more of the tokens/s of transformers' forward+backward on the same unpadded tokens.

    python benchmarks/bench_train_step.py [--layers 8] [--samples 8] [--length 256] [--dtype fp32]

A random Llama of SmolLM2-135M's width. transformers gets the samples as one batch of equal lengths, so that it has no
padding either; the trainer gets them as one packed row. Both take the loss of every token but the first of each
sample. The calls alternate in one process and the fastest of each counts, because other work on the machine only
adds time. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable

import torch
from single_rank import set_single_rank_environment
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_agent.config import ExperimentConfig
from parallel import process_groups
from trajectory.packing import PackedMicrobatch

GOAL = 0.9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        reference = build_folder(folder, arguments)
        token_ids = torch.randint(0, reference.config.vocab_size, (arguments.samples, arguments.length))
        config = ExperimentConfig.model_validate(
            {
                "run": {"name": "benchmark"},
                "model": {"path": folder, "dtype": arguments.dtype},
                "data": {"train": "unused"},
            }
        )
        set_single_rank_environment()
        process_groups.initialize(config.parallel, torch.device("cpu"), seed=0)
        ours_backward, ours_update = our_calls(config, token_ids)
        theirs_backward, theirs_update = their_calls(reference, token_ids)
        calls = {
            "ours, forward+backward": ours_backward,
            "transformers, forward+backward": theirs_backward,
            "ours, whole update": ours_update,
            "transformers, with clip and AdamW": theirs_update,
        }
        seconds = measure(calls, repeats=arguments.repeats)
        process_groups.shutdown()
    report(seconds, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def build_folder(folder: str, arguments: argparse.Namespace) -> torch.nn.Module:
    """Save a random model for the trainer to load, and return transformers' own of the same weights."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=arguments.layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[arguments.dtype])
    model.save_pretrained(folder)
    return model


def packed_row(token_ids: torch.Tensor) -> PackedMicrobatch:
    samples, length = token_ids.shape
    position_ids = torch.arange(length).repeat(samples)
    mask = position_ids > 0
    return PackedMicrobatch(
        token_ids=token_ids.flatten(),
        position_ids=position_ids,
        cu_seqlens=torch.arange(0, samples * length + 1, length, dtype=torch.int32),
        loss_mask=mask,
        step_index=torch.where(mask, 0, -1).to(torch.int32),
        trajectory_index=torch.arange(samples, dtype=torch.int32).repeat_interleave(length),
        advantages=torch.zeros(mask.shape),
        loss_weights=mask.float(),
        rollout_logprobs=torch.zeros(mask.shape),
    )


def our_calls(config: ExperimentConfig, token_ids: torch.Tensor) -> tuple[Callable, Callable]:
    """(forward+backward, whole update) of the trainer; each returns the mean loss."""
    from parallel.forward import microbatch_logprobs, run_schedule
    from parallel.hf_folder import load_hf_weights
    from parallel.model import build_model
    from parallel.optimizer import LrScheduler, build_optimizer
    from parallel.train_step import PolicyTrainer

    chunks = build_model(config.model.path, config=config, for_training=True)
    load_hf_weights(chunks, config.model.path)
    optimizer = build_optimizer(config, chunks)
    scheduler = LrScheduler(optimizer, config.optimizer, total_updates=1000)
    trainer = PolicyTrainer(config, chunks, optimizer, scheduler)
    row = packed_row(token_ids)
    denominator = float(row.loss_mask.sum())

    def last_stage(microbatch: PackedMicrobatch, logits: torch.Tensor):
        logprobs, _ = microbatch_logprobs(microbatch, logits, vocab_size=49152, temperature=1.0)
        loss = -logprobs.sum() / denominator
        return loss, torch.zeros((), dtype=torch.int), loss.detach()

    def forward_backward() -> float:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        return run_schedule(chunks, [row], last_stage, forward_only=False)[0].item()

    return forward_backward, lambda: trainer.sft_update([row], denominator=denominator)["loss"]


def their_calls(model: torch.nn.Module, token_ids: torch.Tensor) -> tuple[Callable, Callable]:
    """The same with transformers and torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def forward_backward() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    def update() -> float:
        loss = forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return forward_backward, update


def measure(calls: dict[str, Callable], *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, alternating, after one warm-up that also checks that the losses agree."""
    losses = {name: call() for name, call in calls.items()}
    spread = max(losses.values()) - min(losses.values())
    assert spread < 0.02, f"the two do not compute the same loss: {losses}"
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    num_tokens = arguments.samples * arguments.length
    speeds = {name: num_tokens / min(values) for name, values in seconds.items()}
    print(f"{arguments.layers} layers, {arguments.samples} x {arguments.length} tokens, {arguments.dtype}, "
          f"{arguments.threads} threads, best of {arguments.repeats}")  # fmt: skip
    for name, speed in speeds.items():
        print(f"{name:36s} {speed:9.0f} tokens/s   {[round(value, 3) for value in seconds[name]]} s")
    ours, theirs, ours_update, theirs_update = speeds.values()
    result = {
        "claim": "trainer tokens/s over transformers forward+backward, equal unpadded tokens",
        "value": round(ours / theirs, 3),
        "goal": GOAL,
        "better": "higher",
        "raw": {name: round(speed, 1) for name, speed in speeds.items()}
        | {"whole_update_ratio": round(ours_update / theirs_update, 3), "dtype": arguments.dtype},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
