"""Losses against values worked out by hand; tests/numerics has the formulas and what holds for any batch."""

import math
from dataclasses import replace

import pytest
import torch
from made_records import make_step, make_trajectory

from megatron_agent.config import AlgorithmConfig
from megatron_agent.config_algorithm import LossConfig
from megatron_agent.errors import ConfigError
from parallel.losses.base import LossInputs
from parallel.losses.cispo import cispo
from parallel.losses.gspo import gspo, step_gspo
from parallel.losses.kl import k1, k2, k3, k3_clamped
from parallel.losses.metrics import batch_metrics
from parallel.losses.objective import rl_objective, sft_objective
from parallel.losses.ppo_clip import ppo_clip
from parallel.losses.registry import policy_loss
from parallel.losses.reinforce import reinforce
from parallel.losses.sapo import sapo
from parallel.losses.sft import negative_log_likelihood
from parallel.train_step import _loss_inputs
from trajectory.packing import pack_row
from trajectory.samples import merge_steps

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def inputs_for(
    *,
    ratios,
    advantages,
    mask=None,
    weights=None,
    entropy=None,
    reference=None,
    importance=None,
    sequences=None,
    steps=None,
    dtype=torch.float64,
) -> LossInputs:
    """Old log-probs are all -1; the policy's are chosen so that the ratios come out as given, the engine's so that
    old / rollout is `importance`. One sequence of one step where nothing else is said."""
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
        rollout_logprobs=old - torch.tensor([1.0] * n if importance is None else importance, dtype=dtype).log(),
        sequence_ids=torch.tensor([0] * n if sequences is None else sequences),
        step_ids=torch.tensor([0] * n if steps is None else steps),
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
    terms, sums = ppo_clip(inputs, **CLIP)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([loss], rel=1e-12)
    assert inputs.logprobs.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert sums["clip_frac"].item() == clipped


def test_dual_clip_bounds_only_negative_advantages():
    inputs = inputs_for(ratios=[5.0, 5.0], advantages=[-1.0, 1.0])
    terms, sums = ppo_clip(inputs, **CLIP, dual_clip=3.0)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([3.0, -1.3])  # min(5, 3) for the bad token, -1.3 for the good one
    assert inputs.logprobs.grad.tolist() == [0.0, 0.0]
    assert sums["clip_frac"].item() == 2


def test_gspo_by_hand():
    """Ratios 2 and 8 of one sequence: s = 4. Alone in its sequence, 0.5 stays 0.5."""
    inputs = inputs_for(ratios=[2.0, 8.0, 0.5], advantages=[1.0, -1.0, 1.0], sequences=[0, 0, 1])
    terms, sums = gspo(inputs, clip_low=0.1, clip_high=0.2)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([-1.2, 4.0, -0.5])
    assert inputs.logprobs.grad.tolist() == pytest.approx([0.0, 4.0, -0.5])
    assert sums["clip_frac"].item() == 1


def test_step_gspo_by_hand():
    """The same sequence in two steps: ratios 2 and 8 in one (s = 4), 1.1 in the other; a masked 100 counts nowhere."""
    inputs = inputs_for(
        ratios=[2.0, 100.0, 8.0, 1.1], advantages=[-1.0] * 4, mask=[True, False, True, True], steps=[0, 0, 0, 1]
    )
    terms, _ = step_gspo(inputs)
    assert terms[[0, 2, 3]].tolist() == pytest.approx([4.0, 4.0, 1.1])


def test_cispo_by_hand():
    """A clipped weight still has a gradient: -clip(r) A."""
    inputs = inputs_for(ratios=[9.0, 0.01, 2.0], advantages=[1.0, 1.0, -1.0])
    terms, sums = cispo(inputs)
    terms.sum().backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-5.0, -0.01, 2.0])
    assert terms[0].item() == pytest.approx(-5.0 * (math.log(9.0) - 1.0))
    assert sums["clip_frac"].item() == 1


def test_sapo_by_hand():
    """f(1) = 2 / tau and f'(1) = 1; at r = 2 and tau = 1, f = 4 sigmoid(1) = 2.92423 and f' = 0.786448."""
    inputs = inputs_for(ratios=[1.0, 1.0, 2.0], advantages=[3.0, -3.0, 1.0])
    terms, _ = sapo(inputs, tau_positive=1.0, tau_negative=4.0)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([-6.0, 1.5, -2.924234], rel=1e-6)
    assert inputs.logprobs.grad.tolist() == pytest.approx([-3.0, 3.0, -2 * 0.786448], rel=1e-6)


