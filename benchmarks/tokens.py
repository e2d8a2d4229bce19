"""Claim: the trainer processes at most 1.05 times the tokens that any exact method has to.

    python benchmarks/tokens.py [--prompts 64] [--group-size 8] [--steps 1 2 4 8 16] [--tokens-per-row 16384]
                                [--data-ranks 1 8]

Episodes are made up, with lengths that vary: prompts of 200 to 800 tokens, which a group shares, actions of 20 to 200
and observations of 20 to 300. "append" episodes only ever append; "rewrite" episodes drop, at every third step, what
the action before had thought, as chat templates do; "branch" episodes try two actions at every third step and go on
from the second, so their steps form a tree. Merging, planning and packing are those of a run. Compared are

    ours               every row of the plan, with its padding
    per trajectory     one row per merged sample, in batches of at most tokens-per-row, padded to the batch's longest
    per step           one row per step, its whole prompt and action, batched and padded in the same way
    bound              the distinct tokens of each group's prefix tree

The value is the largest quotient of ours and the bound. Prints a table, and one JSON object as the last line.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trajectory.packing import plan_microbatches
from trajectory.prefix_tree import tree_tokens
from trajectory.samples import merge_steps
from trajectory.steps import ContextChange, Step, Trajectory

GOAL = 1.05
LENGTHS = {"prompt": (200, 800), "action": (20, 200), "observation": (20, 300), "vocabulary": 50_000}
KINDS = ("append", "rewrite", "branch")
PAIR_COST = 1e-4


def made_up_groups(
    kind: str,
    *,
    num_groups: int,
    group_size: int,
    num_steps: int,
    seed: int = 0,
    lengths: dict[str, Any] = LENGTHS,
) -> Iterator[list[Trajectory]]:
    """Groups of episodes that begin with the same prompt; `lengths` as in LENGTHS, [least, most)."""
    rng = np.random.default_rng(seed)

    def tokens(what: str) -> np.ndarray:
        return rng.integers(0, lengths["vocabulary"], rng.integers(*lengths[what])).astype(np.int32)

    for group in range(num_groups):
        prompt = tokens("prompt")
        played = [tuple(_steps(tokens, kind, prompt, num_steps)) for _ in range(group_size)]
        yield [
            Trajectory(trajectory_id=f"{group}-{member}", group_id=str(group), steps=steps)
            for member, steps in enumerate(played)
        ]


def _steps(tokens: Callable[[str], np.ndarray], kind: str, prompt: np.ndarray, num_steps: int) -> Iterator[Step]:
    for number in range(num_steps):
        action = tokens("action")
        yield Step(
            prompt_ids=prompt,
            response_ids=action,
            rollout_logprobs=np.zeros(len(action), dtype=np.float32),
            response_mask=np.ones(len(action), dtype=bool),
            policy_version=0,
            context_change=ContextChange.CLEAN,
        )
        if kind == "branch" and number % 3 == 1:
            continue  # the next action is another one in the same place
        kept = action[len(action) // 2 :] if kind == "rewrite" and number % 3 == 2 else action
        prompt = np.concatenate([prompt, kept, tokens("observation")])


def padded_tokens(lengths: Sequence[int], tokens_per_row: int) -> int:
    """Sequences sorted by length and batched so that a batch's rectangle is within the budget."""
    total, batch = 0, 0
    ordered = sorted(lengths)
    for place, length in enumerate(ordered):
        batch += 1
        following = ordered[place + 1] if place + 1 < len(ordered) else None
        if following is None or (batch + 1) * following > tokens_per_row:
            total, batch = total + batch * length, 0
    return total


def count(groups: Sequence[Sequence[Trajectory]], *, tokens_per_row: int, data_ranks: int) -> dict[str, int]:
    """Tokens of each method."""
    trajectories = [one for group in groups for one in group]
    family = [number for number, group in enumerate(groups) for _ in group]
    merged = [merge_steps(one, trajectory_index=index) for index, one in enumerate(trajectories)]
    samples = [sample for own in merged for sample in own]
    rows = plan_microbatches(
        samples,
        tokens_per_row=tokens_per_row,
        data_parallel_size=data_ranks,
        families=[family[sample.trajectory_index] for sample in samples],
        pair_cost=PAIR_COST,
    )
    of_group: list[list[np.ndarray]] = [[] for _ in groups]
    for sample in samples:
        of_group[family[sample.trajectory_index]].append(sample.token_ids)
    steps = [len(step.prompt_ids) + len(step.response_ids) for one in trajectories for step in one.steps]
    return {
        "ours": sum(row.num_tokens for rank in rows for row in rank),
        "per trajectory": padded_tokens([sample.num_tokens for sample in samples], tokens_per_row),
        "per step": padded_tokens(steps, tokens_per_row),
        "bound": sum(tree_tokens(ids) for ids in of_group),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens-per-row", type=int, default=16384)
    parser.add_argument("--data-ranks", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    names = ("ours", "per trajectory", "per step", "bound")
    print(f"{'episodes':8s} {'steps':>5s} {'ranks':>5s}" + "".join(f"{name:>16s}" for name in names) + "  ours/bound")
    raw = []
    for kind in KINDS:
        for num_steps in options.steps:
            groups = list(
                made_up_groups(kind, num_groups=options.prompts, group_size=options.group_size, num_steps=num_steps)
            )
            for ranks in options.data_ranks:
                tokens = count(groups, tokens_per_row=options.tokens_per_row, data_ranks=ranks)
                ratio = tokens["ours"] / tokens["bound"]
                case = {"episodes": kind, "steps": num_steps, "data_ranks": ranks}
                raw.append(case | tokens | {"ratio": round(ratio, 4)})
                numbers = "".join(f"{tokens[name]:16,d}" for name in names)
                print(f"{kind:8s} {num_steps:5d} {ranks:5d}{numbers}  {ratio:.4f}", flush=True)
    result = {
        "claim": "tokens the trainer processes over the distinct tokens of the groups' prefix trees, worst case",
        "value": max(case["ratio"] for case in raw),
        "goal": GOAL,
        "better": "lower",
        "raw": raw,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
