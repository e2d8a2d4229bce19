"""Evaluation on held-out rows: inside a training run, and as `megatron-agent eval`."""

import argparse
import json
import sys
from pathlib import Path

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError
from megatron_agent.process import run_rank
from megatron_agent.rollout_metrics import rollout_metrics
from megatron_agent.session import Session, open_session


def evaluate(session: Session, *, step: int, phase: str) -> dict[str, float]:
    """Play every held-out row with the weights of training step `step` and score it. Collective; the metrics are
    rank 0's and {} elsewhere or without rows.

    `phase` (`eval_before`, `eval`, `eval_after`) marks the recorded episodes. Training episodes that are in flight are
    waited for first: the fleet plays one kind at a time, by one version of the weights.
    """
    if session.config.data.eval is None:
        return {}
    session.bring_in(version=step)
    session.refresh_fleet(version=step)
    if session.rollout:
        session.rollout.start_evaluation(step, phase)
    result = session.finish_episodes(phase, version=step)
    if session.rollout is None or result is None:
        return {}
    session.rollout.take(result, step=step, phase=phase)
    return {f"eval_{name}": value for name, value in rollout_metrics(result.groups, step=step).items()}


def main(argv: list[str] | None = None) -> int:
    """Entry point of every rank of `megatron-agent eval`."""
    parser = argparse.ArgumentParser(prog="megatron_agent.evaluate", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder (default: the run's newest, else the base)")
    options = parser.parse_args(argv)
    return run_rank(options.config, options.overrides, lambda config: _evaluate_checkpoint(config, options.checkpoint))


def _evaluate_checkpoint(config: ExperimentConfig, checkpoint: Path | None) -> None:
    if config.data.eval is None:
        raise ConfigError("data.eval is not set, so there is nothing to evaluate; name a file or a row generator")
    with open_session(config, for_training=False) as session:
        step = session.load_policy(checkpoint)
        session.sync_weights(version=step)
        metrics = evaluate(session, step=step, phase="eval")
        if session.rollout:
            print(json.dumps({"step": step, **metrics}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