def test_reinforce_by_hand():
    inputs = inputs_for(ratios=[1.0, 7.0], advantages=[2.0, -1.0])
    terms, sums = reinforce(inputs)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([2.0, math.log(7.0) - 1.0])
    assert inputs.logprobs.grad.tolist() == [-2.0, 1.0]
    assert sums == {}


@pytest.mark.parametrize(
    ("name", "terms", "denominator"),
    [("ppo_clip", [-1.2, -1.2], "token"), ("dapo", [-1.25, -1.28], "token"), ("dr_grpo", [-1.2, -1.2], "constant")],
)
def test_the_ppo_family_by_hand(name, terms, denominator):
    """Ratios 1.25 and 1.5 of good tokens against each loss's own upper bound and denominator."""
    config = LossConfig(name=name)
    got, _ = policy_loss(config)(inputs_for(ratios=[1.25, 1.5], advantages=[1.0, 1.0]))
    assert got.tolist() == pytest.approx(terms)
    assert config.resolved_denominator() == denominator


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
        rollout_logprobs=torch.tensor([-1.0, nan, -2.0]),
        sequence_ids=torch.tensor([0, 0, 0]),
        step_ids=torch.tensor([0, 0, 0]),
        entropy=entropy,
        reference_logprobs=torch.tensor([-1.5, nan, -1.5]),
    )
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 0.1}, "entropy_coef": 0.01})
    if name == "policy":
        loss, metrics = rl_objective(inputs, algorithm)
        assert all(torch.isfinite(value) for value in (metrics.sums | metrics.maxima).values())
    else:
        loss, metrics = sft_objective(inputs)
        assert all(torch.isfinite(value) for value in metrics.sums.values())
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
    assert k3_clamped(p, q).item() == k3(p, q).item()
    assert k3_clamped(p, p + 4).item() == 10.0  # k3 is e^4 - 5


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


def test_kl_gradient_of_k2_beside_the_value_of_k3():
    inputs = inputs_for(ratios=[1.0], advantages=[0.0], reference=[-1.5])
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 2.0, "estimator": "k3", "gradient": "k2"}})
    loss, _ = rl_objective(inputs, algorithm)
    loss.backward()
    assert loss.item() == pytest.approx(2.0 * (math.exp(-0.5) - 1 + 0.5))
    assert inputs.logprobs.grad.item() == pytest.approx(2.0 * 0.5)  # k3's own would be 1 - exp(-0.5)


def test_kl_as_reward_is_no_term_of_the_loss():
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 2.0, "placement": "reward"}})
    loss, metrics = rl_objective(inputs_for(ratios=[1.0], advantages=[1.0], reference=[-1.5]), algorithm)
    assert loss.item() == -1.0
    assert "kl" not in metrics.sums


def corrected(importance: list[float], config: dict, **options) -> tuple[list[float], dict[str, float]]:
    """Weight of each token, read off the gradient of -A log p at A = -1, and the metrics."""
    inputs = inputs_for(
        ratios=[1.0] * len(importance), advantages=[-1.0] * len(importance), importance=importance, **options
    )
    algorithm = AlgorithmConfig.model_validate({"correction": config, "loss": {"name": "reinforce"}})
    loss, terms = rl_objective(inputs, algorithm)
    loss.backward()
    sums = {name: value.item() for name, value in terms.sums.items()}
    maxima = {name: value.item() for name, value in terms.maxima.items()}
    return inputs.logprobs.grad.tolist(), batch_metrics(sums, denominator=1.0) | maxima


def test_truncated_importance_weights_by_hand():
    weights, metrics = corrected([0.5, 1.0, 4.0, 1.0], {"tis": "token", "cap": 2.0})
    assert weights == pytest.approx([0.5, 1.0, 2.0, 1.0])
    assert metrics["correction_weight_mean"] == pytest.approx(4.5 / 4)
    assert metrics["correction_weight_max"] == pytest.approx(2.0)
    assert metrics["correction_clip_frac"] == 0.25
    assert metrics["correction_mask_frac"] == 0.0
    assert metrics["correction_ess"] == pytest.approx(4.5**2 / (4 * 6.25))
    assert not any(name.startswith("num_seq") or "square" in name for name in metrics)


