"""Whole runs whose next episodes are played while they train: which weights play what, and nothing else changes."""

from pathlib import Path

import pytest
from recording import record_episodes
from runs import assert_nothing_left, await_step, kill_one, kill_tree, metrics, run, run_any, start, write_config

from megatron_agent.data import RowIterator, load_rows
from megatron_agent.errors import DataError
from parallel.checkpoint import latest
from rollout.recorder import read_trajectories
from trajectory.steps import Trajectory

STEPS = 3
TIMES = ("_s", "_per_s", "time")
CORRECTION = {"tis": "token", "cap": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    record_episodes(folder, steps=STEPS)
    return folder


def replayed(folder: Path, name: str, *, overlap: bool, **algorithm) -> list[dict[str, float]]:
    """The metrics of each training step of a run over the recording, times left out."""
    own = folder / name
    own.mkdir()
    run("train", replay_config(folder, own, overlap=overlap, **algorithm))
    return without_times(own / "run")


def replay_config(folder: Path, own: Path, *, overlap: bool, **algorithm) -> Path:
    return write_config(
        own,
        run={"name": "run", "dir": str(own), "steps": STEPS},
        model={"path": str(folder / "model"), "dtype": "fp32", "builder": {"name": "tiny_qwen3"}},
        rollout={"replay": str(folder / "trajectories.jsonl"), "max_model_len": 256, "overlap": overlap},
        algorithm={"correction": CORRECTION, "minibatches": 2, "kl": {"coef": 0.01}} | algorithm,
        parallel={"tensor": 2},
        optimizer={"lr": 1e-3, "schedule": "cosine"},
        checkpoint={"every": 1},
    )


def without_times(run_folder: Path) -> list[dict[str, float]]:
    records = [record for record in metrics(run_folder) if record["step"] > 0]
    sync = ("sync_bytes", "sync_tensors_sent_frac")  # that of a step is the sync before it, or behind it
    return [
        {name: value for name, value in record.items() if not name.endswith(TIMES) and name not in sync}
        for record in records
    ]


def test_the_same_episodes_give_the_same_updates_also_after_a_kill(folder: Path) -> None:
    expected = replayed(folder, "in_turn", overlap=False)
    assert all(record["num_updates"] == 2 for record in expected)
    assert all(record["correction_weight_mean"] != 1 for record in expected), "the correction has something to do"
    assert replayed(folder, "overlapped", overlap=True) == expected
    own = folder / "killed"
    own.mkdir()
    config = replay_config(folder, own, overlap=True)
    process = start("train", config)
    await_step(own / "run", 1)
    kill_tree(process)
    assert metrics(own / "run")[-1]["step"] < STEPS, "the run was over before it could be ended"
    run("train", config)
    assert without_times(own / "run") == expected


def test_episodes_that_are_too_old_are_dropped(folder: Path) -> None:
    """The recording's episodes are all of version 0: at step 3, which trains version 2, they are two versions old."""
    records = replayed(folder, "stale", overlap=True, filters={"max_staleness": 1})
    assert [record["staleness_max"] for record in records] == [0, 1, 2]
    assert [record.get("dropped_stale", 0) for record in records] == [0, 0, 3 * 4]
    assert [record["num_updates"] for record in records] == [2, 2, 0]


def test_what_fails_behind_training_ends_the_run_when_that_step_is_over(folder: Path) -> None:
    """The recording has no step after the last one; on two ranks."""
    own = folder / "failing"
    own.mkdir()
    config = replay_config(folder, own, overlap=True)
    output, code = run_any("train", config, f"run.steps={STEPS + 1}")
    assert code == DataError.exit_code
    assert f"no episodes of training step {STEPS + 1}; lower run.steps" in output
    assert "Traceback" not in output
    assert [record["step"] for record in without_times(own / "run")] == [1, 2, 3]
    newest = latest(own / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == f"step_{STEPS:08d}"


def fleet_config(folder: Path, *, steps: int, **rollout) -> Path:
    return write_config(
        folder,
        run={"name": "run", "dir": str(folder), "steps": steps},
        model={
            "path": str(folder / "model"),
            "dtype": "fp32",
            "builder": {"name": "tiny_qwen3", "args": {"initializer_range": 0.1}},
        },
        data={"train": "megatron_agent.envs.frozen_lake:rows", "eval": "megatron_agent.envs.frozen_lake:rows"},
        rollout={"overlap": True} | rollout,
        algorithm={"correction": CORRECTION},
        eval={"every": 2, "rows": 2},
        checkpoint={"every": 1},
        optimizer={"lr": 1e-2},
    )


@pytest.mark.timeout(600)  # a fleet starts twice
def test_each_step_trains_on_episodes_of_the_weights_before_the_newest(tmp_path: Path) -> None:
    """Ended (SIGTERM) and started again: the first step of either start has episodes of the newest weights, every
    other one those of one version before; no row is lost or played twice; evaluations are by the newest weights."""
    config = fleet_config(tmp_path, steps=5)
    process = start("train", config)
    try:
        await_step(tmp_path / "run", 2)
        process.terminate()  # while episodes are in flight
        process.communicate(timeout=90)
    finally:
        kill_tree(process)
    assert_nothing_left(process)
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    resumed_at = int(newest.name.removeprefix("step_"))
    assert resumed_at < 5, "the run was over before it could be killed"
    run("train", config)
    fresh = {1, resumed_at + 1}
    played: dict[tuple[int, str], list[Trajectory]] = {}
    for step, phase, trajectory in read_trajectories(tmp_path / "run" / "trajectories.jsonl"):
        played.setdefault((step, phase), []).append(trajectory)
    assert [step for step, _ in played] == sorted(step for step, _ in played), "lines are in the order of the steps"
    rows = RowIterator(load_rows("megatron_agent.envs.frozen_lake:rows", {}), seed=0, shuffle=True)
    for step in range(1, 6):
        episodes = played[step, "train"]
        versions = {own.policy_version for episode in episodes for own in episode.steps}
        assert versions == {step - 1 if step in fresh else step - 2}
        assert [episode.row_index for episode in episodes[::4]] == [row.index for row in rows.take(4)]
    for step, phase in ((0, "eval_before"), (2, "eval"), (4, "eval"), (5, "eval_after")):
        assert {own.policy_version for episode in played[step, phase] for own in episode.steps} == {step}
    records = {record["step"]: record for record in metrics(tmp_path / "run") if record["step"] > 0}
    assert sorted(records) == [1, 2, 3, 4, 5]
    for step, record in records.items():
        assert record["staleness_mean"] == record["staleness_max"] == (0 if step in fresh else 1)
        if step not in fresh:
            played_s = record["rollout_s"] + record["rollout_hidden_s"]
            trained_s = sum(records[step - 1][f"{phase}_s"] for phase in ("credit", "logprobs", "update"))
            assert record["rollout_hidden_s"] > 0.9 * min(played_s, trained_s), "they were not at work at the same time"


def test_a_replica_dies_while_the_trainer_works(tmp_path: Path) -> None:
    config = fleet_config(tmp_path, steps=5, replicas=2, prompts_per_step=8, group_size=16)
    process = start("train", config)
    try:
        await_step(tmp_path / "run", 2)
        kill_one(process.pid, "ray::ReplicaEngine")
        output, _ = process.communicate(timeout=240)
    finally:
        kill_tree(process)
    assert process.returncode == 0, output[-6000:]
    assert_nothing_left(process)
    records = [record for record in metrics(tmp_path / "run") if record["step"] > 0]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record["episodes"] == 8 * 16
        assert record["env_failed_frac"] == 0
        assert record["staleness_max"] <= 1
    for step, phase, episode in read_trajectories(tmp_path / "run" / "trajectories.jsonl"):
        versions = {own.policy_version for own in episode.steps}
        assert len(versions) == 1, "an episode is played by one version of the weights"
        assert phase != "train" or versions <= {step - 1, step - 2}
