"""How far the policy's distribution over the next token is from a teacher's, by the teacher's likeliest tokens.

Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD), on sequences that the policy sampled;
Thinking Machines Lab 2025, "On-Policy Distillation", for the reverse KL. No gradient flows through the sampling.

The vocabulary is coarsened to k + 1 outcomes: the teacher's k likeliest tokens one by one, and all others together as
one rest, with the probability 1 - sum of the k. With q the policy's and p the teacher's coarsened distribution and
m = (p + q) / 2:

    reverse   KL(q || p) = sum q (log q - log p)     seeks the teacher's modes
    forward   KL(p || q) = sum p (log p - log q)     covers all that the teacher does
    js        KL(p || m) / 2 + KL(q || m) / 2        Jensen-Shannon, at most log 2

Each is a true divergence of the coarsened distributions, so never negative, and never more than that of the whole
ones (data processing inequality): nothing is said about how the rest is spread over its tokens. With k the whole
vocabulary it is exact, to REST_FLOOR.
"""

import math
from collections.abc import Callable

import torch

REST_FLOOR = 1e-6
"""Least probability of the rest: in fp32, 1 - sum is only known to about this."""


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) [N] of log-probs [N, outcomes]."""
    return (student.exp() * (student - teacher)).sum(dim=-1)


def forward_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) [N] of log-probs [N, outcomes]."""
    return reverse_kl(teacher, student)


def jensen_shannon(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence [N] of log-probs [N, outcomes]."""
    middle = torch.logaddexp(student, teacher) - math.log(2)
    return 0.5 * (reverse_kl(student, middle) + reverse_kl(teacher, middle))


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
    "js": jensen_shannon,
}


def divergence(student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Divergence `kind` of each token, [N], in nats, differentiable in the student's log-probs.

    Both [N, k], of the same k tokens: the teacher's likeliest.
    """
    return DIVERGENCES[kind](_with_rest(student_logprobs), _with_rest(teacher_logprobs))


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probs [N, k + 1] of a distribution: those of the k tokens, and of all others together.

    Where less than REST_FLOOR is left, the rest has that, without a gradient of its own, and the sum, then above 1,
    is divided out.
    """
    rest = (1.0 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=REST_FLOOR)
    return torch.cat([logprobs, rest.log()], dim=-1).log_softmax(dim=-1)
