"""The command line: `megatron-agent COMMAND CONFIG [key=value ...]`. Commands import what they need when they run."""

import argparse
import errno
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import CheckpointError, ConfigError, MegatronAgentError

DESCRIPTION = "Reinforcement learning for LLM agents on Megatron-core and vLLM."
INTERRUPTED = 130


def main() -> int:
    """Entry point of the `megatron-agent` script; returns the exit code.

    Errors with a remedy, a full disk and Ctrl-C end with one message; anything else is a defect and keeps its
    traceback. `--debug` shows all tracebacks.
    """
    sys.path.insert(0, "")  # as `python -m` does: own tools and environments lie in the current folder
    debug = "--debug" in sys.argv[1:]
    try:
        return run_command(sys.argv[1:])
    except KeyboardInterrupt:
        message, code = "interrupted", INTERRUPTED
        if debug:
            raise
    except MegatronAgentError as error:
        message, code = f"error: {error}", error.exit_code
        if debug:
            raise
    except OSError as error:
        if debug or error.errno != errno.ENOSPC:
            raise
        message = f"error: the disk is full ({error.filename or 'unknown file'}); free some space and start again"
        code = CheckpointError.exit_code
    print(message, file=sys.stderr)
    return code


def run_command(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. Raises MegatronAgentError for what the user can mend."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse stops collecting `key=value` at the first option, so those behind an option arrive here.
    unknown = [item for item in rest if item.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        parser.error(f"unknown argument {unknown[0]}; see `megatron-agent {arguments.command} --help`")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-agent", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = _add_experiment_command(
        commands, "train", _train, "train an agent on this machine", "yaml_configs/quickstart.yaml run.steps=20"
    )
    train.add_argument("--print-config", action="store_true", help="print the complete configuration and stop")

    evaluate = _add_experiment_command(
        commands, "eval", _evaluate, "run the held-out rows and print the scores", "yaml_configs/quickstart.yaml"
    )
    _add_checkpoint(evaluate)

    export = _add_experiment_command(
        commands,
        "export",
        _export,
        "write a checkpoint as an HF folder for transformers and vLLM",
        "yaml_configs/quickstart.yaml --out models/trained",
    )
    _add_checkpoint(export)
    export.add_argument("--out", type=Path, help="folder to write (default: hf/ in the run folder)")

    check = _add_experiment_command(
        commands, "check", _check, "find mistakes in a configuration; starts nothing", "yaml_configs/quickstart.yaml"
    )
    check.add_argument("--print-config", action="store_true", help="print the complete configuration as well")

    schema = _add_command(commands, "schema", _schema, "print the JSON schema of the configuration", "> schema.json")
    schema.add_argument("--markdown", action="store_true", help="print the reference page instead")

    report = _add_command(commands, "report", _report, "write report.html of a run", "runs/quickstart")
    report.add_argument("run_dir", type=Path, help="folder of the run")

    _add_launch(commands)
    return parser


def _add_launch(commands: argparse._SubParsersAction) -> None:
    launch = commands.add_parser("launch", help="start a run on a cluster", description="Start a run on a cluster.")
    targets = launch.add_subparsers(dest="target", required=True, metavar="TARGET")
    slurm = _add_experiment_command(
        targets,
        "slurm",
        _launch_slurm,
        "submit a run to SLURM",
        "yaml_configs/quickstart.yaml --nodes 4 --rollout-nodes 2 --gpus-per-node 8 --dry-run",
        prefix="launch slurm",
    )
    slurm.add_argument("--nodes", type=int, help="trainer nodes (default: cluster.trainer_nodes)")
    slurm.add_argument(
        "--rollout-nodes", type=int, help="further nodes that only run the fleet (default: cluster.rollout_nodes)"
    )
    slurm.add_argument("--gpus-per-node", type=int, help="GPUs of each node (default: cluster.gpus_per_node)")
    slurm.add_argument("--partition", help="SLURM partition")
    slurm.add_argument("--account", help="SLURM account")
    slurm.add_argument(
        "--time", default="24:00:00", help="time limit; the job requeues and resumes (default: %(default)s)"
    )
    slurm.add_argument("--dry-run", action="store_true", help="print the script and stop")


def _add_command(commands, name: str, run, summary: str, example: str, *, prefix: str = "") -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  megatron-agent {prefix or name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=run)
    return command


def _add_experiment_command(commands, name, run, summary, example, *, prefix: str = "") -> argparse.ArgumentParser:
    command = _add_command(commands, name, run, summary, example, prefix=prefix)
    command.add_argument("config", type=Path, metavar="CONFIG", help="experiment file (YAML)")
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="options over the file's, for example run.steps=20",
    )
    return command


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help="checkpoint folder (default: the run's newest)")


