"""What holds for every loss on any microbatch: how it was split and ordered does not matter, nor what is masked."""

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agent.config import AlgorithmConfig
from parallel.losses.base import LossInputs, MetricTerms
from parallel.losses.objective import rl_objective
from parallel.losses.registry import POLICY_LOSSES

EVERYTHING_ELSE = {
    "plain": {},
    "kl_and_entropy": {"kl": {"coef": 0.1, "estimator": "k3_clamped", "gradient": "k2"}, "entropy_coef": 0.02},
    "tis_token": {"correction": {"tis": "token", "cap": 1.2, "mask": "token_band", "low": 0.7, "high": 1.5}},
    "tis_step": {"correction": {"tis": "step", "mask": "outlier", "low": 0.5}},
    "tis_sequence": {
        "correction": {"tis": "sequence", "mask": "geometric_band", "low": 0.8, "high": 1.3, "reject_k3": 0.2}
    },
}
OTHERS = st.sampled_from(sorted(EVERYTHING_ELSE))
VALUES = ("advantages", "logprobs", "old_logprobs", "rollout_logprobs", "entropy", "reference_logprobs", "weights")


@dataclass(frozen=True)
class Segment:
    """One token sequence: `values` of each name of VALUES, the step of each token, which are trained."""

    values: dict[str, list[float]]
    steps: list[int]
    mask: list[bool]


@st.composite
def segments(draw, *, on_policy: bool = False, masked: bool = False) -> Segment:
    """Lengths, steps and masks are drawn; the values are random numbers of a drawn seed."""
    mask = draw(st.lists(st.just(False) if masked else st.booleans(), min_size=1, max_size=8))
    steps = sorted(draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    random = Random(draw(st.integers(0, 10_000)))

    def column(low: float, high: float) -> list[float]:
        return [random.uniform(low, high) for _ in mask]

    old = column(-5.0, -0.1)
    values = {
        "advantages": column(-3.0, 3.0),
        "old_logprobs": old,
        "logprobs": old if on_policy else [a + b for a, b in zip(old, column(-1.0, 1.0), strict=True)],
        "rollout_logprobs": [a + b for a, b in zip(old, column(-0.5, 0.5), strict=True)],
        "reference_logprobs": [a + b for a, b in zip(old, column(-2.0, 2.0), strict=True)],
        "entropy": column(0.0, 3.0),
        "weights": column(0.1, 2.0),
    }
    return Segment(values=values, steps=steps, mask=mask)


def microbatch(rows: list[Segment], *, where_masked: float = 0.0) -> LossInputs:
    """The segments one after the other, in fp64; `where_masked` stands at every masked position."""
    mask = torch.tensor([m for row in rows for m in row.mask])
    tensors = {
        name: torch.where(mask, torch.tensor([v for r in rows for v in r.values[name]]).double(), where_masked)
        for name in VALUES
    }
    for name in ("logprobs", "entropy"):
        tensors[name].requires_grad_()
    return LossInputs(
        mask=mask,
        sequence_ids=torch.tensor([number for number, row in enumerate(rows) for _ in row.mask]),
        step_ids=step_numbers(rows),
        **tensors,
    )


def step_numbers(rows: list[Segment]) -> torch.Tensor:
    """Steps counted through the microbatch."""
    pairs = [(number, step) for number, row in enumerate(rows) for step in row.steps]
    order = {pair: index for index, pair in enumerate(dict.fromkeys(pairs))}
    return torch.tensor([order[pair] for pair in pairs])


def algorithm(loss: str, other: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"loss": {"name": loss}, **EVERYTHING_ELSE[other]})


def evaluate(
    inputs: LossInputs, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, MetricTerms]:
    """(loss, gradients by log-probs and by entropy, metric terms)."""
    loss, terms = rl_objective(inputs, config)
    by_logprobs, by_entropy = torch.autograd.grad(loss, [inputs.logprobs, inputs.entropy], allow_unused=True)
    return loss.detach(), by_logprobs, torch.zeros(1) if by_entropy is None else by_entropy, terms


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=40, deadline=None)
@given(other=OTHERS, rows=st.lists(segments(), min_size=2, max_size=6), data=st.data())
def test_split_into_microbatches(loss, other, rows, data):
    """Loss, gradients and every metric sum add up over the parts, whatever the parts are."""
    config = algorithm(loss, other)
    part_of = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    whole_loss, whole_gradient, _, whole_terms = evaluate(microbatch(rows), config)
    pieces = torch.split(whole_gradient, [len(row.mask) for row in rows])
    total, sums, maxima = torch.zeros(()).double(), dict.fromkeys(whole_terms.sums, 0.0), []
    for part in set(part_of):
        chosen = [index for index, its_part in enumerate(part_of) if its_part == part]
        part_loss, gradient, _, terms = evaluate(microbatch([rows[index] for index in chosen]), config)
        close(gradient, torch.cat([pieces[index] for index in chosen]))
        total += part_loss
        sums = {name: sums[name] + value.item() for name, value in terms.sums.items()}
        maxima.append(terms.maxima)
    close(total, whole_loss)
    assert sums == pytest.approx({name: value.item() for name, value in whole_terms.sums.items()}, rel=1e-9, abs=1e-10)
    for name, value in whole_terms.maxima.items():
        assert max(part[name].item() for part in maxima) == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=25, deadline=None)
