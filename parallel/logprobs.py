"""Log-probs and entropy of a row's tokens from logits whose vocabulary is split over tensor ranks.

The shift by one happens here and nowhere else: the value at index t is about token t and comes from the logits at
t - 1. Only tokens that are asked for cost anything, and fp32 copies of the logits exist for a few rows at a time.

Shapes: T tokens, N tokens that are asked for, V vocabulary entries of this tensor rank, K candidates for each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel import process_groups

# Elements of one fp32 chunk of logits: on CPU small enough to stay in the cache between the passes over it.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True)
class VocabSlice:
    """The part of the vocabulary that this tensor rank holds."""

    start: int
    num_real: int
    """Entries that are tokens; the ones behind them are padding."""
    temperature: float

    @classmethod
    def of(cls, logits: torch.Tensor, *, vocab_size: int, temperature: float) -> "VocabSlice":
        """That of this rank's logits [T, V]; `vocab_size` is the whole vocabulary's, without padding."""
        width = logits.shape[-1]
        start = process_groups.tensor_rank() * width
        return cls(start, min(width, max(0, vocab_size - start)), temperature)


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    vocab_size: int,
    temperature: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each token under softmax(logits / temperature), and that distribution's entropy.

    `logits` [T, V] of this tensor rank, `token_ids` int64 [T], `cu_seqlens` int32 [S+1], `vocab_size` without
    padding, `mask` bool [T] the tokens that are asked for (default: all). Returns (logprobs, entropy), fp32 [T] on the
    logits' device, equal on all tensor ranks: 0 where the mask is False and at the first token of each segment, which
    nothing predicts. Both are differentiable; a row that is not asked for gets a gradient of exactly 0, even where
    its logits are NaN. Collective over the tensor group.
    """
    logprobs, entropy, _ = token_and_candidate_logprobs(
        logits,
        token_ids,
        None,
        cu_seqlens=cu_seqlens,
        vocab_size=vocab_size,
        temperature=temperature,
        mask=mask,
    )
    return logprobs, entropy


