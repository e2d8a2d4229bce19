"""Whole runs with a real fleet: the trainer's log-probs equal the engine's, and a replica may die at any moment."""

from pathlib import Path

import pytest
import torch
from runs import assert_nothing_left, await_step, kill_one, kill_tree, metrics, run, start, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.recorder import read_trajectories

GAP_LIMIT = {"fp32": 1e-4, "bf16": 3e-2}
LR = {"fp32": 1e-2, "bf16": 1e-4}
"""The last norm's weights are ones, whose next value in bf16 is farther away than three steps of this size."""


def _model(folder: Path, *, tied: bool, dtype: str = "fp32") -> dict:
    return {
        "path": str(folder / "model"),
        "dtype": dtype,
        "builder": {"name": "tiny_qwen3", "args": {"tied": tied, "initializer_range": 0.1}},
    }


@pytest.mark.parametrize(
    ("tied", "tensor", "pipeline", "dtype"),
    [(True, 2, 1, "fp32"), (False, 1, 2, "fp32"), (True, 1, 2, "bf16"), (False, 2, 1, "bf16")],
    ids=["tied-TP2-fp32", "untied-PP2-fp32", "tied-PP2-bf16", "untied-TP2-bf16"],
)
def test_trainer_and_fleet_agree_after_every_sync(
    tmp_path: Path, tied: bool, tensor: int, pipeline: int, dtype: str
) -> None:
    config = write_config(
        tmp_path,
        model=_model(tmp_path, tied=tied, dtype=dtype),
        parallel={"tensor": tensor, "pipeline": pipeline},
        optimizer={"lr": LR[dtype]},
        sync={"verify": True, "delta": True, "bucket_mib": 1},
        algorithm={"minibatches": 2},
        run={"name": "run", "dir": str(tmp_path), "steps": 3},
    )
    run("train", config)
    records = metrics(tmp_path / "run")[1:]
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["num_updates"] > 0, "nothing was trained, so nothing was compared"
        assert record["logprob_gap_mean"] < GAP_LIMIT[dtype]
        assert record["staleness_max"] == 0
        sent = record["sync_tensors_sent_frac"]
        assert sent == 1 if dtype == "fp32" else 0.9 < sent < 1, "all but the last norm changed"


def test_evaluate_and_export_a_checkpoint(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        model=_model(tmp_path, tied=True),
        data={"train": "megatron_agent.envs.frozen_lake:rows", "eval": "megatron_agent.envs.frozen_lake:rows"},
        parallel={"tensor": 2},
        optimizer={"lr": 1e-2},
        run={"name": "run", "dir": str(tmp_path), "steps": 1},
    )
    run("train", config)
    assert '"eval_return_mean"' in run("eval", config, "parallel.tensor=1")
    run("export", config, "--out", tmp_path / "exported", "parallel.tensor=1", "parallel.pipeline=2")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    moved = [
        not torch.equal(old, new)
        for (_, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True)
    ]
    assert all(moved), "an exported tensor is still that of the base model"
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template


def test_a_dead_replica_is_replaced_and_its_episodes_are_played_again(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        model=_model(tmp_path, tied=True),
        rollout={"replicas": 2, "prompts_per_step": 8, "group_size": 16},
        sync={"delta": True},
        run={"name": "run", "dir": str(tmp_path), "steps": 5},
    )
    process = start("train", config)
    try:
        await_step(tmp_path / "run", 1)
        kill_one(process.pid, "VLLM::EngineCore")
        await_step(tmp_path / "run", 3)
        kill_one(process.pid, "ray::ReplicaEngine")
        output, _ = process.communicate(timeout=240)
    finally:
        kill_tree(process)
    assert process.returncode == 0, output[-6000:]
    assert_nothing_left(process)
    records = metrics(tmp_path / "run")[1:]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record["episodes"] == 8 * 16
        assert record["env_failed_frac"] == 0
        assert record["staleness_max"] == 0
        assert record["logprob_gap_mean"] < GAP_LIMIT["fp32"]


def test_groups_of_equal_returns_are_replaced_and_greedy_episodes_are_played(tmp_path: Path) -> None:
    """Nobody reaches the goal within 3 moves at random, so every round is played; each row has its greedy episode."""
    config = write_config(
        tmp_path,
        model=_model(tmp_path, tied=True),
        agent={"env": "frozen_lake", "reward": None},
        algorithm={"advantage": {"name": "remax"}, "filters": {"zero_variance": True, "max_resample_rounds": 2}},
        rollout={"prompts_per_step": 3},
        run={"name": "run", "dir": str(tmp_path), "steps": 1},
    )
    run("train", config)
    record = metrics(tmp_path / "run")[-1]
    played = [(phase, t) for step, phase, t in read_trajectories(tmp_path / "run" / "trajectories.jsonl") if step == 1]
    groups = {trajectory.group_id for _, trajectory in played}
    assert len(played) == len(groups) * (4 + 1)
    assert sum(phase == "greedy" for phase, _ in played) == len(groups)
    good = len(groups) - record["dropped_zero_variance"] / 4
    assert record["episodes"] == 4 * len(groups)
    assert 3 < len(groups) <= 9, "at least one group was replaced"
    assert good == 3 or len(groups) >= 7, "only the limit of rounds leaves a batch that is not full"
