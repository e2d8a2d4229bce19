"""Claim: trees of 8 episodes of 8 steps are trained 4 times as fast as padded per-step rows or faster.

    python benchmarks/train_step.py [--parts equal trees] [--steps 1 2 4 8 16] [--group-sizes 1 4 8 16]
                                    [--dtype fp32] [--layers 8] [--repeats 5]

equal   The trainer against transformers' forward and backward, and against the same with clipping and AdamW, on equal
        tokens: 8 samples of 256 tokens of which all but the first are trained, for transformers one batch without
        padding. A random Llama of SmolLM2-135M's width with --layers layers.

trees   Forward and backward of one group's episodes, which only append: a prompt of 100 to 160 tokens, actions of 16 to
        32, observations of 16 to 48. --steps steps for 8 episodes, and 8 steps for --group-sizes episodes.

            tree           the rows of a run
            apart          the same with packing.prefix_tree: false: merged episodes, each by itself
            per step       a row for every step, its whole prompt and action, padded to the longest of its batch,
                           through the same model and the same output layer, which reads only actions
            transformers   the same padded batches through transformers, whose output layer reads all tokens

        A random Llama of 2 layers, width 256 and 8,192 tokens of vocabulary: the per-step rows of 16 steps are many,
        and how the methods compare depends on lengths, not on width. "sixteen_steps_over_16_times_one" is the tree's
        seconds, 1 where time is linear in steps.

All compute the same loss, which is checked. Calls alternate, and the fastest of each counts, because other work on the
machine only adds time. The value is per step over tree at 8 steps and 8 episodes. Prints tables, and one JSON object
as the last line.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from single_rank import set_single_rank_environment
from tokens import PAIR_COST, made_up_groups
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_agent.config import ExperimentConfig
from parallel import process_groups
from trajectory.packing import PackedMicrobatch, pack_row, plan_microbatches
from trajectory.samples import Sample, merge_steps
from trajectory.steps import Trajectory

GOALS = {"per_step_over_tree": 4.0, "transformers_over_ours": 1.0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TREE_MODEL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
TREE_LENGTHS = {"prompt": (100, 160), "action": (16, 32), "observation": (16, 48), "vocabulary": 8192}
TOKENS_PER_ROW = 4096


class Trainer:
    """A random Llama in the trainer and in transformers, with equal weights."""

    def __init__(self, sizes: dict[str, Any], dtype: str, folder: str) -> None:
        from parallel.hf_folder import load_hf_weights
        from parallel.model import build_model
        from parallel.optimizer import LrScheduler, build_optimizer
        from parallel.train_step import PolicyTrainer

        torch.manual_seed(0)
        llama = LlamaConfig(**sizes, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True)
        self.vocabulary = llama.vocab_size
        self.theirs = AutoModelForCausalLM.from_config(llama, dtype=DTYPES[dtype])
        self.theirs.save_pretrained(folder)
        self.their_optimizer = torch.optim.AdamW(self.theirs.parameters(), lr=1e-6, fused=True)
        model = {"path": folder, "dtype": dtype}
        config = ExperimentConfig.model_validate(
            {"run": {"name": "benchmark"}, "model": model, "data": {"train": "unused"}}
        )
        set_single_rank_environment()
        process_groups.initialize(config.parallel, torch.device("cpu"), seed=0)
        self.chunks = build_model(folder, config=config, for_training=True)
        load_hf_weights(self.chunks, folder)
        optimizer = build_optimizer(config, self.chunks)
        scheduler = LrScheduler(optimizer, config.optimizer, total_updates=10_000)
        self.ours = PolicyTrainer(config, self.chunks, optimizer, scheduler)

    def forward_backward(self, rows: list[PackedMicrobatch]) -> float:
        """The trainer's; the mean loss of the trained tokens."""
        from parallel.forward import microbatch_logprobs, run_schedule

        denominator = float(sum(int(row.loss_mask.sum()) for row in rows))

        def last_stage(microbatch: PackedMicrobatch, logits: torch.Tensor):
            logprobs, _ = microbatch_logprobs(microbatch, logits, vocab_size=self.vocabulary, temperature=1.0)
            loss = -logprobs[microbatch.loss_mask].sum() / denominator
            return loss, torch.zeros((), dtype=torch.int), loss.detach()

        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
        return float(sum(run_schedule(self.chunks, rows, last_stage, forward_only=False)))

    def update(self, rows: list[PackedMicrobatch]) -> float:
        """The trainer's whole update."""
        denominator = float(sum(int(row.loss_mask.sum()) for row in rows))
        return self.ours.sft_update(rows, denominator=denominator)["loss"]

    def their_forward_backward(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """transformers', on (input_ids, labels); padding lies behind the tokens, so causal attention needs no mask."""
        self.their_optimizer.zero_grad()
        denominator = sum(int((labels[:, 1:] >= 0).sum()) for _, labels in batches)
        total = 0.0
        for input_ids, labels in batches:
            output = self.theirs(input_ids=input_ids, labels=labels, num_items_in_batch=denominator, use_cache=False)
            output.loss.backward()
            total += output.loss.item()
        return total

    def their_update(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """The same, clipped and applied."""
        loss = self.their_forward_backward(batches)
        torch.nn.utils.clip_grad_norm_(self.theirs.parameters(), 1.0)
        self.their_optimizer.step()
        return loss


def sample(ids: np.ndarray, mask: np.ndarray) -> Sample:
    """A sequence whose tokens in `mask` are trained."""
    return Sample(
        trajectory_index=0,
        first_trained=0,
        token_ids=ids.astype(np.int64),
        loss_mask=mask,
        value_mask=mask,
        step_index=np.where(mask, 0, -1).astype(np.int32),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        loss_weights=mask.astype(np.float32),
    )


def per_step_batches(trajectories: Sequence[Trajectory]) -> list[list[Sample]]:
    """Every step by itself, sorted by length, in batches of at most TOKENS_PER_ROW padded to their longest."""
    steps = sorted(
        (s for one in trajectories for s in one.steps), key=lambda s: len(s.prompt_ids) + len(s.response_ids)
    )
    batches: list[list[Sample]] = []
    for step in reversed(steps):
        ids = np.concatenate([step.prompt_ids, step.response_ids])
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].num_tokens > TOKENS_PER_ROW:
            batches.append([])
        longest = batches[-1][0].num_tokens if batches[-1] else len(ids)
        mask = np.zeros(longest, dtype=bool)
        mask[len(step.prompt_ids) : len(ids)] = True
        batches[-1].append(sample(np.pad(ids, (0, longest - len(ids))), mask))
    return batches


def as_tensors(batch: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels) as transformers takes them."""
    ids = torch.from_numpy(np.stack([one.token_ids for one in batch]))
    return ids, ids.masked_fill(~torch.from_numpy(np.stack([one.loss_mask for one in batch])), -100)


def measure(calls: dict[str, Callable[[], float]], *, repeats: int) -> dict[str, float]:
    """The fastest of each, alternating, after a first call that is not counted and has to give the same loss."""
    losses = {name: call() for name, call in calls.items()}
    spread = max(losses.values()) - min(losses.values())
    assert spread < 0.02, f"they do not compute the same loss: {losses}"
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def equal_tokens(options: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of the part `equal`."""
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": options.layers,
             "num_attention_heads": 9, "num_key_value_heads": 3}  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [sample(rng.integers(0, 49152, 256), np.arange(256) > 0) for _ in range(8)]
    rows, batches = [pack_row(samples)], [as_tensors(samples)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(sizes, options.dtype, folder)
        calls = {
            "ours": partial(trainer.forward_backward, rows),
            "transformers": partial(trainer.their_forward_backward, batches),
            "ours, whole update": partial(trainer.update, rows),
            "transformers, clip, AdamW": partial(trainer.their_update, batches),
        }
        seconds = measure(calls, repeats=options.repeats)
        process_groups.shutdown()
    print(f"equal tokens: 8 x 256, {options.layers} layers of width 576, {options.dtype}, tokens/s")
    speeds = {name: 8 * 256 / value for name, value in seconds.items()}
    for name, speed in speeds.items():
        print(f"  {name:27s} {speed:9.1f}", flush=True)
    ours, theirs, our_update, their_update = speeds.values()
    return {"forward_backward": round(ours / theirs, 3), "whole_update": round(our_update / their_update, 3)}


def trees(options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of every shape of the part `trees`."""
    shapes = [(steps, 8) for steps in options.steps] + [(8, size) for size in options.group_sizes if size != 8]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(TREE_MODEL, options.dtype, folder)
        print(f"trees: 2 layers of width 256, {options.dtype}, seconds of forward and backward; in parentheses tokens")
        for steps, size in shapes:
            cases.append(one_tree(trainer, steps, size, repeats=max(1, options.repeats - 2)))
        process_groups.shutdown()
    return cases


def one_tree(trainer: Trainer, num_steps: int, group_size: int, *, repeats: int) -> dict[str, float]:
    """Seconds of each method on one group."""
    (group,) = made_up_groups(
        "append", num_groups=1, group_size=group_size, num_steps=num_steps, seed=num_steps, lengths=TREE_LENGTHS
    )
    samples = [s for index, one in enumerate(group) for s in merge_steps(one, trajectory_index=index)]
    families = [0] * len(samples)
    plan = partial(plan_microbatches, samples, tokens_per_row=TOKENS_PER_ROW, data_parallel_size=1, pair_cost=PAIR_COST)
    (tree,), (apart,) = plan(families=families), plan(families=families, share=False)
    padded = per_step_batches(group)
    per_step, theirs = [pack_row(batch, share=False) for batch in padded], [as_tensors(batch) for batch in padded]
    tokens = {
        "tree": sum(row.num_tokens for row in tree),
        "apart": sum(row.num_tokens for row in apart),
        "per step": sum(row.num_tokens for row in per_step),
        "transformers": sum(ids.numel() for ids, _ in theirs),
    }
    calls = {
        "tree": partial(trainer.forward_backward, tree),
        "apart": partial(trainer.forward_backward, apart),
        "per step": partial(trainer.forward_backward, per_step),
        "transformers": partial(trainer.their_forward_backward, theirs),
    }
    seconds = measure(calls, repeats=repeats)
    numbers = "   ".join(f"{name} {seconds[name]:.3f} ({tokens[name]:,d})" for name in calls)
    quotient = seconds["per step"] / seconds["tree"]
    print(f"  {num_steps:2d} steps x {group_size:2d}   {numbers}   per step/tree {quotient:.1f}", flush=True)
    times = {name: round(value, 4) for name, value in seconds.items()}
    return {"steps": num_steps, "group_size": group_size, **times, "per_step_over_tree": round(quotient, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("equal", "trees"), default=["equal", "trees"])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    raw: dict[str, Any] = {"dtype": options.dtype, "goals": GOALS}
    if "equal" in options.parts:
        raw["ours_over_transformers"] = equal_tokens(options)
    if "trees" in options.parts:
        raw["trees"] = trees(options)
        of = {(case["steps"], case["group_size"]): case for case in raw["trees"]}
        raw["per_step_over_tree"] = of[8, 8]["per_step_over_tree"] if (8, 8) in of else None
        if (1, 8) in of and (16, 8) in of:
            raw["sixteen_steps_over_16_times_one"] = round(of[16, 8]["tree"] / (16 * of[1, 8]["tree"]), 3)
    result = {
        "claim": "seconds of padded per-step rows over those of the tree, 8 steps x 8 episodes",
        "value": raw.get("per_step_over_tree"),
        "goal": GOALS["per_step_over_tree"],
        "better": "higher",
        "raw": raw,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