def _load_checked(arguments: argparse.Namespace) -> ExperimentConfig:
    from megatron_agent.config_check import check_config
    from megatron_agent.config_loading import load_config

    config = load_config(arguments.config, arguments.overrides)
    check_config(config, arguments.overrides)
    return config


def _train(arguments: argparse.Namespace) -> int:
    config = _load_checked(arguments)
    if arguments.print_config:
        _print_config(config)
        return 0
    print(_summary(config), flush=True)
    return _run_ranks(arguments, config, "megatron_agent.train")


def _summary(config: ExperimentConfig) -> str:
    """What starts now: the first line a user sees, because imports and engines take the best part of a minute."""
    from megatron_agent.config_layout import run_folder, runs_on_gpus, trainer_layout

    rollout, ranks = config.rollout, trainer_layout(config).world_size
    fleet = f"replay of {rollout.replay}" if rollout.replay else f"{rollout.replicas} vLLM replica(s)"
    return (
        f"{config.run.name}: {config.run.steps} steps, {ranks} trainer rank(s), {fleet}, "
        f"on {'GPUs' if runs_on_gpus(config) else 'CPU'}; files in {run_folder(config)}"
    )


def _evaluate(arguments: argparse.Namespace) -> int:
    return _run_ranks(arguments, _load_checked(arguments), "megatron_agent.evaluate", *_checkpoint_option(arguments))


def _export(arguments: argparse.Namespace) -> int:
    options = [*_checkpoint_option(arguments), *(("--out", str(arguments.out)) if arguments.out else ())]
    return _run_ranks(arguments, _load_checked(arguments), "megatron_agent.export", *options)


def _checkpoint_option(arguments: argparse.Namespace) -> list[str]:
    if arguments.checkpoint is None:
        return []
    if not arguments.checkpoint.is_dir():
        raise ConfigError(
            f"--checkpoint {arguments.checkpoint}: there is no such folder; see checkpoints/ in the run folder"
        )
    return ["--checkpoint", str(arguments.checkpoint)]


def _run_ranks(arguments: argparse.Namespace, config: ExperimentConfig, module: str, *options: str) -> int:
    from launch.local import Stopped, run_ranks

    try:
        return run_ranks(config, module, [*options, str(arguments.config), *arguments.overrides])
    except Stopped as stopped:
        return stopped.exit_code


def _check(arguments: argparse.Namespace) -> int:
    config = _load_checked(arguments)
    if arguments.print_config:
        _print_config(config)
    else:
        print(f"{arguments.config}: no mistakes found")
    return 0


def _print_config(config: ExperimentConfig) -> None:
    from megatron_agent.config_loading import dump_config

    print(dump_config(config), end="")


def _schema(arguments: argparse.Namespace) -> int:
    from megatron_agent.config_schema import json_schema, reference_page

    print(reference_page() if arguments.markdown else json.dumps(json_schema(), indent=2))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    if not (arguments.run_dir / "metrics.jsonl").exists():
        raise ConfigError(
            f"{arguments.run_dir} holds no metrics.jsonl; name the folder of a run, such as runs/quickstart"
        )
    from megatron_agent.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def _launch_slurm(arguments: argparse.Namespace) -> int:
    from launch.slurm import render_script, submit
    from megatron_agent.config_layout import log_folder

    sizes = {
        "cluster.trainer_nodes": arguments.nodes,
        "cluster.rollout_nodes": arguments.rollout_nodes,
        "cluster.gpus_per_node": arguments.gpus_per_node,
    }
    arguments.overrides = [
        *arguments.overrides,
        *(f"{key}={value}" for key, value in sizes.items() if value is not None),
    ]
    config = _load_checked(arguments)
    script = render_script(
        config,
        arguments.config,
        arguments.overrides,
        partition=arguments.partition,
        account=arguments.account,
        time_limit=arguments.time,
    )
    print(script if arguments.dry_run else submit(script, log_folder(config)), end="\n")
    return 0
