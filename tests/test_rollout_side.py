"""What rank 0 checks before a fleet starts, and what it makes of a step's numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_records import one_step_group

from megatron_agent.batching import Minibatch, TrainingBatch
from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError, DataError
from megatron_agent.rollout_side import RolloutSide, _load_rows, _lock
from rollout.episodes import RolloutResult


def test_a_run_folder_has_one_writer(tmp_path: Path) -> None:
    with _lock(tmp_path / "run"), pytest.raises(ConfigError, match="being written by another process"):
        _lock(tmp_path / "run")
    _lock(tmp_path / "run").close()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "2+2?", "reward_model": {"style": "rules", "ground_truth": "4"}}, "did you mean 'rule'"),
        ({"prompt": "2+2?", "agent_name": "single_stepp"}, "did you mean 'single_step'"),
    ],
)
def test_rows_that_name_what_does_not_exist(tmp_path: Path, row: dict, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = ExperimentConfig.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": str(path)}}
    )
    with pytest.raises(DataError, match=said):
        _load_rows(config, str(path), {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("answer", "row 1: no extra_info.answer, which algorithm.critic.privileged answer shows the critic"),
        ("ground_truth", "row 1: no reward_model.ground_truth, which"),
    ],
)
def test_a_row_without_what_the_critic_is_to_see(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    whole = {"prompt": "2+2?", "extra_info": {"answer": 4}, "reward_model": {"ground_truth": ""}}
    path.write_text(json.dumps(whole) + "\n" + json.dumps({"prompt": "2+3?", "extra_info": {"answers": 5}}) + "\n")
    config = ExperimentConfig.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": str(path)}}
    )
    with pytest.raises(DataError, match=said):
        _load_rows(config, str(path), {}, privileged=name)
    path.write_text(json.dumps(whole) + "\n")
    assert len(_load_rows(config, str(path), {}, privileged=name)) == 1


def test_the_configured_reward_makes_styles_meaningless(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2?", "reward_model": {"style": "model", "ground_truth": "4"}}) + "\n")
    config = ExperimentConfig.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": str(path)}, "agent": {"reward": "exact"}}
    )
    assert len(_load_rows(config, str(path), {})) == 1


def test_the_speed_of_training_is_that_of_the_tokens_before_sharing() -> None:
    """Two minibatches of 600 tokens together, three updates: the first of them twice. 5 s for it."""
    config = ExperimentConfig.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": "rows.jsonl"}}
    )
    anything: Any = None
    side = RolloutSide(
        config=config,
        fleet=None,
        episodes=anything,
        teacher=None,
        rows=anything,
        eval_rows=[],
        logger=anything,
        recorder=anything,
        display=anything,
        player=anything,
    )
    minibatch = Minibatch(per_data_rank=[], denominator=1.0)
    batch = TrainingBatch(minibatches=[minibatch] * 2, metrics={"sample_tokens": 600.0, "packed_tokens": 100.0})
    result = RolloutResult(groups=[one_step_group(1, 0)], seconds=2.0, num_retries=0)
    seconds = {"rollout_s": 2.0, "logprobs_s": 1.0, "update_s": 4.0}
    metrics = side.step_metrics(1, result, batch, [{}] * 3, [], {}, seconds)
    assert metrics["train_tokens_per_s"] == 600 / 2 * 3 / 5
