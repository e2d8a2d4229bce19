"""Runs over several machines as SLURM jobs: fills in `slurm/train.sbatch`, which says how, and submits it."""

import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.environment import torchrun_environment
from launch.local import output_options
from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import fleet_gpus, log_folder, trainer_layout
from megatron_agent.errors import ConfigError

TEMPLATE = Path(__file__).with_name("slurm") / "train.sbatch"


class _Template(string.Template):
    """Placeholders with `@@`, since the shell has `$`."""

    delimiter = "@@"


def render_script(
    config: ExperimentConfig,
    config_path: str | Path,
    overrides: Sequence[str],
    *,
    partition: str | None = None,
    account: str | None = None,
    time_limit: str = "24:00:00",
) -> str:
    """The sbatch script of a run; `overrides` are those that are part of `config` already.

    Relative paths start in the current folder. Raises ConfigError for options that contradict the script: it starts
    Ray itself, and it resumes after its time limit.
    """
    cluster, layout = config.cluster, trainer_layout(config)
    if cluster.ray_address is not None:
        raise ConfigError(
            f"cluster.ray_address is {cluster.ray_address}, but the SLURM job starts a Ray cluster itself; remove it"
        )
    if config.run.resume == "never":
        raise ConfigError("run.resume is `never`, but a SLURM job that reached its time limit resumes; set it to auto")
    options = {"partition": partition, "account": account, "gpus-per-node": cluster.gpus_per_node or None}
    own_gpus = fleet_gpus(config)
    values = {
        "name": _sbatch_value(config.run.name),
        "folder": _sbatch_value(Path.cwd()),
        "logs": _sbatch_value(str(log_folder(config).absolute()).replace("%", "%%")),
        "nodes": cluster.trainer_nodes + cluster.rollout_nodes,
        "time": _sbatch_value(time_limit),
        "sbatch_options": "\n".join(
            f"#SBATCH --{name}={_sbatch_value(value)}" for name, value in options.items() if value is not None
        ),
        "python_folder": shlex.quote(str(Path(sys.executable).parent)),
        "config": shlex.quote(str(config_path)),
        "overrides": shlex.join(overrides),
        "run": shlex.quote(str(log_folder(config).parent)),
        "trainer_nodes": layout.nodes,
        "rollout_nodes": cluster.rollout_nodes,
        "ranks_per_node": layout.ranks_per_node,
        "gpus_per_node": cluster.gpus_per_node,
        "first_fleet_gpu": own_gpus[0] if own_gpus else 0,
        "threads_per_rank": config.parallel.threads_per_rank,
        "master_port": cluster.master_port,
        "torchrun_options": shlex.join(output_options(layout.ranks_per_node)),
        "environment": "\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in torchrun_environment().items()
        ),
    }
    return _Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)


def submit(script: str, folder: Path) -> str:
    """Keep the script in `folder`, where the job's output goes too, and submit it; returns what sbatch says.

    Raises ConfigError where there is no sbatch, or where it refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch on the PATH, so nothing was submitted; run this on a login node of the SLURM cluster, "
            "or print the script with --dry-run"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.sbatch"
    path.write_text(script, encoding="utf-8")
    result = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(f"sbatch refused {path}: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return result.stdout.strip()


def _sbatch_value(value: object) -> str:
    """A value on an #SBATCH line; sbatch reads double quotes and backslashes, and nothing else of the shell."""
    text = str(value)
    if text and shlex.quote(text) == text:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
