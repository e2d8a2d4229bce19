"""Losses, KL terms and correction against the published formulas, written out token by token in Python and fp64.

Nothing of the code under test is used for what is expected; gradients are autograd's of the written-out formula.
"""

import math
from collections.abc import Callable

import pytest
import torch

from megatron_agent.config import AlgorithmConfig
from megatron_agent.config_algorithm import CorrectionConfig, LossConfig
from parallel.losses.base import LossInputs, mean_over, sum_over, totals
from parallel.losses.correction import correction_weights
from parallel.losses.kl import KL_ESTIMATORS, kl_term
from parallel.losses.metrics import batch_metrics
from parallel.losses.objective import rl_objective
from parallel.losses.registry import POLICY_LOSSES, policy_loss

NAN = math.nan
NUM_TOKENS = 60


def random_inputs(seed: int, *, spread: float = 0.4, constant_per_sequence: bool = False) -> LossInputs:
    """60 tokens in sequences of 1 to 25 with steps inside; two of five tokens masked, and NaN everywhere there."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)

    sequence_ids = torch.repeat_interleave(torch.arange(6), torch.tensor([12, 25, 1, 5, 10, 7]))
    step_ids = torch.repeat_interleave(torch.arange(12), torch.tensor([4, 8, 9, 9, 7, 1, 2, 3, 5, 5, 3, 4]))
    mask = torch.rand(NUM_TOKENS, generator=generator) < 0.6
    mask[sequence_ids == 3] = False
    old = -1.5 + 0.5 * normal()
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)[sequence_ids]
    if not constant_per_sequence:
        advantages = normal()
    values = {
        "weights": torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64) + 0.5,
        "advantages": advantages,
        "logprobs": old + spread * normal(),
        "old_logprobs": old,
        "rollout_logprobs": old + 0.3 * normal(),
        "entropy": normal().abs(),
        "reference_logprobs": old + 0.5 * normal(),
    }
    values = {name: torch.where(mask, value, NAN) for name, value in values.items()}
    values["logprobs"].requires_grad_()
    values["entropy"].requires_grad_()
    return LossInputs(mask=mask, sequence_ids=sequence_ids, step_ids=step_ids, **values)


def trained(inputs: LossInputs) -> list[int]:
    return [t for t in range(NUM_TOKENS) if inputs.mask[t]]


def groups(inputs: LossInputs, ids: torch.Tensor) -> list[list[int]]:
    """The trained tokens of each sequence or step that has any."""
    found: dict[int, list[int]] = {}
    for t in trained(inputs):
        found.setdefault(int(ids[t]), []).append(t)
    return list(found.values())


def own_leaf(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.detach().clone().requires_grad_()


def clipped_min(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """-min(r A, clip(r) A), by cases."""
    bounded = ratio if 1 - low <= ratio.item() <= 1 + high else ratio.new_tensor(1 - low if ratio < 1 else 1 + high)
    return -(ratio * advantage if (ratio * advantage) < (bounded * advantage) else bounded * advantage)


def written_ppo(inputs: LossInputs, p: torch.Tensor, low: float, high: float, dual: float | None = None):
    total = torch.zeros((), dtype=torch.float64)
    for t in trained(inputs):
        term = clipped_min(torch.exp(p[t] - inputs.old_logprobs[t]), inputs.advantages[t], low, high)
        if dual is not None and inputs.advantages[t] < 0 and term > -dual * inputs.advantages[t]:
            term = (-dual * inputs.advantages[t]).detach()
        total = total + inputs.weights[t] * term
    return total


def written_gspo_token(inputs: LossInputs, p: torch.Tensor, ids: torch.Tensor, low: float, high: float):
    total = torch.zeros((), dtype=torch.float64)
    for tokens in groups(inputs, ids):
        s = math.exp(sum((p[t] - inputs.old_logprobs[t]).item() for t in tokens) / len(tokens))
        for t in tokens:
            s_t = s * torch.exp(p[t]) / math.exp(p[t].item())
            total = total + inputs.weights[t] * clipped_min(s_t, inputs.advantages[t], low, high)
    return total


def written_cispo(inputs: LossInputs, p: torch.Tensor, low: float, high: float):
    total = torch.zeros((), dtype=torch.float64)
    for t in trained(inputs):
        weight = min(max(math.exp((p[t] - inputs.old_logprobs[t]).item()), 1 - low), 1 + high)
        total = total - inputs.weights[t] * weight * inputs.advantages[t] * p[t]
    return total


def written_sapo(inputs: LossInputs, p: torch.Tensor, positive: float, negative: float):
    total = torch.zeros((), dtype=torch.float64)
    for t in trained(inputs):
        tau = positive if inputs.advantages[t] > 0 else negative
        r = torch.exp(p[t] - inputs.old_logprobs[t])
        total = total - inputs.weights[t] * inputs.advantages[t] * (4 / tau) / (1 + torch.exp(-tau * (r - 1)))
    return total


def written_reinforce(inputs: LossInputs, p: torch.Tensor):
    total = torch.zeros((), dtype=torch.float64)
    for t in trained(inputs):
        total = total - inputs.weights[t] * inputs.advantages[t] * p[t]
    return total


Written = Callable[[LossInputs, torch.Tensor], torch.Tensor]
FORMULAS: list[tuple[dict, Written]] = [
    ({"name": "ppo_clip"}, lambda i, p: written_ppo(i, p, 0.2, 0.2)),
    ({"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3}, lambda i, p: written_ppo(i, p, 0.1, 0.3)),
    ({"name": "ppo_clip", "dual_clip": 1.5}, lambda i, p: written_ppo(i, p, 0.2, 0.2, 1.5)),
    ({"name": "dapo"}, lambda i, p: written_ppo(i, p, 0.2, 0.28)),
    ({"name": "dr_grpo"}, lambda i, p: written_ppo(i, p, 0.2, 0.2)),
    ({"name": "gspo"}, lambda i, p: written_gspo_token(i, p, i.sequence_ids, 3e-4, 4e-4)),
    (
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2},
        lambda i, p: written_gspo_token(i, p, i.sequence_ids, 0.1, 0.2),
    ),
    ({"name": "step_gspo"}, lambda i, p: written_gspo_token(i, p, i.step_ids, 3e-4, 4e-4)),
    (
        {"name": "step_gspo", "clip_low": 0.1, "clip_high": 0.2},
        lambda i, p: written_gspo_token(i, p, i.step_ids, 0.1, 0.2),
    ),
    ({"name": "cispo"}, lambda i, p: written_cispo(i, p, 1.0, 4.0)),
    ({"name": "cispo", "clip_low": 0.2, "clip_high": 0.3}, lambda i, p: written_cispo(i, p, 0.2, 0.3)),
    ({"name": "sapo"}, lambda i, p: written_sapo(i, p, 1.0, 1.05)),
    ({"name": "sapo", "tau_positive": 2.0, "tau_negative": 5.0}, lambda i, p: written_sapo(i, p, 2.0, 5.0)),
    ({"name": "reinforce"}, lambda i, p: written_reinforce(i, p)),
]


def test_every_loss_has_a_formula_here():
    assert {options["name"] for options, _ in FORMULAS} == set(POLICY_LOSSES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("options", "written"), FORMULAS, ids=[str(options) for options, _ in FORMULAS])
def test_loss_and_gradient(options, written, seed):
    inputs = random_inputs(seed)
    loss, _ = rl_objective(inputs, AlgorithmConfig.model_validate({"loss": options}))
    loss.backward()
    leaf = own_leaf(inputs)
    want = written(inputs, leaf)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, leaf.grad, 0.0), rtol=1e-12, atol=1e-13)
    assert not inputs.logprobs.grad[~inputs.mask].any()


@pytest.mark.parametrize(("name", "of"), [("gspo", "sequence_ids"), ("step_gspo", "step_ids")])
def test_gspo_token_equals_gspo_where_advantages_are_equal(name, of):
    """GSPO's own loss, with the gradient through the mean: |y| times -min(s A, clip(s) A) of each sequence."""
    inputs = random_inputs(5, constant_per_sequence=True, spread=0.2)
    inputs.weights[inputs.mask] = 1.0
    algorithm = AlgorithmConfig.model_validate({"loss": {"name": name, "clip_low": 0.05, "clip_high": 0.08}})
    loss, _ = rl_objective(inputs, algorithm)
    loss.backward()
    leaf = own_leaf(inputs)
    want = torch.zeros((), dtype=torch.float64)
    for tokens in groups(inputs, getattr(inputs, of)):
        s = torch.exp(torch.stack([leaf[t] - inputs.old_logprobs[t] for t in tokens]).mean())
        want = want + len(tokens) * clipped_min(s, inputs.advantages[tokens[0]], 0.05, 0.08)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, leaf.grad, 0.0), rtol=1e-12, atol=1e-13)


