"""`megatron-agent export`: a checkpoint's weights as an HF folder that transformers and vLLM load."""

import argparse
import sys
from pathlib import Path

import torch

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import checkpoint_folder, run_folder
from megatron_agent.errors import CheckpointError
from megatron_agent.process import run_rank
from megatron_agent.session import open_session
from parallel.hf_export import check_export_target


def main(argv: list[str] | None = None) -> int:
    """Entry point of every rank of `megatron-agent export`."""
    parser = argparse.ArgumentParser(prog="megatron_agent.export", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder (default: the run's newest)")
    parser.add_argument("--out", type=Path, help="folder to write (default: hf/ in the run folder)")
    options = parser.parse_args(argv)
    return run_rank(
        options.config, options.overrides, lambda config: export(config, checkpoint=options.checkpoint, out=options.out)
    )


def export(config: ExperimentConfig, *, checkpoint: Path | None = None, out: Path | None = None) -> None:
    """Write the checkpoint, or the run's newest, to `out`. Collective over all ranks; starts no fleet.

    Raises CheckpointError where there is no checkpoint, or the folder cannot be written.
    """
    out = out or run_folder(config) / "hf"
    check_export_target(out)  # before minutes of loading
    with open_session(config, for_training=False, with_fleet=False) as session:
        step = session.load_policy(checkpoint)
        if step == 0:
            raise CheckpointError(f"{checkpoint_folder(config)} holds no complete checkpoint; train first")
        session.export(out)
        if torch.distributed.get_rank() == 0:
            print(f"step {step} -> {out}")


if __name__ == "__main__":
    sys.exit(main())
