"""Divergences from a teacher's top tokens: by hand, against plain formulas with autograd in fp64, and their bounds."""

import math

import pytest
import torch

from megatron_agent.config import AlgorithmConfig
from parallel.losses.base import LossInputs
from parallel.losses.distillation import DIVERGENCES, REST_FLOOR, divergence
from parallel.losses.objective import rl_objective

VOCAB, K = 11, 4


def distributions(seed: int = 0, num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student logits with gradient, teacher log-probs, both [N, VOCAB] fp64, and the teacher's top ids [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn((2, num_tokens, VOCAB), generator=generator, dtype=torch.float64)
    teacher = teacher.log_softmax(-1)
    return student.clone().requires_grad_(), teacher, teacher.topk(K).indices


def plain(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """The formula on probabilities [N, outcomes]."""
    q, p = student, teacher
    m = (p + q) / 2
    terms = {
        "reverse": q * (q / p).log(),
        "forward": p * (p / q).log(),
        "js": p * (p / m).log() / 2 + q * (q / m).log() / 2,
    }
    return terms[kind].sum(-1)


def coarsened(probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, K + 1]: the K tokens and, added up one by one, all others."""
    others = torch.ones_like(probs).scatter(1, ids, 0.0)
    return torch.cat([probs.gather(1, ids), (probs * others).sum(-1, keepdim=True)], dim=1)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_value_and_gradient_of_the_plain_formula(kind):
    student, teacher, ids = distributions()
    want = plain(coarsened(student.softmax(-1), ids), coarsened(teacher.exp(), ids), kind)
    (gradient,) = torch.autograd.grad(want.sum(), student)
    got = divergence(student.log_softmax(-1).gather(1, ids), teacher.gather(1, ids), kind=kind)
    (got_gradient,) = torch.autograd.grad(got.sum(), student)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-11, atol=1e-13)
    assert torch.autograd.gradcheck(
        lambda z: divergence(z.log_softmax(-1).gather(1, ids), teacher[:, :K], kind=kind), student
    )


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("reverse", 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),  # q (1/4, 3/4), p (1/2, 1/2)
        ("forward", 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ("js", 0.25 * (math.log(4 / 3) + math.log(0.8)) + 0.125 * math.log(2 / 3) + 0.375 * math.log(1.2)),
    ],
)
def test_by_hand(kind, value):
    student, teacher = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()
    assert divergence(student, teacher, kind=kind).tolist() == pytest.approx([value], rel=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_never_negative_and_never_more_than_of_the_whole_distributions(kind):
    student, teacher, _ = distributions(seed=1, num_tokens=200)
    q = student.detach().log_softmax(-1)
    whole = plain(q.exp(), teacher.exp(), kind)
    before = torch.zeros(200, dtype=torch.float64)
    for k in range(1, VOCAB):  # and more tokens tell more
        ids = teacher.topk(k).indices
        got = divergence(q.gather(1, ids), teacher.gather(1, ids), kind=kind)
        assert (got >= before - 1e-12).all()
        assert (got <= whole + 1e-12).all()
        before = got
    ids = teacher.topk(VOCAB).indices
    everything = divergence(q.gather(1, ids), teacher.gather(1, ids), kind=kind)
    torch.testing.assert_close(everything, whole, rtol=1e-4, atol=10 * REST_FLOOR)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_and_all_but_certain_distributions(kind):
    """In fp32 the k tokens can add up to more than 1: the rest is floored, and value and gradient stay finite."""
    logits = torch.tensor([[30.0, 0.0, -30.0], [0.0, 0.0, -90.0], [-60.0, 40.0, 0.0]])
    teacher = logits.log_softmax(-1)[:, :2]
    student = teacher.clone().requires_grad_()
    equal = divergence(student, teacher, kind=kind)
    equal.sum().backward()
    assert equal.tolist() == pytest.approx([0.0] * 3, abs=1e-7)
    assert student.grad.abs().max().item() == pytest.approx(0.0, abs=1e-6)
    apart = teacher.roll(1, dims=0).clone().requires_grad_()
    values = divergence(apart, teacher, kind=kind)
    values.sum().backward()
    assert (values > 0).all()
    assert torch.isfinite(values).all()
    assert torch.isfinite(apart.grad).all()


def inputs_with(of_teacher: torch.Tensor | None) -> LossInputs:
    zeros = torch.zeros(3)
    return LossInputs(
        mask=torch.tensor([True, False, True]), weights=torch.tensor([0.5, math.nan, 2.0]), advantages=zeros,
        logprobs=zeros.clone().requires_grad_(), old_logprobs=zeros, rollout_logprobs=zeros, entropy=zeros,
        sequence_ids=zeros.long(), step_ids=zeros.long(), divergence=of_teacher,
    )  # fmt: skip


def test_objective_adds_the_divergence_weighted_like_the_loss():
    """And a NaN where nothing is trained stays out, forward and backward."""
    of_teacher = torch.tensor([0.25, math.nan, 0.5], requires_grad=True)
    algorithm = AlgorithmConfig.model_validate({"teacher": {"path": "t", "top_k": 4, "coef": 3.0}})
    loss, metrics = rl_objective(inputs_with(of_teacher), algorithm)
    loss.backward()
    assert loss.item() == pytest.approx(3.0 * (0.5 * 0.25 + 2.0 * 0.5))
    assert metrics.sums["distill"].item() == pytest.approx(0.75), "a plain sum: the metric is a mean over tokens"
    assert metrics.sums["policy_loss"].item() == 0.0
    assert of_teacher.grad.tolist() == [1.5, 0.0, 6.0]


def test_objective_without_what_the_teacher_said():
    wanted = AlgorithmConfig.model_validate({"teacher": {"path": "t", "top_k": 4}})
    with pytest.raises(ValueError, match="teacher_top_ids"):
        rl_objective(inputs_with(None), wanted)
    by_advantages = AlgorithmConfig.model_validate({"teacher": {"path": "t"}})
    assert "distill" not in rl_objective(inputs_with(None), by_advantages)[1].sums
