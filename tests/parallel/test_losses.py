"""Losses against values worked out by hand and against plain fp64 autograd of the published formulas."""

import math

import pytest
import torch

from megatron_agent.config import AlgorithmConfig, LossConfig
from megatron_agent.errors import ConfigError
from parallel.losses.base import LossInputs
from parallel.losses.kl import k1, k2, k3
from parallel.losses.objective import rl_objective
from parallel.losses.ppo_clip import ppo_clip
from parallel.losses.registry import get_policy_loss
from parallel.losses.sft import negative_log_likelihood

CLIP = LossConfig(clip_low=0.2, clip_high=0.3)


def inputs_for(
    *, ratios, advantages, mask=None, weights=None, entropy=None, reference=None, dtype=torch.float64
) -> LossInputs:
    """Old log-probs are all -1; the policy's are chosen so that the ratios come out as given."""
    n = len(ratios)
    old = torch.full((n,), -1.0, dtype=dtype)
    logprobs = (old + torch.tensor(ratios, dtype=dtype).log()).requires_grad_()
    mask = torch.tensor([True] * n if mask is None else mask)
    weights = torch.tensor([1.0] * n if weights is None else weights, dtype=dtype)
    return LossInputs(
        mask=mask,
        weights=torch.where(mask, weights, 0.0),
        advantages=torch.tensor(advantages, dtype=dtype),
        logprobs=logprobs,
        old_logprobs=old,
        entropy=torch.tensor([0.0] * n if entropy is None else entropy, dtype=dtype, requires_grad=True),
        reference_logprobs=None if reference is None else torch.tensor(reference, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # on policy: the policy gradient, -A
        (1.2, 1.0, -1.2, -1.2, 0),  # inside the upper bound
        (1.5, 1.0, -1.3, 0.0, 1),  # cut at 1 + clip_high
        (0.5, 1.0, -0.5, -0.5, 0),  # a good token that became unlikely is pulled back
        (0.5, -1.0, 0.8, 0.0, 1),  # cut at 1 - clip_low
        (1.5, -1.0, 1.5, 1.5, 0),  # a bad token that became likely is pushed down, unbounded
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, gradient, clipped):
    inputs = inputs_for(ratios=[ratio], advantages=[advantage])
    total, sums = ppo_clip(inputs, CLIP)
    total.backward()
    assert total.item() == pytest.approx(loss, rel=1e-12)
    assert inputs.logprobs.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert sums["clip_frac"].item() == clipped


def test_dual_clip_bounds_only_negative_advantages():
    inputs = inputs_for(ratios=[5.0, 5.0], advantages=[-1.0, 1.0])
    total, sums = ppo_clip(inputs, LossConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0))
    total.backward()
    assert total.item() == pytest.approx(3.0 - 1.3)  # min(5, 3) for the bad token, -1.3 for the good one
    assert inputs.logprobs.grad.tolist() == [0.0, 0.0]
    assert sums["clip_frac"].item() == 2


def test_ppo_clip_equals_the_min_form_of_the_paper():
    generator = torch.Generator().manual_seed(0)
    ratios = torch.rand(200, generator=generator, dtype=torch.float64) * 2 + 0.05
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    inputs = inputs_for(ratios=ratios.tolist(), advantages=advantages.tolist())
    total, _ = ppo_clip(inputs, CLIP)
    total.backward()

    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    r = torch.exp(logprobs - inputs.old_logprobs)
    paper = -torch.min(r * advantages, torch.clamp(r, 0.8, 1.3) * advantages).sum()
    paper.backward()
    torch.testing.assert_close(total, paper, rtol=1e-12, atol=0)
    torch.testing.assert_close(inputs.logprobs.grad, logprobs.grad, rtol=1e-12, atol=0)


def test_runaway_ratio_gives_no_nan():
    inputs = LossInputs(
        mask=torch.tensor([True]),
        weights=torch.ones(1),
        advantages=torch.ones(1),
        logprobs=torch.tensor([0.0], requires_grad=True),
        old_logprobs=torch.tensor([-500.0]),
        entropy=torch.zeros(1),
    )
    total, _ = ppo_clip(inputs, CLIP)
    total.backward()
    assert total.item() == pytest.approx(-1.3)
    assert inputs.logprobs.grad.item() == 0.0


