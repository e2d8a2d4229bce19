"""A run that was killed and started again takes the same updates as one that was not, bit for bit."""

import json
from pathlib import Path

import pytest
from recording import record_episodes
from runs import await_step, kill_tree, metrics, run, start, write_config

STEPS = 5
UPDATE_METRICS = ("loss", "policy_loss", "grad_norm", "entropy", "ratio_mean", "clip_frac", "return_mean")
UPDATE_METRICS += ("value_loss", "value_explained_var", "critic_grad_norm", "advantage_abs_max")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded episodes of all steps, and the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("resume")
    record_episodes(folder, steps=STEPS)
    run("train", _config(folder, "undisturbed"))
    return folder


def _config(folder: Path, name: str) -> Path:
    own = folder / name
    own.mkdir()
    return write_config(
        own,
        run={"name": "run", "dir": str(own), "steps": STEPS},
        model={"path": str(folder / "model"), "dtype": "fp32", "builder": {"name": "tiny_qwen3"}},
        data={"train": str(_rows(folder))},
        rollout={"replay": str(folder / "trajectories.jsonl"), "max_model_len": 256},
        parallel={"tensor": 2},
        algorithm={
            "advantage": {"name": "gae_step", "gamma": 0.9, "lam": 0.9, "whiten": True},
            "reward": {"normalise": "running_std"},
            "critic": {"lr": 1e-3, "epochs": 2, "warmup_steps": 1, "value_clip": 0.5, "privileged": "answer"},
            "minibatches": 2,
            "kl": {"coef": 0.01},
        },
        optimizer={"lr": 1e-3, "schedule": "cosine", "warmup_updates": 2},
        checkpoint={"every": 1},
    )


def _rows(folder: Path) -> Path:
    """Rows with what the critic sees; a replay takes the recorded episodes and asks the rows only whether they do."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [], "extra_info": {"answer": "left"}}) + "\n")
    return path


def test_a_killed_run_goes_on_as_if_it_had_not_been(folder: Path) -> None:
    config = _config(folder, "killed")
    for step in (1, 3):
        process = start("train", config)
        await_step(folder / "killed" / "run", step, timeout_s=120)
        kill_tree(process)
    assert _last_step(folder / "killed" / "run") < STEPS, "the run was over before it could be killed"
    run("train", config)
    expected, resumed = metrics(folder / "undisturbed" / "run"), metrics(folder / "killed" / "run")
    assert [record["step"] for record in resumed] == [record["step"] for record in expected]
    for undisturbed, killed in zip(expected, resumed, strict=True):
        assert {name: killed.get(name) for name in UPDATE_METRICS} == {
            name: undisturbed.get(name) for name in UPDATE_METRICS
        }
    assert all("value_loss" in record for record in resumed[1:])
    assert all("loss" in record for record in resumed[2:]), "the policy is trained from the second step on"


def _last_step(run_folder: Path) -> int:
    records = metrics(run_folder) if (run_folder / "metrics.jsonl").exists() else []
    return records[-1]["step"] if records else -1


def test_a_complete_run_does_not_train_further(folder: Path) -> None:
    before = metrics(folder / "undisturbed" / "run")
    run("train", folder / "undisturbed" / "experiment.yaml")
    assert metrics(folder / "undisturbed" / "run") == before