@given(other=OTHERS, rows=st.lists(segments(), min_size=2, max_size=5), data=st.data())
def test_order_of_the_segments(loss, other, rows, data):
    config = algorithm(loss, other)
    order = data.draw(st.permutations(range(len(rows))))
    want_loss, want_gradient, _, _ = evaluate(microbatch(rows), config)
    pieces = torch.split(want_gradient, [len(row.mask) for row in rows])
    got_loss, got_gradient, _, _ = evaluate(microbatch([rows[index] for index in order]), config)
    close(got_loss, want_loss)
    close(got_gradient, torch.cat([pieces[index] for index in order]))


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=25, deadline=None)
@given(other=OTHERS, rows=st.lists(segments(), min_size=1, max_size=4), extra=segments(masked=True), data=st.data())
def test_masked_segments_add_nothing(loss, other, rows, extra, data):
    config = algorithm(loss, other)
    at = data.draw(st.integers(0, len(rows)))
    want_loss, want_gradient, _, want_terms = evaluate(microbatch(rows), config)
    got_loss, got_gradient, _, got_terms = evaluate(microbatch([*rows[:at], extra, *rows[at:]]), config)
    close(got_loss, want_loss)
    pieces = list(torch.split(want_gradient, [len(row.mask) for row in rows]))
    pieces.insert(at, torch.zeros(len(extra.mask)).double())
    close(got_gradient, torch.cat(pieces))
    for name, value in want_terms.sums.items():
        close(got_terms.sums[name].double(), value.double())


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=25, deadline=None)
@given(
    other=OTHERS,
    rows=st.lists(segments(), min_size=1, max_size=4),
    bad=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
)
def test_what_is_masked_is_never_read(loss, other, rows, bad):
    """NaN or inf at the masked positions of every tensor: bit for bit what zeros there give."""
    config = algorithm(loss, other)
    want_loss, want_logprobs, want_entropy, want = evaluate(microbatch(rows), config)
    got_loss, got_logprobs, got_entropy, got = evaluate(microbatch(rows, where_masked=bad), config)
    assert torch.equal(got_loss, want_loss)
    assert torch.equal(got_logprobs, want_logprobs)
    assert torch.equal(got_entropy, want_entropy)
    for name, value in (want.sums | want.maxima).items():
        assert torch.equal((got.sums | got.maxima)[name], value), name


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=15, deadline=None)
@given(other=OTHERS, rows=st.lists(segments(masked=True), min_size=1, max_size=3))
def test_all_masked_is_zero(loss, other, rows):
    value, by_logprobs, by_entropy, terms = evaluate(microbatch(rows, where_masked=math.nan), algorithm(loss, other))
    assert value.item() == 0.0
    assert not by_logprobs.any()
    assert not by_entropy.any()
    assert all(number.item() == 0.0 for number in (terms.sums | terms.maxima).values())


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=20, deadline=None)
@given(rows=st.lists(segments(on_policy=True), min_size=1, max_size=4))
def test_on_policy_gradient_is_the_policy_gradient(loss, dtype, rows):
    """Where old = current the ratio is exactly 1, nothing is clipped and the gradient is -A w."""
    inputs = microbatch(rows)
    tensors = {name: getattr(inputs, name).detach().to(dtype) for name in VALUES}
    tensors["old_logprobs"] = tensors["logprobs"].clone()
    inputs = replace(inputs, **tensors)
    inputs.logprobs.requires_grad_()
    value, terms = rl_objective(inputs, algorithm(loss, "plain"))
    value.backward()
    want = -(inputs.advantages * inputs.weights)
    torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, want, 0.0), rtol=1e-6, atol=0)
    assert terms.sums["ratio_mean"].item() == inputs.mask.sum().item()
    assert terms.maxima["ratio_max"].item() == float(inputs.mask.any())
    assert terms.sums["approx_kl"].item() == 0.0
    assert terms.sums.get("clip_frac", torch.zeros(())).item() == 0


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("difference", [-400.0, 400.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_runaway_log_probs_stay_finite(loss, difference, advantage):
    """In float32, where exp(400) is inf: loss, gradient and metrics are finite, with and without correction."""
    for other in EVERYTHING_ELSE:
        n = 3
        inputs = LossInputs(
            mask=torch.tensor([True, True, False]),
            weights=torch.ones(n),
            advantages=torch.full((n,), advantage),
            logprobs=torch.full((n,), -500.0 + difference).requires_grad_(),
            old_logprobs=torch.full((n,), -500.0),
            rollout_logprobs=torch.full((n,), -500.0 - difference),
            reference_logprobs=torch.full((n,), -500.0),
            entropy=torch.ones(n).requires_grad_(),
            sequence_ids=torch.zeros(n, dtype=torch.int64),
            step_ids=torch.zeros(n, dtype=torch.int64),
        )
        value, gradient, _, terms = evaluate(inputs, algorithm(loss, other))
        assert torch.isfinite(value), other
        assert torch.isfinite(gradient).all(), other
        assert all(torch.isfinite(number) for number in (terms.sums | terms.maxima).values()), other
