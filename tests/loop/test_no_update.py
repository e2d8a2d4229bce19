"""A step whose groups all ended alike teaches nothing, and still says how far trainer and fleet are apart."""

from pathlib import Path

from recording import record_episodes
from runs import metrics, run, write_config


def test_equal_returns_change_no_weight(tmp_path: Path) -> None:
    record_episodes(tmp_path, steps=2, outcomes=(1.0,))
    config = write_config(
        tmp_path,
        rollout={"replay": str(tmp_path / "trajectories.jsonl"), "max_model_len": 256},
        parallel={"tensor": 1, "pipeline": 2},
    )
    run("train", config)
    first, second = metrics(tmp_path / "runs" / "run")[1:]
    for record in (first, second):
        assert record["num_updates"] == 0
        # Recorded log-probs lie between -1 and 0, those of an untrained model near -log(330).
        assert 4 < record["logprob_gap_mean"] < 6
        assert record["logprob_gap_max"] >= record["logprob_gap_mean"]
        assert "grad_norm" not in record
