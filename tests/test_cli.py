"""The command line: what it accepts, what it prints, and with which code it ends."""

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import local
from megatron_agent import cli
from megatron_agent.config_loading import load_config
from megatron_agent.errors import CheckpointError, ConfigError, FleetError, WeightSyncError

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = "yaml_configs/quickstart.yaml"
EXPERIMENTS = sorted(
    path for path in (REPOSITORY / "yaml_configs").glob("*.yaml") if path.name != "quickstart_opd.yaml"
)  # that one wants the quickstart's model
COMMANDS = ["train", "eval", "export", "check", "schema", "report", "launch slurm"]
CHECK_S = 2.0


@pytest.fixture(autouse=True)
def repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megatron-agent", *arguments])
    return cli.main()


@pytest.fixture
def started(monkeypatch):
    """What the commands would start, instead of starting it: (module, arguments)."""
    calls: list[tuple[str, list[str]]] = []

    def run_ranks(config, module, arguments):
        calls.append((module, list(arguments)))
        return 0

    monkeypatch.setattr(local, "run_ranks", run_ranks)
    return calls


# ---------------------------------------------------------------- check


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_check_is_fast_and_loads_nothing_heavy(path):
    """As a user runs it, imports included. The best of three: other tests may keep the machine busy."""
    program = (
        "import sys; from megatron_agent.cli import main; code = main(); "
        "heavy = {'torch', 'vllm', 'megatron', 'ray', 'transformers'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", program, "check", str(path)], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == f"{path}: no mistakes found\n"
        if seconds[-1] < CHECK_S:
            return
    pytest.fail(f"check took {min(seconds):.1f} s")


def test_check_finds_mistakes(monkeypatch, capsys):
    assert run(monkeypatch, "check", QUICKSTART, "rollout.top_p=0.9") == ConfigError.exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: rollout.top_p is 0.9: ")


@pytest.mark.parametrize("command", ["check", "train"])
def test_printed_configuration_loads_back(monkeypatch, capsys, tmp_path, started, command):
    overrides = ["run.steps=3", "optimizer.lr=2e-4"]
    assert run(monkeypatch, command, QUICKSTART, "--print-config", *overrides) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path) == load_config(QUICKSTART, overrides)
    assert started == []


# ---------------------------------------------------------------- commands that start ranks


def test_train_hands_file_and_overrides_to_the_ranks(monkeypatch, started):
    assert run(monkeypatch, "train", QUICKSTART, "run.steps=3", "optimizer.lr=1e-4") == 0
    assert started == [("megatron_agent.train", [QUICKSTART, "run.steps=3", "optimizer.lr=1e-4"])]


def test_train_starts_nothing_with_mistakes(monkeypatch, started, capsys):
    assert run(monkeypatch, "train", QUICKSTART, "parallel.tensor=3") == ConfigError.exit_code
    assert "parallel.tensor 3 does not divide" in capsys.readouterr().err
    assert started == []


def test_options_may_stand_between_overrides(monkeypatch, started, tmp_path):
    arguments = ["eval", QUICKSTART, "eval.samples=2", "--checkpoint", str(tmp_path), "run.seed=1", "--debug"]
    assert run(monkeypatch, *arguments) == 0
    assert started == [
        ("megatron_agent.evaluate", ["--checkpoint", str(tmp_path), QUICKSTART, "eval.samples=2", "run.seed=1"])
    ]


def test_export(monkeypatch, started, tmp_path):
    assert run(monkeypatch, "export", QUICKSTART, "--out", str(tmp_path / "hf")) == 0
    assert started == [("megatron_agent.export", ["--out", str(tmp_path / "hf"), QUICKSTART])]


def test_missing_checkpoint(monkeypatch, started, capsys):
    assert run(monkeypatch, "eval", QUICKSTART, "--checkpoint", "nowhere") == ConfigError.exit_code
    assert "--checkpoint nowhere: there is no such folder" in capsys.readouterr().err
    assert started == []


def test_exit_code_of_the_ranks(monkeypatch):
    monkeypatch.setattr(local, "run_ranks", lambda *_: 4)
    assert run(monkeypatch, "train", QUICKSTART) == 4


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FleetError("no replica"), 4, "error: no replica"),
        (WeightSyncError("tensor w differs"), 5, "error: tensor w differs"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left", "runs/x"), CheckpointError.exit_code, "the disk is full (runs/x)"),
    ],
)
def test_errors_with_a_remedy_end_in_one_line(monkeypatch, capsys, error, code, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(local, "run_ranks", fail)
    assert run(monkeypatch, "train", QUICKSTART) == code
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    with pytest.raises(type(error)):
        run(monkeypatch, "train", QUICKSTART, "--debug")


def test_defects_keep_their_traceback(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(local, "run_ranks", fail)
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, "train", QUICKSTART)


def test_sigterm(monkeypatch):
    def stop(*_):
        raise local.Stopped(15)

    monkeypatch.setattr(local, "run_ranks", stop)
    assert run(monkeypatch, "train", QUICKSTART) == 143


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(monkeypatch, capsys, command):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *command.split(), "--help")
    assert end.value.code == 0
    assert f"example:\n  megatron-agent {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian", QUICKSTART], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", QUICKSTART, "--stepz", "3"], "unknown argument --stepz; see `megatron-agent train --help`"),
        (["report", "runs/x", "y"], "unknown argument y; see `megatron-agent report --help`"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_schema(monkeypatch, capsys):
    assert run(monkeypatch, "schema") == 0
    assert capsys.readouterr().out == (REPOSITORY / "yaml_configs/schema.json").read_text()
    assert run(monkeypatch, "schema", "--markdown") == 0
    assert capsys.readouterr().out == (REPOSITORY / "docs/configuration.md").read_text()


def test_schema_names_the_options(monkeypatch, capsys):
    run(monkeypatch, "schema")
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["RolloutConfig"]["properties"]["temperature"]["description"].startswith(
        "Sampling temperature"
    )


def test_report_of_what_is_no_run(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "report", str(tmp_path)) == ConfigError.exit_code
    assert f"{tmp_path} holds no metrics.jsonl; name the folder of a run" in capsys.readouterr().err


def test_slurm_without_sbatch(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch, "launch", "slurm", QUICKSTART) == ConfigError.exit_code
    assert "there is no sbatch on the PATH" in capsys.readouterr().err


def test_slurm_size_given_twice(monkeypatch, capsys):
    arguments = ["launch", "slurm", QUICKSTART, "cluster.trainer_nodes=2", "--nodes", "4", "--dry-run"]
    assert run(monkeypatch, *arguments) == ConfigError.exit_code
    assert "cluster.trainer_nodes is overridden too; keep one of the two" in capsys.readouterr().err
