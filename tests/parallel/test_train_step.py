"""The trainer's numbers do not depend on packing, microbatches or parallel sizes; and they are the right ones.

One group of one rank and one group of four run all jobs; the tests look at what they left. The reference for the
one-rank run is plain transformers, autograd and torch's AdamW, one sample at a time.
"""

import math

import pytest
import torch
import trainer_rows
from trainer_launch import Group, launch, log_tail, result
from transformers import AutoModelForCausalLM

from megatron_agent.model_folders.tiny_qwen3 import build

PACKINGS = [name for name in trainer_rows.PACKINGS if name != "one_sample_a_row"]
ONE_RANK = {
    "full_recompute": {"parallel": {"recompute": "full"}},
    "selective_recompute": {"parallel": {"recompute": "selective"}},
    "distributed_optimizer": {"parallel": {"distributed_optimizer": True}},
}
FOUR_RANKS = {
    "tp2_dp2": {"tensor": 2},
    "pp2_dp2": {"pipeline": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_sp_dp2": {"tensor": 2, "sequence": True},
    "tp2_sp_pp2": {"tensor": 2, "pipeline": 2, "sequence": True},
    "tp2_sp_pp2_recompute": {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full"},
    "dp4": {},
    "dp4_distributed_optimizer": {"distributed_optimizer": True},
    "tp2_dp2_distributed_optimizer": {"tensor": 2, "distributed_optimizer": True},
}

OBJECTIVES = {
    "dapo": {"loss": {"name": "dapo"}},
    "dr_grpo": {"loss": {"name": "dr_grpo", "dual_clip": 3.0}},
    "gspo": {"loss": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1}, "correction": {"tis": "sequence"}},
    "step_gspo": {"loss": {"name": "step_gspo", "clip_low": 0.1, "clip_high": 0.1}, "correction": {"tis": "step"}},
    "cispo": {"loss": {"name": "cispo"}, "correction": {"tis": "token", "mask": "token_band"}},
    "sapo": {"loss": {"name": "sapo"}, "correction": {"mask": "geometric_band", "low": 0.5, "high": 2.0}},
    "reinforce": {"loss": {"name": "reinforce"}, "kl": {"coef": 0.1, "estimator": "k1", "gradient": "k2"}},
}
TEACHER = {"top_k": 8, "coef": 2.0}
DISTILLED = ("tp2_dp2", "pp2_dp2", "tp2_pp2", "tp2_sp_dp2")
"""Of FOUR_RANKS, those that distil."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train_step")
    build(folder / "tied")
    build(folder / "untied", tied=False)
    base = {"model": str(folder / "tied"), "packing": "one_sample_a_row", "updates": 2}
    one_rank = [base | {"name": "base"}]
    one_rank += [base | {"name": "base_trajectory", "denominator": "trajectory"}]
    one_rank += [base | {"name": "base_untied", "model": str(folder / "untied")}]
    one_rank += [base | {"name": "first_update", "updates": 1}]
    one_rank += [base | {"name": packing, "packing": packing} for packing in PACKINGS]
    one_rank += [base | {"name": name, "packing": "four_rows"} | options for name, options in ONE_RANK.items()]
    on_policy = base | {"updates": 1, "recompute_old": True, "packing": "four_rows", "temperature": 0.5}
    one_rank += [on_policy | {"name": "on_policy"}, on_policy | {"name": "on_policy_bf16", "dtype": "bf16"}]
    bf16 = base | {"name": "bf16_distributed_optimizer", "dtype": "bf16"}
    one_rank += [base | {"name": "bf16", "dtype": "bf16"}, bf16 | {"parallel": {"distributed_optimizer": True}}]
    shuffled = base | {"packing": "four_rows_shuffled"}  # on dp4, one rank has nothing but padding
    one_rank += [base | {"name": f"base_{name}", "algorithm": options} for name, options in OBJECTIVES.items()]
    four_ranks = [shuffled | {"name": name, "parallel": sizes} for name, sizes in FOUR_RANKS.items()]
    sft = {"name": "sft_tp2_pp2", "sft_updates": 3, "parallel": FOUR_RANKS["tp2_pp2"]}
    frozen = {"name": "reference_tp2_pp2", "reference": True, "parallel": FOUR_RANKS["tp2_pp2"]}
    four_ranks += [shuffled | sft, shuffled | frozen]
    untied = {"model": str(folder / "untied"), "parallel": FOUR_RANKS["tp2_pp2"], "name": "tp2_pp2_untied"}
    trajectory = {"denominator": "trajectory", "parallel": FOUR_RANKS["tp2_pp2"], "name": "tp2_pp2_trajectory"}
    four_ranks += [shuffled | untied, shuffled | trajectory]
    for number, (name, options) in enumerate(OBJECTIVES.items()):
        sizes = list(FOUR_RANKS.values())[number]
        four_ranks.append(shuffled | {"name": f"split_{name}", "algorithm": options, "parallel": sizes})
    distilled = {"algorithm": {"teacher": TEACHER | {"path": str(folder / "untied")}}, "temperature": 0.8}
    one_rank += [base | distilled | {"name": "base_distilled"}]
    one_rank += [base | distilled | {"name": "distilled_two_rows", "packing": "two_rows"}]
    four_ranks += [shuffled | distilled | {"name": f"distilled_{n}", "parallel": FOUR_RANKS[n]} for n in DISTILLED]
    groups = [Group("one_rank", 1, one_rank), Group("four_ranks", 4, four_ranks)]
    exit_codes = launch(groups, folder)
    assert exit_codes == {"one_rank": [0], "four_ranks": [0] * 4}, log_tail(folder)
    return folder


def assert_same_run(folder, name: str, base: str, rel: float) -> None:
    """Loss, gradient norm and every other metric of each update, and the parameters after the last one."""
    ours, theirs = result(folder, name), result(folder, base)
    for got, want in zip(ours.metrics, theirs.metrics, strict=True):
        assert got == pytest.approx(want, rel=rel, abs=1e-7)
    assert ours.weights.keys() == theirs.weights.keys()
    for key, want in theirs.weights.items():
        assert (ours.weights[key] - want).norm() <= rel * want.norm(), key


@pytest.mark.parametrize("name", [*PACKINGS, *ONE_RANK])
def test_packing_and_recompute_on_one_rank(runs, name):
    assert_same_run(runs, name, "base", rel=1e-5)


@pytest.mark.parametrize("name", PACKINGS)
def test_gradient_of_any_number_of_microbatches(runs, name):
    """8, 4, 2 or 1 microbatches: loss and gradient of the first update agree to 1e-6."""
    got, want = result(runs, name).metrics[0], result(runs, "base").metrics[0]
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-6)
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_parallel_sizes(runs, name):
    assert_same_run(runs, name, "base", rel=1e-5)


def test_parallel_untied_embeddings(runs):
    assert_same_run(runs, "tp2_pp2_untied", "base_untied", rel=1e-5)


def test_parallel_trajectory_denominator(runs):
    assert_same_run(runs, "tp2_pp2_trajectory", "base_trajectory", rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_loss_and_correction_under_parallel_sizes(runs, name):
    """Sequences and steps stay whole in a row, so their ratios and weights are those of one rank."""
    assert_same_run(runs, f"split_{name}", f"base_{name}", rel=1e-5)
    assert result(runs, f"base_{name}").metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize("name", ["two_rows", *DISTILLED])
def test_distillation_under_parallel_sizes(runs, name):
    """The teacher's top tokens from a split vocabulary, and the term's gradient, are those of one rank."""
    assert_same_run(runs, f"distilled_{name}", "base_distilled", rel=1e-5)
    first, second = result(runs, f"distilled_{name}").metrics
    assert 0 < second["distill"] < first["distill"]


@pytest.mark.parametrize("name", ["on_policy", "on_policy_bf16"])
def test_ratio_of_the_first_update_is_exactly_one(runs, name):
    metrics = result(runs, name).metrics[0]
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_frac"] == 0.0


@pytest.mark.parametrize("name", ["bf16", "bf16_distributed_optimizer"])
def test_bf16_accumulates_gradients_in_fp32(runs, name):
    outcome = result(runs, name)
    assert outcome.extra["main_grad_dtypes"] == ["torch.float32"]
    assert all(weight.dtype == torch.bfloat16 for weight in outcome.weights.values())
    assert outcome.metrics[0]["loss"] == pytest.approx(result(runs, "base").metrics[0]["loss"], rel=0.05)


def plain_distillation(log_p: torch.Tensor, teacher_log_p: torch.Tensor) -> torch.Tensor:
    """Reverse KL of the distributions over the teacher's top tokens and one rest, [length]."""
    top = teacher_log_p.topk(TEACHER["top_k"])
    q, p = log_p.exp().gather(1, top.indices), top.values.exp()
    q_rest, p_rest = 1 - q.sum(-1), 1 - p.sum(-1)
    return (q * (q / p).log()).sum(-1) + q_rest * (q_rest / p_rest).log()


def plain_update(folder, temperature: float = 1.0, kind: str = "token", teacher_folder=None):
    """One update by transformers, autograd and torch's AdamW; returns loss, gradient norm and parameters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32) if teacher_folder else None
    samples = trainer_rows.make_samples()
    total = trainer_rows.denominator(samples, kind)
    loss_value = 0.0
    for sample in samples:
        logits = model(input_ids=sample.token_ids[None], use_cache=False).logits[0] / temperature
        log_p = logits[:-1].log_softmax(-1)
        logprobs = log_p.gather(1, sample.token_ids[1:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        trained, advantages = sample.mask[1:], sample.advantages[1:]
        ratio = (logprobs - sample.old_logprobs[1:]).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.25) * advantages)
        difference = sample.reference_logprobs[1:] - logprobs
        kl = difference.exp() - 1 - difference
        terms = -surrogate + 0.1 * kl - 0.01 * entropy
        if teacher:
            with torch.no_grad():
                teacher_logits = teacher(input_ids=sample.token_ids[None]).logits[0, :-1] / temperature
            terms = terms + TEACHER["coef"] * plain_distillation(log_p, teacher_logits.log_softmax(-1))
        loss = (terms * trainer_rows.weights(sample, kind)[1:])[trained].sum() / total
        loss.backward()
        loss_value += loss.item()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 0.5 / (norm + 1e-6)))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-6).step()
    return loss_value, norm, dict(model.named_parameters())


@pytest.mark.parametrize(
    ("name", "model", "kind"),
    [
        ("first_update", "tied", "token"),
        ("base_trajectory", "tied", "trajectory"),
        ("base_untied", "untied", "token"),
    ],
)
def test_update_equals_plain_transformers(runs, name, model, kind):
    loss, norm, parameters = plain_update(runs / model, kind=kind)
    outcome = result(runs, name)
    assert outcome.metrics[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert outcome.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    if name == "first_update":
        for key, weight in outcome.weights.items():
            want = parameters[key].detach()
            assert (weight - want).norm() <= 1e-5 * want.norm(), key


def test_distillation_equals_plain_transformers(runs):
    loss, norm, _ = plain_update(runs / "tied", temperature=0.8, teacher_folder=runs / "untied")
    metrics = result(runs, "base_distilled").metrics[0]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_metrics_are_means_over_trained_tokens(runs):
    samples = trainer_rows.make_samples()
    trained = sum(int(sample.mask.sum()) for sample in samples)
    metrics = result(runs, "base").metrics[0]
    assert metrics["num_tokens"] == trained
    assert 0 < metrics["clip_frac"] < 1
    assert 5 < metrics["entropy"] < math.log(400)


def test_reference_is_the_base_model_after_updates_of_the_policy(runs):
    """On two pipeline stages; one log-prob for each entry of a row."""
    extra = result(runs, "reference_tp2_pp2").extra
    for reference, first in zip(extra["reference_logprobs"], extra["first_logprobs"], strict=True):
        assert reference == pytest.approx(first, abs=1e-5)  # other memory, so the last bit of a sum may differ
    rows = trainer_rows.plan("four_rows_shuffled", "token", data_size=1)[0]
    for values, row in zip(extra["first_logprobs"], rows, strict=True):
        assert len(values) == len(row.loss_mask)
        assert all(value < 0 for value in values)


def test_supervised_update_is_the_mean_negative_log_likelihood(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "tied", dtype=torch.float32)
    samples = trainer_rows.make_samples()
    total = 0.0
    for sample in samples:
        with torch.no_grad():
            log_p = model(input_ids=sample.token_ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = log_p.gather(1, sample.token_ids[1:, None]).squeeze(1)
        total -= logprobs[sample.mask[1:]].sum().item()
    losses = [metrics["loss"] for metrics in result(runs, "sft_tp2_pp2").metrics]
    assert losses[0] == pytest.approx(total / trainer_rows.denominator(samples, "token"), rel=1e-5)
    assert losses[2] < losses[1] < losses[0]