def written_kl(estimator: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if estimator == "k1":
        return p - q
    if estimator == "k2":
        return (p - q) ** 2 / 2
    value = torch.exp(q - p) - 1 - (q - p)
    return value if estimator == "k3" or value < 10 else value.new_tensor(10.0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("gradient", ["estimator", "k2"])
def test_kl_in_the_loss(estimator, gradient):
    """Value of the estimator; gradient of it or of k2. One token is far enough out for the clamp."""
    inputs = random_inputs(3)
    far = trained(inputs)[0]
    inputs.reference_logprobs[far] = inputs.logprobs[far].item() + 4.0  # k3 is e^4 - 5 = 49.6
    kl = {"coef": 0.3, "estimator": estimator, "gradient": gradient}
    loss, terms = rl_objective(inputs, AlgorithmConfig.model_validate({"kl": kl, "loss": {"name": "reinforce"}}))
    loss.backward()
    leaf = own_leaf(inputs)
    value, with_gradient, plain = 0.0, written_reinforce(inputs, leaf), 0.0
    for t in trained(inputs):
        q = inputs.reference_logprobs[t]
        term = written_kl(estimator, leaf[t], q)
        value += 0.3 * (inputs.weights[t] * term).item()
        plain += term.item()
        with_gradient = with_gradient + 0.3 * inputs.weights[t] * (
            term if gradient == "estimator" else written_kl("k2", leaf[t], q)
        )
    with_gradient.backward()
    assert loss.item() == pytest.approx(written_reinforce(inputs, leaf).item() + value, rel=1e-12)
    assert terms.sums["kl"].item() == pytest.approx(plain, rel=1e-12)
    torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, leaf.grad, 0.0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("estimator", "gradient", "target"),
    [
        ("k1", "estimator", "nothing"),
        ("k2", "estimator", "KL(policy || reference)"),
        ("k3", "estimator", "KL(reference || policy)"),
        ("k1", "k2", "KL(policy || reference)"),
        ("k3", "k2", "KL(policy || reference)"),
    ],
)
def test_what_the_kl_terms_descend(estimator, gradient, target):
    """Mean gradient over the policy's own distribution, exact over four outcomes."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.2, 0.1, 1.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    terms = kl_term(logprobs, reference, estimator=estimator, gradient=gradient)
    (got,) = torch.autograd.grad((logprobs.exp().detach() * terms).sum(), logits, retain_graph=True)
    exact = {
        "nothing": 0.0 * logits.sum(),
        "KL(policy || reference)": (logprobs.exp() * (logprobs - reference)).sum(),
        "KL(reference || policy)": (reference.exp() * (reference - logprobs)).sum(),
    }[target]
    (want,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


CORRECTIONS = [
    {"tis": "token", "cap": 1.2},
    {"tis": "step", "cap": 1.3},
    {"tis": "sequence", "cap": 1.5},
    {"mask": "token_band", "low": 0.8, "high": 1.3},
    {"mask": "geometric_band", "low": 0.97, "high": 1.05},
    {"mask": "outlier", "low": 0.6},
    {"reject_k3": 0.045},
    {"tis": "token", "cap": 5.0, "mask": "token_band", "low": 0.8, "high": 1.3, "reject_k3": 0.06},
    {"tis": "sequence", "mask": "geometric_band", "low": 0.9, "high": 1.1, "reject_k3": 0.05},
]


def written_weights(inputs: LossInputs, config: dict) -> tuple[dict[int, float], int, int]:
    """(weight of each trained token, tokens truncated, tokens left out)."""
    w = {t: math.exp((inputs.old_logprobs[t] - inputs.rollout_logprobs[t]).item()) for t in trained(inputs)}
    of_step = {t: tokens for tokens in groups(inputs, inputs.step_ids) for t in tokens}
    of_sequence = {t: tokens for tokens in groups(inputs, inputs.sequence_ids) for t in tokens}
    weights, num_truncated, num_left_out = {}, 0, 0
    for t in trained(inputs):
        level, mask = config.get("tis", "none"), config.get("mask", "none")
        sequence = of_sequence[t]
        weight = {
            "none": 1.0,
            "token": w[t],
            "step": math.prod(w[u] for u in of_step[t]),
            "sequence": math.prod(w[u] for u in sequence),
        }[level]
        num_truncated += weight > config.get("cap", 2.0)
        weight = min(weight, config.get("cap", 2.0))
        geometric = math.prod(w[u] for u in sequence) ** (1 / len(sequence))
        keep = {
            "none": True,
            "token_band": config.get("low", 0) <= w[t] <= config.get("high", 0),
            "geometric_band": config.get("low", 0) <= geometric <= config.get("high", 0),
            "outlier": all(w[u] >= config.get("low", 0) for u in sequence),
        }[mask]
        if "reject_k3" in config:
            k3 = sum(w[u] - 1 - math.log(w[u]) for u in sequence) / len(sequence)
            keep = keep and k3 <= config["reject_k3"]
        num_left_out += not keep
        weights[t] = weight if keep else 0.0
    return weights, num_truncated, num_left_out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CORRECTIONS, ids=str)
def test_correction(config, seed):
    """Loss, gradient and every metric."""
    inputs = random_inputs(seed)
    algorithm = AlgorithmConfig.model_validate({"correction": config, "loss": {"name": "reinforce"}})
    loss, terms = rl_objective(inputs, algorithm)
    loss.backward()
    weights, num_truncated, num_left_out = written_weights(inputs, config)
    want = torch.zeros(NUM_TOKENS, dtype=torch.float64)
    for t, weight in weights.items():
        want[t] = -inputs.weights[t] * inputs.advantages[t] * weight
    torch.testing.assert_close(inputs.logprobs.grad, want, rtol=1e-10, atol=1e-13)
    value = sum(want[t].item() * inputs.logprobs[t].item() for t in weights)
    assert loss.item() == pytest.approx(value, rel=1e-10)

    n = len(weights)
    metrics = batch_metrics({name: value.item() for name, value in terms.sums.items()}, denominator=7.0)
    assert metrics["policy_loss"] == pytest.approx(value / 7.0, rel=1e-10)
    assert metrics["correction_weight_mean"] == pytest.approx(sum(weights.values()) / n)
    assert terms.maxima["correction_weight_max"].item() == pytest.approx(max(weights.values()))
    assert metrics["correction_clip_frac"] == pytest.approx(num_truncated / n)
    assert metrics["correction_mask_frac"] == pytest.approx(num_left_out / n)
    square = sum(w * w for w in weights.values())
    ess = sum(weights.values()) ** 2 / (n * square) if square else 0.0
    assert metrics["correction_ess"] == pytest.approx(ess)


def test_correction_cases_are_not_vacuous():
    """Each level truncates something, and each mask leaves some tokens out and keeps some."""
    for config in CORRECTIONS:
        counts = [written_weights(random_inputs(seed), config)[1:] for seed in range(3)]
        assert any(count[0] for count in counts) or config.get("tis", "none") == "none" or config.get("cap") == 5.0
        num_trained = sum(len(trained(random_inputs(seed))) for seed in range(3))
        if config.keys() & {"mask", "reject_k3"}:
            assert 0 < sum(count[1] for count in counts) < num_trained, config


def test_divergence_of_rollout_and_old():
    inputs = random_inputs(1)
    _, terms = rl_objective(inputs, AlgorithmConfig.model_validate({"correction": {"tis": "token"}}))
    log_w = {t: (inputs.old_logprobs[t] - inputs.rollout_logprobs[t]).item() for t in trained(inputs)}
    of_sequences = [sum(log_w[t] for t in tokens) for tokens in groups(inputs, inputs.sequence_ids)]
    metrics = batch_metrics({name: value.item() for name, value in terms.sums.items()}, denominator=1.0)
    for name, values in (("rollout_kl", list(log_w.values())), ("rollout_kl_sequence", of_sequences)):
        assert metrics[f"{name}_k1"] == pytest.approx(sum(-x for x in values) / len(values))
        assert metrics[f"{name}_k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in values) / len(values))


def test_approx_kl_and_ratios():
    inputs = random_inputs(2)
    _, terms = rl_objective(inputs, AlgorithmConfig())
    log_r = [(inputs.logprobs[t] - inputs.old_logprobs[t]).item() for t in trained(inputs)]
    assert terms.sums["approx_kl"].item() == pytest.approx(sum(math.exp(x) - 1 - x for x in log_r))
    assert terms.sums["ratio_mean"].item() == pytest.approx(sum(math.exp(x) for x in log_r))
    assert terms.maxima["ratio_max"].item() == pytest.approx(max(math.exp(x) for x in log_r))
    clipped = sum(
        (x > math.log(1.2) and inputs.advantages[t] > 0) or (x < math.log(0.8) and inputs.advantages[t] < 0)
        for t, x in zip(trained(inputs), log_r, strict=True)
    )
    assert clipped > 0
    assert terms.sums["clip_frac"].item() == clipped


def test_sums_over_sequences_and_steps():
    inputs = random_inputs(4)
    values = inputs.old_logprobs
    for ids in (inputs.sequence_ids, inputs.step_ids):
        summed, mean = torch.zeros(NUM_TOKENS).double(), torch.zeros(NUM_TOKENS).double()
        by_id = torch.zeros(NUM_TOKENS).double()
        for tokens in groups(inputs, ids):
            total = sum(values[t].item() for t in tokens)
            by_id[ids[tokens[0]]] = total
            for t in tokens:
                summed[t], mean[t] = total, total / len(tokens)
        torch.testing.assert_close(totals(ids, inputs, values), by_id)
        torch.testing.assert_close(sum_over(ids, inputs, values), summed)
        torch.testing.assert_close(mean_over(ids, inputs, values), mean)


def test_sequence_weights_do_not_overflow():
    """2000 tokens whose weights multiply to e^2000, in float32: the truncation still decides."""
    n = 2000
    inputs = LossInputs(
        mask=torch.ones(n, dtype=torch.bool),
        weights=torch.ones(n),
        advantages=torch.ones(n),
        logprobs=torch.full((n,), -1.0),
        old_logprobs=torch.full((n,), -1.0),
        rollout_logprobs=torch.full((n,), -2.0),
        entropy=torch.zeros(n),
        sequence_ids=torch.zeros(n, dtype=torch.int64),
        step_ids=torch.zeros(n, dtype=torch.int64),
    )
    weights, terms = correction_weights(inputs, CorrectionConfig(tis="sequence", cap=3.0))
    assert weights.tolist() == [3.0] * n
    assert all(torch.isfinite(value) for value in terms.sums.values())


def test_loss_options_reach_the_loss():
    assert policy_loss(LossConfig(name="sapo", tau_positive=2.0)).keywords == {"tau_positive": 2.0}
