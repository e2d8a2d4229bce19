"""Checkpoints: bit-for-bit resume, other parallel sizes, a full disk, SIGKILL while saving.

Groups of ranks run all jobs: some that write and are killed, a fresh one that resumes, one of four ranks.
"""

import signal

import pytest
from trainer_launch import Group, launch, log_tail, result

from megatron_agent.errors import CheckpointError
from megatron_agent.model_folders.tiny_qwen3 import build
from parallel import checkpoint

DISTRIBUTED = {"distributed_optimizer": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    build(folder / "model", tied=False)
    base = {"model": str(folder / "model"), "packing": "four_rows"}

    def stored(name: str) -> str:
        return str(folder / f"{name}_checkpoints")

    def job(name: str, **options) -> dict:
        return base | {"name": name} | options

    def pair(name: str, parallel: dict) -> list[dict]:
        """A run that saves after update 2 and goes on to update 6."""
        return [job(name, parallel=parallel, updates=6, save_after=2, save=stored(name))]

    writer = pair("plain", {}) + pair("sharded", DISTRIBUTED)
    writer += [job("bf16", dtype="bf16", updates=4, save_after=2, save=stored("bf16"), recompute_old=True)]
    writer += [job("before_first", updates=0, save_at_start=True, save=stored("before_first"))]
    writer += [job("killed", updates=2, save_after=2, save=stored("killed"), kill_in="write_tensors")]
    writer_2 = [job("killed_late", updates=2, save_after=2, save=stored("killed_late"), kill_in="_complete")]

    fresh = [job("plain_resumed", load=stored("plain"), updates=4)]
    fresh += [job("sharded_resumed", load=stored("sharded"), parallel=DISTRIBUTED, updates=4)]
    fresh += [job("bf16_resumed", load=stored("bf16"), dtype="bf16", updates=2, recompute_old=True)]
    fresh += [job("before_first_resumed", load=stored("before_first"), updates=2)]
    for killed in ("killed", "killed_late"):
        again = {"save_after": 2, "save": stored(killed)}
        fresh += [job(f"{killed}_resumed", load=stored(killed), updates=2, **again)]
    fresh += [job("full", load=stored("killed"), updates=0, save=stored("killed"), full_disk_on_rank=0)]

    four_ranks = []
    for kind, extra in (("plain", {}), ("sharded", DISTRIBUTED)):
        to_tp2, tp2 = f"{kind}_to_tp2", {"tensor": 2} | extra
        save = {"save_after": 2, "save": stored(to_tp2)}
        four_ranks += [job(to_tp2, load=stored(kind), updates=2, parallel=tp2, **save)]
        pp2 = {"pipeline": 2} | extra
        four_ranks += [job(f"{kind}_to_pp2", load=stored(to_tp2), updates=2, parallel=pp2)]
    full = {"updates": 0, "save": stored("plain_to_tp2"), "full_disk_on_rank": 1}
    four_ranks += [job("full_rank_1", parallel={"tensor": 2}, **full)]

    groups = [Group("writer", 1, writer), Group("writer_2", 1, writer_2)]
    groups += [Group("fresh", 1, fresh), Group("four_ranks", 4, four_ranks)]
    killed = [-signal.SIGKILL]
    exit_codes = launch(groups, folder)
    assert exit_codes == {"writer": killed, "writer_2": killed, "fresh": [0], "four_ranks": [0] * 4}, log_tail(folder)
    return folder


def names(folder, run: str) -> list[str]:
    return sorted(path.name for path in (folder / f"{run}_checkpoints").iterdir())


@pytest.mark.parametrize(("run", "first"), [("plain", 2), ("sharded", 2), ("bf16", 2), ("before_first", 0)])
def test_resumed_equals_uninterrupted_bit_for_bit(runs, run, first):
    uninterrupted = result(runs, "plain" if run == "before_first" else run)
    resumed = result(runs, f"{run}_resumed")
    assert resumed.metrics == uninterrupted.metrics[first : first + len(resumed.metrics)]
    if run in ("plain", "sharded", "bf16"):
        assert all(weight.equal(resumed.weights[key]) for key, weight in uninterrupted.weights.items())


def test_extra_state_returns(runs):
    assert result(runs, "plain_resumed").extra["extra_state"] == {"row": 16}


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_loads_under_other_parallel_sizes(runs, kind):
    """TP1 PP1 DP1 -> TP2 DP2 -> PP2 DP2, two updates each, against six on one rank."""
    uninterrupted = result(runs, kind).metrics
    for name, expected in ((f"{kind}_to_tp2", uninterrupted[2:4]), (f"{kind}_to_pp2", uninterrupted[4:6])):
        for got, want in zip(result(runs, name).metrics, expected, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["killed", "killed_late"])
def test_sigkill_while_saving_leaves_the_previous_checkpoint(runs, name):
    resumed = result(runs, f"{name}_resumed")
    assert resumed.extra["loaded"] == "step_00000002"
    assert resumed.metrics == result(runs, "plain").metrics[2:4]
    # The next save cleared away what the killed one had begun.
    assert names(runs, name) == ["step_00000002"]


@pytest.mark.parametrize(("name", "num_ranks"), [("full", 1), ("full_rank_1", 4)])
def test_full_disk_is_an_error_on_every_rank_and_leaves_nothing(runs, name, num_ranks):
    outcome = result(runs, name).extra["disk_full"]
    assert len(outcome["errors"]) == num_ranks
    assert all("earlier checkpoints are untouched" in error for error in outcome["errors"])
    assert outcome["left"] == ["step_00000002"]


def test_latest_ignores_unfinished_and_foreign_folders(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    for name in ("step_00000002", "step_00000010", ".incomplete-step_00000012", "step_x", "notes"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000010"


def test_unreadable_checkpoint_names_the_file(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        checkpoint.load(tmp_path / "step_00000001", model_chunks=[], optimizer=None, scheduler=None)
