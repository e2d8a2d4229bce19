"""Log-probs and entropy of a row's tokens from logits whose vocabulary is split over tensor ranks.

The shift by one happens here and nowhere else: the value at index t is about token t and comes from the logits at
t - 1. Only tokens that are asked for cost anything, and fp32 copies of the logits exist for a few rows at a time.

Shapes: T tokens, N tokens that are asked for, V vocabulary entries of this tensor rank.
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
class _VocabSlice:
    """The part of the vocabulary that this tensor rank holds."""

    start: int
    num_real: int
    """Entries that are tokens; the ones behind them are padding."""
    temperature: float


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
    num_tokens, device = token_ids.numel(), logits.device
    wanted = torch.ones(num_tokens, dtype=torch.bool) if mask is None else mask.to("cpu", copy=True)
    starts = cu_seqlens[:-1].long().cpu()
    wanted[starts[starts < num_tokens]] = False
    positions = wanted.nonzero().squeeze(1).to(device)
    width = logits.shape[-1]
    start = process_groups.tensor_rank() * width
    vocab = _VocabSlice(start, min(width, max(0, vocab_size - start)), temperature)
    values = _LogProbEntropy.apply(logits, positions - 1, token_ids.to(device)[positions], vocab)
    zeros = logits.new_zeros(num_tokens, dtype=torch.float32)
    logprobs, entropy = (zeros.index_copy(0, positions, value) for value in values)  # type: ignore[union-attr]
    return logprobs, entropy


class _LogProbEntropy(torch.autograd.Function):
    """(logits [T, V], rows [N], targets [N]) -> (logprobs [N], entropy [N]).

    With z = logits / temperature, m its maximum, y = z - m, S = sum exp y over the whole vocabulary, p = exp(y) / S:
    log-prob = y[target] - log S, entropy = log S - sum p y.
    d logprob / dz = onehot(target) - p, d entropy / dz = -p * (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, vocab: _VocabSlice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = process_groups.tensor_group()
        maximum = logits.new_full((len(rows),), -torch.inf, dtype=torch.float32)
        # Over the vocabulary, with y = z - m: sum exp y, sum y exp y, and y of the target.
        sums = logits.new_zeros((3, len(rows)), dtype=torch.float32)
        local_targets = targets - vocab.start
        is_local = (local_targets >= 0) & (local_targets < vocab.num_real)
        local_targets = torch.where(is_local, local_targets, 0)
        if vocab.num_real:
            for part in _chunks(logits, rows, vocab):
                z = _scaled(logits, rows[part], vocab)
                maximum[part] = z.amax(dim=-1)
                y = z.sub_(maximum[part, None])
                sums[2, part] = y.gather(1, local_targets[part, None]).squeeze(1)
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
                sums[2] += shift
            sums[2] = torch.where(is_local, sums[2], 0.0)
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        log_normalizer = maximum + log_sum
        ctx.save_for_backward(logits, rows, local_targets, is_local, log_normalizer, entropy)
        ctx.vocab = vocab
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad_logprob, grad_entropy = grads
        logits, rows, local_targets, is_local, log_normalizer, entropy = ctx.saved_tensors
        vocab: _VocabSlice = ctx.vocab
        grad_logits = torch.zeros_like(logits)
        if not vocab.num_real:
            return grad_logits, None, None, None
        has_entropy_grad = bool(grad_entropy.any())
        for part in _chunks(logits, rows, vocab):
            log_p = _scaled(logits, rows[part], vocab).sub_(log_normalizer[part, None])
            p = log_p.exp()
            if has_entropy_grad:
                factor = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprob[part, None])
                grad = p.mul_(factor).neg_()
            else:
                grad = p.mul_(-grad_logprob[part, None])
            at_target = torch.where(is_local[part], grad_logprob[part], 0.0)
            grad.scatter_add_(1, local_targets[part, None], at_target[:, None])
            if vocab.temperature != 1:
                grad.div_(vocab.temperature)
            grad_logits[rows[part], : vocab.num_real] = grad.to(logits.dtype)
        return grad_logits, None, None, None


def _scaled(logits: torch.Tensor, rows: torch.Tensor, vocab: _VocabSlice) -> torch.Tensor:
    """fp32 copy [n, num_real] of some rows, divided by the temperature, without the padding."""
    z = logits[rows, : vocab.num_real].float()
    return z if vocab.temperature == 1 else z.div_(vocab.temperature)


def _chunks(logits: torch.Tensor, rows: torch.Tensor, vocab: _VocabSlice) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS[logits.device.type] // vocab.num_real)
    for first in range(0, len(rows), step):
        yield slice(first, first + step)
