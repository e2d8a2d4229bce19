"""Algorithms through the whole command, on recorded episodes: credit that waits for what models say of the tokens."""

from pathlib import Path

import pytest
from recording import record_episodes
from runs import metrics, run, write_config

from megatron_agent.model_folders.tiny_qwen3 import build

STEPS = 3
CRITIC = {
    "advantage": {"name": "gae_step", "gamma": 0.9, "lam": 0.9, "whiten": True},
    "critic": {"lr": 1e-3, "epochs": 2, "warmup_steps": 1, "value_clip": 0.5},
    "kl": {"coef": 0.1, "placement": "reward"},
    "loss": {"name": "step_gspo"},
    "correction": {"tis": "step"},
    "minibatches": 2,
    "epochs": 2,
}
TIMES = ("_s", "_per_s", "time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("algorithms")
    record_episodes(folder, steps=STEPS)
    build(folder / "teacher", seed=1, initializer_range=0.1)
    return folder


def trained(folder: Path, name: str, algorithm: dict, **parallel: int) -> list[dict[str, float]]:
    """The metrics of each training step of a run over the recording."""
    own = folder / name
    own.mkdir()
    run(
        "train",
        write_config(
            own,
            run={"name": "run", "dir": str(own), "steps": STEPS},
            agent={"max_episode_tokens": 128},
            model={"path": str(folder / "model"), "dtype": "fp32", "builder": {"name": "tiny_qwen3"}},
            rollout={"replay": str(folder / "trajectories.jsonl"), "max_model_len": 256},
            algorithm=algorithm,
            packing={"tokens_per_row": 64},
            parallel=parallel,
            optimizer={"lr": 1e-3},
        ),
    )
    return [record for record in metrics(own / "run") if record["step"] > 0]


def test_a_critic_gives_the_same_credit_on_any_ranks(folder):
    """Values from all data ranks, whitening over all of them, markers behind truncated episodes, a teacher's tokens
    that only last stages know: no rank waits for another, and the numbers are those of one rank."""
    algorithm = CRITIC | {"teacher": {"path": str(folder / "teacher"), "top_k": 64, "divergence": "js"}}
    alone = trained(folder, "alone", algorithm)
    split = trained(folder, "split", algorithm, pipeline=2, data=2)
    for one, four in zip(alone, split, strict=True):
        layout = {"packed_rows", "packed_tokens", "padding_frac", "shared_frac", "rank_balance"}
        names = {name for name in one if not name.endswith(TIMES)} - layout
        assert {name: four[name] for name in names} == pytest.approx(
            {name: one[name] for name in names}, rel=2e-4, abs=1e-6
        )
    assert "loss" not in alone[0], "the first step only trains the critic"
    assert alone[0]["logprob_gap_mean"] > 0
    assert alone[1]["num_updates"] == 4
    assert alone[1]["value_loss"] > 0
    assert alone[1]["distill"] > 1e-4
    assert 0 < alone[1]["correction_ess"] <= 1 + 1e-6


def test_a_teacher_that_is_the_policy_gives_no_credit(folder):
    records = trained(folder, "distilled", {"advantage": {"name": "opd"}, "teacher": {"path": str(folder / "model")}})
    assert records[0]["advantage_abs_max"] == pytest.approx(0, abs=1e-6)
    assert records[0]["loss"] == pytest.approx(0, abs=1e-6)


def test_the_greedy_episode_is_the_baseline_and_a_far_policy_skips_updates(folder):
    options = {"advantage": {"name": "remax"}, "epochs": 3, "minibatches": 2, "target_kl": 1e-9}
    records = trained(folder, "greedy", options)
    assert records[0]["num_updates"] == 2, "the first update is on the old policy, the second one is not any more"
    assert records[0]["advantage_abs_max"] > 0


def test_a_teacher_on_engines_of_its_own_says_what_one_on_the_ranks_says(folder):
    options = {"advantage": {"name": "opd"}, "teacher": {"path": str(folder / "teacher")}}
    on_ranks = trained(folder, "on_ranks", options)
    options["teacher"] |= {"replicas": 2}
    on_engines = trained(folder, "on_engines", options)
    names = ("advantage_mean", "advantage_abs_mean", "advantage_abs_max", "loss", "grad_norm")
    for ranks, engines in zip(on_ranks, on_engines, strict=True):
        assert [engines[name] for name in names] == pytest.approx([ranks[name] for name in names], rel=1e-3, abs=1e-6)
    assert on_ranks[0]["advantage_abs_mean"] > 0.1