def test_step_and_sequence_weights_by_hand():
    """Weights 0.5, 4 | 0.25 in two steps of one sequence: 2 and 0.25 per step, 0.5 for the sequence."""
    steps = [0, 0, 1]
    assert corrected([0.5, 4.0, 0.25], {"tis": "step", "cap": 3}, steps=steps)[0] == pytest.approx([2.0, 2.0, 0.25])
    assert corrected([0.5, 4.0, 0.25], {"tis": "sequence", "cap": 3}, steps=steps)[0] == pytest.approx([0.5] * 3)


def test_icepop_by_hand():
    """The published band is [0.5, 5], and what is inside keeps its weight."""
    weights, metrics = corrected([0.4, 0.6, 4.9, 5.1], {"tis": "token", "cap": 5, "mask": "token_band"})
    assert weights == pytest.approx([0.0, 0.6, 4.9, 0.0])
    assert metrics["correction_mask_frac"] == 0.5


def test_masks_that_leave_out_sequences_by_hand():
    importance, sequences = [1.05, 1.0, 1.0, 1e-5, 1.5], [0, 0, 1, 2, 2]
    kept = {
        "geometric_band": [0, 0, 1, 0, 0],  # sqrt(1.05) = 1.025 is above 1.001 already
        "outlier": [1, 1, 1, 0, 0],  # 1e-5 is below 1e-4, and takes its neighbour along
    }
    for mask, want in kept.items():
        assert corrected(importance, {"mask": mask}, sequences=sequences)[0] == want
    # k3 of the third: 1e-5 - 1 + ln(1e5) = 10.5 and 1.5 - 1 - ln(1.5) = 0.09, mean 5.3
    assert corrected(importance, {"reject_k3": 5.4}, sequences=sequences)[0] == [1] * 5
    assert corrected(importance, {"reject_k3": 5.2}, sequences=sequences)[0] == [1, 1, 1, 0, 0]


def test_divergence_of_two_sequences_by_hand():
    """Weights 2, 2 | 1: per token k1 = -2 ln 2 / 3; the sequences, as one draw each, have weights 4 and 1."""
    _, metrics = corrected([2.0, 2.0, 1.0], {"tis": "token"}, sequences=[0, 0, 1])
    assert metrics["rollout_kl_k1"] == pytest.approx(-2 * math.log(2) / 3)
    assert metrics["rollout_kl_k3"] == pytest.approx(2 * (1 - math.log(2)) / 3)
    assert metrics["rollout_kl_sequence_k1"] == pytest.approx(-math.log(4) / 2)
    assert metrics["rollout_kl_sequence_k3"] == pytest.approx((3 - math.log(4)) / 2)


def test_correction_is_for_recomputed_old_logprobs():
    algorithm = AlgorithmConfig.model_validate({"old_logprobs": "rollout", "correction": {"tis": "token"}})
    with pytest.raises(AssertionError, match="all weights are 1"):
        rl_objective(inputs_for(ratios=[1.0], advantages=[1.0]), algorithm)


def test_metrics_of_a_batch_without_trained_tokens():
    sums = {"loss": 0.0, "correction_weight_mean": 0.0, "correction_weight_square": 0.0, "num_tokens": 0.0}
    assert batch_metrics(sums, denominator=1.0) == {
        "loss": 0.0, "correction_weight_mean": 0.0, "correction_ess": 0.0, "num_tokens": 0.0,
    }  # fmt: skip


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
        policy_loss(LossConfig(name="ppo_clp"))


def test_sequences_and_steps_of_a_packed_row():
    """Two samples of trajectory 0 and one of trajectory 1; a sample in which nothing was sampled has no number."""
    forked = make_trajectory(
        make_step([1, 2], [3, 4], forced=[5]), make_step([1, 2, 3, 4, 5], [6]), make_step([9], [7, 8])
    )
    nothing = make_trajectory(make_step([1, 2, 3], [], forced=[4]))
    other = make_trajectory(make_step([1, 2], [3]))
    trajectories = enumerate((forked, nothing, other))
    row = pack_row([sample for index, one in trajectories for sample in merge_steps(one, trajectory_index=index)])
    assert row.target_ids.tolist() == [3, 4, 6, 7, 8, 3]
    zeros = torch.zeros(6)
    inputs = _loss_inputs(row, zeros, zeros, zeros)
    assert inputs.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2]
    assert inputs.step_ids.tolist() == [0, 0, 1, 2, 2, 3]
    masked = replace(row, loss_mask=torch.zeros(6, dtype=torch.bool))
    assert _loss_inputs(masked, zeros, zeros, zeros).step_ids.tolist() == [0] * 6
