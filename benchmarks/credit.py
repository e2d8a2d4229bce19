"""Claim: step-level estimators need fewer training steps than trajectory-level ones where credit is the problem.

    python benchmarks/credit.py [--experiment yaml_configs/decisive_step.yaml] [--estimators grpo gae_step ...]
                                      [--seeds 0 1 2] [--threshold 0.9] [--max-steps 60]

Runs the experiment for each estimator and seed, each run alone on the machine, and notes the first training step at
which the mean return of the episodes that were sampled in it, averaged over that step and the one before, reaches the
threshold; then the run is ended. A run that does not get there within --max-steps counts as --max-steps + 1. Every
estimator has the same model, environment, episodes per step, loss, and learning rate of the policy; what an estimator
needs beside that (discount, critic) is below, for each of the two experiments. All times are training steps.

The value is the best step-level estimator's mean over seeds as a share of the best trajectory-level one's. Prints a
table, and one JSON object as the last line. Three minutes a run on two cores at most.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GOAL = 1.0
CRITIC = "algorithm.critic={lr: 3.0e-3, epochs: 4, warmup_steps: 3}"
TRAJECTORY_LEVEL = {
    "grpo": ["algorithm.advantage={name: grpo}"],
    "rloo": ["algorithm.advantage={name: rloo, whiten: true}"],
    "remax": ["algorithm.advantage={name: remax, whiten: true}"],
    "reinforce": ["algorithm.advantage={name: reinforce, baseline: batch, whiten: true}"],
    "reinforce_plus_plus": ["algorithm.advantage={name: reinforce_plus_plus}"],
    "reinforce_plus_plus_baseline": ["algorithm.advantage={name: reinforce_plus_plus_baseline}"],
    "step_reward_group": ["algorithm.advantage={name: step_reward_group}"],
}
STEP_LEVEL = {
    "gigpo": ["algorithm.advantage={name: gigpo}"],
    "gae_step": ["algorithm.advantage={name: gae_step, lam: 0.5, whiten: true}", CRITIC],
    "gae_token": ["algorithm.advantage={name: gae_token, lam: 0.7, whiten: true}", CRITIC],
    "gae_turn": ["algorithm.advantage={name: gae_turn, lam: 1.0, lam_step: 0.5, whiten: true}", CRITIC],
}
QUICKSTART_CRITIC = "algorithm.critic={lr: 3.0e-3, epochs: 2}"
QUICKSTART = {
    "gae_step": ["algorithm.advantage={name: gae_step, gamma: 0.95, lam: 0.9, whiten: true}", QUICKSTART_CRITIC],
    "gae_token": ["algorithm.advantage={name: gae_token, gamma: 0.98, lam: 0.95, whiten: true}", QUICKSTART_CRITIC],
    "gae_turn": [
        "algorithm.advantage={name: gae_turn, lam: 0.95, gamma_step: 0.95, lam_step: 0.9, whiten: true}",
        QUICKSTART_CRITIC,
    ],
}
"""Those of the quickstart's recipes, where a walk that gets to the goal later is worth less."""
ESTIMATORS = TRAJECTORY_LEVEL | STEP_LEVEL
POLL_S = 0.5
STOP_S = 60


def returns(metrics_file: Path) -> Iterator[float]:
    """The mean return of each training step that the run has logged so far."""
    lines = metrics_file.read_text().splitlines(keepends=True) if metrics_file.exists() else []
    for line in lines:
        record = json.loads(line) if line.endswith("\n") else {}
        if "return_mean" in record:
            yield record["return_mean"]


def reached(values: list[float], threshold: float) -> int | None:
    """The first step, counted from 1, that ends a pair of steps of at least this mean return."""
    pairs = itertools.pairwise(values)
    return next((step for step, pair in enumerate(pairs, start=2) if sum(pair) / 2 >= threshold), None)


def steps_to_threshold(experiment: str, overrides: list[str], options: argparse.Namespace, folder: Path) -> int:
    """Train until the threshold is reached; then the process is told to end, which it does within seconds."""
    command = [
        str(Path(sys.executable).with_name("megatron-agent")), "train", experiment, f"run.dir={folder}", "run.name=run",
        f"run.steps={options.max_steps}", "logging.report=false", "checkpoint.export_hf=false", *overrides,
    ]  # fmt: skip
    log = folder / "output.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                code = process.poll()
                values = list(returns(folder / "run" / "metrics.jsonl"))
                step = reached(values, options.threshold)
                if step is not None:
                    return step
                if code == 0 and len(values) == options.max_steps:
                    return options.max_steps + 1
                if code is not None:
                    raise SystemExit(f"error: {' '.join(command)} ended with {code}:\n{log.read_text()[-3000:]}")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="yaml_configs/decisive_step.yaml")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--max-steps", type=int, default=60)
    options = parser.parse_args()
    estimators = ESTIMATORS | (QUICKSTART if Path(options.experiment).stem == "quickstart" else {})
    found: dict[str, list[int]] = {}
    print(f"{'estimator':29s} {'level':10s} steps to a mean return of {options.threshold:g}", flush=True)
    for name in options.estimators:
        found[name] = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                overrides = [*estimators[name], f"run.seed={seed}"]
                found[name].append(steps_to_threshold(options.experiment, overrides, options, Path(folder)))
        level = "step" if name in STEP_LEVEL else "trajectory"
        print(f"{name:29s} {level:10s} {found[name]}  mean {statistics.mean(found[name]):.1f}", flush=True)
    means = {name: statistics.mean(steps) for name, steps in found.items()}
    step_level = [mean for name, mean in means.items() if name in STEP_LEVEL]
    trajectory_level = [mean for name, mean in means.items() if name in TRAJECTORY_LEVEL]
    result = {
        "claim": f"steps to threshold on {options.experiment}, best step-level over best trajectory-level estimator",
        "value": round(min(step_level) / min(trajectory_level), 3) if step_level and trajectory_level else None,
        "goal": GOAL,
        "better": "lower",
        "raw": {"steps": found, "threshold": options.threshold, "max_steps": options.max_steps},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