def token_and_candidate_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    candidate_ids: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    vocab_size: int,
    temperature: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs`, and in the same pass the log-probs of K other tokens in the place of each one asked for.

    `candidate_ids` int [N, K], distinct in each row, in the order of the N tokens that are asked for; None: K is 0.
    Returns (logprobs [T], entropy [T], candidate_logprobs fp32 [N, K]), all differentiable, equal on all tensor
    ranks. Collective over the tensor group.
    """
    device = logits.device
    positions = asked_positions(token_ids.numel(), cu_seqlens, mask).to(device)
    targets = token_ids.to(device)[positions, None]
    if candidate_ids is not None:
        targets = torch.cat([targets, candidate_ids.to(device=device, dtype=targets.dtype)], dim=1)
    vocab = VocabSlice.of(logits, vocab_size=vocab_size, temperature=temperature)
    values, entropies = _LogProbEntropy.apply(logits, positions - 1, targets, vocab)  # type: ignore[misc]
    zeros = logits.new_zeros(token_ids.numel(), dtype=torch.float32)
    logprobs, entropy = (zeros.index_copy(0, positions, own) for own in (values[:, 0], entropies))
    return logprobs, entropy, values[:, 1:]


def asked_positions(num_tokens: int, cu_seqlens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """int64 [N] on CPU, rising: the tokens that are asked for, without the first ones of segments, which nothing
    predicts. The logits about token t are those at t - 1."""
    wanted = torch.ones(num_tokens, dtype=torch.bool) if mask is None else mask.to("cpu", copy=True)
    starts = cu_seqlens[:-1].long().cpu()
    wanted[starts[starts < num_tokens]] = False
    return wanted.nonzero().squeeze(1)


class _LogProbEntropy(torch.autograd.Function):
    """(logits [T, V], rows [N], targets [N, C]) -> (logprobs [N, C], entropy [N]).

    With z = logits / temperature, m its maximum, y = z - m, S = sum exp y over the whole vocabulary, p = exp(y) / S:
    log-prob = y[target] - log S, entropy = log S - sum p y.
    d logprob / dz = onehot(target) - p, d entropy / dz = -p * (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, vocab: VocabSlice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = process_groups.tensor_group()
        maximum = logits.new_full((len(rows),), -torch.inf, dtype=torch.float32)
        # Over the vocabulary, with y = z - m: sum exp y, and sum y exp y.
        sums = logits.new_zeros((2, len(rows)), dtype=torch.float32)
        at_targets = logits.new_zeros(targets.shape, dtype=torch.float32)
        local_targets = targets - vocab.start
        is_local = (local_targets >= 0) & (local_targets < vocab.num_real)
        local_targets = torch.where(is_local, local_targets, 0)
        if vocab.num_real:
            for part in row_chunks(logits, rows, vocab):
                z = scaled_rows(logits, rows[part], vocab)
                maximum[part] = z.amax(dim=-1)
                y = z.sub_(maximum[part, None])
                at_targets[part] = y.gather(1, local_targets[part])
                exp = y.exp()
                sums[0, part] = exp.sum(dim=-1)
                sums[1, part] = y.mul_(exp).sum(dim=-1)
        if group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            if vocab.num_real:  # from the local to the global maximum
                shift = local_maximum - maximum
                sums[1] = shift.exp() * (sums[1] + shift * sums[0])
                sums[0] *= shift.exp()
                at_targets += shift[:, None]
            at_targets = torch.where(is_local, at_targets, 0.0)
            # Apart, so that the sums are added in the same order whatever the number of targets.
            dist.all_reduce(sums, group=group)
            dist.all_reduce(at_targets, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        log_normalizer = maximum + log_sum
        ctx.save_for_backward(logits, rows, local_targets, is_local, log_normalizer, entropy)
        ctx.vocab = vocab
        return at_targets - log_sum[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad_logprobs, grad_entropy = grads
        logits, rows, local_targets, is_local, log_normalizer, entropy = ctx.saved_tensors
        vocab: VocabSlice = ctx.vocab
        grad_logits = torch.zeros_like(logits)
        if not vocab.num_real:
            return grad_logits, None, None, None
        has_entropy_grad = bool(grad_entropy.any())
        total = grad_logprobs.sum(dim=1)
        at_targets = torch.where(is_local, grad_logprobs, 0.0)
        for part in row_chunks(logits, rows, vocab):
            log_p = scaled_rows(logits, rows[part], vocab).sub_(log_normalizer[part, None])
            p = log_p.exp()
            if has_entropy_grad:
                factor = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(total[part, None])
                grad = p.mul_(factor).neg_()
            else:
                grad = p.mul_(-total[part, None])
            # One after the other: the token itself can be among the candidates, which are distinct, and with one
            # addition at a time the order cannot differ between GPU runs.
            grad.scatter_add_(1, local_targets[part, :1], at_targets[part, :1])
            grad.scatter_add_(1, local_targets[part, 1:], at_targets[part, 1:])
            if vocab.temperature != 1:
                grad.div_(vocab.temperature)
            grad_logits[rows[part], : vocab.num_real] = grad.to(logits.dtype)
        return grad_logits, None, None, None


def scaled_rows(logits: torch.Tensor, rows: torch.Tensor, vocab: VocabSlice) -> torch.Tensor:
    """fp32 copy [n, num_real] of some rows, divided by the temperature, without the padding."""
    z = logits[rows, : vocab.num_real].float()
    return z if vocab.temperature == 1 else z.div_(vocab.temperature)


def row_chunks(logits: torch.Tensor, rows: torch.Tensor, vocab: VocabSlice) -> Iterator[slice]:
    """Slices of `rows`, each so short that an fp32 copy of its logits is small."""
    step = max(1, _CHUNK_ELEMENTS[logits.device.type] // vocab.num_real)
    for first in range(0, len(rows), step):
        yield slice(first, first + step)