@pytest.mark.parametrize("name", ["policy", "sft"])
def test_nan_at_masked_positions_stays_out(name):
    nan = math.nan
    logprobs = torch.tensor([-1.0, nan, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, nan, 0.25], requires_grad=True)
    inputs = LossInputs(
        mask=torch.tensor([True, False, True]),
        weights=torch.tensor([1.0, 0.0, 1.0]),
        advantages=torch.tensor([1.0, nan, -1.0]),
        logprobs=logprobs,
        old_logprobs=torch.tensor([-1.0, nan, -2.0]),
        entropy=entropy,
        reference_logprobs=torch.tensor([-1.5, nan, -1.5]),
    )
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 0.1}, "entropy_coef": 0.01})
    if name == "policy":
        loss, metrics = rl_objective(inputs, algorithm)
        assert all(torch.isfinite(value) for value in (metrics.sums | metrics.maxima).values())
    else:
        loss = negative_log_likelihood(inputs)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad[[0, 2]]).all()
    assert logprobs.grad[1].item() == 0.0


def test_all_masked_microbatch_is_zero_with_a_zero_gradient():
    inputs = inputs_for(ratios=[1.0, 3.0], advantages=[1.0, -1.0], mask=[False, False])
    loss, metrics = rl_objective(inputs, AlgorithmConfig())
    loss.backward()
    assert loss.item() == 0.0
    assert all(value.item() == 0.0 for value in (metrics.sums | metrics.maxima).values())
    assert inputs.logprobs.grad.tolist() == [0.0, 0.0]


def test_denominator_counts_only_trained_tokens():
    """12 response tokens of which 9 are trained: a mean over tokens divides by 9."""
    mask = [True] * 9 + [False] * 3
    inputs = inputs_for(ratios=[1.0] * 12, advantages=[2.0] * 12, mask=mask)
    loss, metrics = rl_objective(inputs, AlgorithmConfig())
    assert metrics.sums["num_tokens"].item() == 9
    assert loss.item() / 9 == pytest.approx(-2.0)
    assert metrics.sums["ratio_mean"].item() == pytest.approx(9.0)
    assert metrics.maxima["ratio_max"].item() == pytest.approx(1.0)


def test_kl_estimators_by_hand():
    p, q = torch.tensor([-1.0]).double(), torch.tensor([-1.5]).double()
    assert k1(p, q).item() == pytest.approx(0.5)
    assert k2(p, q).item() == pytest.approx(0.125)
    assert k3(p, q).item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_k1_and_k3_are_unbiased():
    """Weighted by the policy's own probabilities, k1 and k3 give the KL exactly."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    assert (p * k1(p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-12)
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-12)
    assert (k3(p.log(), q.log()) >= 0).all()


def test_objective_adds_kl_and_subtracts_entropy():
    inputs = inputs_for(
        ratios=[1.0, 1.0], advantages=[1.0, 0.0], entropy=[0.7, 0.1], reference=[-1.5, -1.0], weights=[0.5, 2.0]
    )
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 0.2, "estimator": "k2"}, "entropy_coef": 0.1})
    loss, metrics = rl_objective(inputs, algorithm)
    sums = metrics.sums
    # policy: 0.5 * -1; KL: 0.2 * 0.5 * 0.5^2 / 2; entropy: 0.1 * (0.5 * 0.7 + 2 * 0.1)
    assert loss.item() == pytest.approx(-0.5 + 0.0125 - 0.055)
    assert sums["policy_loss"].item() == pytest.approx(-0.5)
    assert sums["kl"].item() == pytest.approx(0.125)  # plain sum: metrics are means over tokens
    assert sums["entropy"].item() == pytest.approx(0.8)


def test_objective_refuses_a_missing_reference():
    with pytest.raises(ValueError, match="reference_logprobs"):
        rl_objective(inputs_for(ratios=[1.0], advantages=[1.0]), AlgorithmConfig.model_validate({"kl": {"coef": 1}}))


def test_sft_is_weighted_negative_log_likelihood():
    inputs = inputs_for(ratios=[1.0, 1.0], advantages=[0.0, 0.0], weights=[1.0, 3.0])
    loss = negative_log_likelihood(inputs)
    loss.backward()
    assert loss.item() == pytest.approx(4.0)
    assert inputs.logprobs.grad.tolist() == [-1.0, -3.0]


def test_unknown_loss_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        get_policy_loss("ppo_clp")
