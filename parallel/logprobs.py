"""Log-probs and entropy of sampled tokens from logits whose vocabulary is split over tensor ranks.

Fp32 copies of the logits exist for a few rows at a time, and what is kept for the backward pass beside the logits
themselves is a few numbers per row.

Shapes: R rows of logits, N entries that are each read from one of the rows, V vocabulary entries of this tensor rank,
K candidates for each row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        """That of this rank's logits [R, V]; `vocab_size` is the whole vocabulary's, without padding."""
        width = logits.shape[-1]
        start = process_groups.tensor_rank() * width
        return cls(start, min(width, max(0, vocab_size - start)), temperature)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, *, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each entry's token under softmax(logits / temperature), and that distribution's entropy.

    `logits` [R, V] of this tensor rank, `rows` int64 [N] the row that each entry is read from, `token_ids` int64 [N],
    `vocab_size` without padding. Returns (logprobs, entropy), fp32 [N] on the logits' device, equal on all tensor
    ranks. Both are differentiable; a row that nothing is read from gets a gradient of exactly 0, even where its logits
    are NaN. Collective over the tensor group.
    """
    logprobs, entropy, _ = token_and_candidate_logprobs(
        logits, rows, token_ids, None, vocab_size=vocab_size, temperature=temperature
    )
    return logprobs, entropy


def token_and_candidate_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    candidate_ids: torch.Tensor | None,
    *,
    vocab_size: int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs`, and in the same pass the log-probs of K other tokens in each row.

    `candidate_ids` int [R, K], distinct in each row; None: K is 0. Returns (logprobs [N], entropy [N],
    candidate_logprobs fp32 [R, K]), all differentiable, equal on all tensor ranks. Collective over the tensor group.
    """
    device = logits.device
    rows, token_ids = rows.to(device), token_ids.to(device)
    if candidate_ids is None:
        candidate_ids = token_ids.new_empty((len(logits), 0))
    candidate_ids = candidate_ids.to(device=device, dtype=token_ids.dtype)
    vocab = VocabSlice.of(logits, vocab_size=vocab_size, temperature=temperature)
    logprobs, entropy, of_candidates = _LogProbEntropy.apply(logits, rows, token_ids, candidate_ids, vocab)  # type: ignore[misc]
    return logprobs, entropy[rows], of_candidates


class _LogProbEntropy(torch.autograd.Function):
    """(logits [R, V], rows [N], token_ids [N], candidate_ids [R, K]) -> (logprobs [N], entropy [R], [R, K]).

    With z = logits / temperature, m its maximum, y = z - m, S = sum exp y over the whole vocabulary, p = exp(y) / S:
    log-prob = y[token] - log S, entropy = log S - sum p y.
    d logprob / dz = onehot(token) - p, d entropy / dz = -p * (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        candidate_ids: torch.Tensor,
        vocab: VocabSlice,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = process_groups.tensor_group()
        maximum = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        # Over the vocabulary, with y = z - m: sum exp y, and sum y exp y.
        sums = logits.new_zeros((2, len(logits)), dtype=torch.float32)
        if vocab.num_real:
            for part in row_chunks(logits, vocab):
                z = scaled_rows(logits, part, vocab)
                maximum[part] = z.amax(dim=-1)
                y = z.sub_(maximum[part, None])
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
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        tokens = _LocalTokens.of(rows, token_ids, vocab)
        candidates = _LocalTokens.of(
            torch.arange(len(logits), device=logits.device)[:, None].expand_as(candidate_ids), candidate_ids, vocab
        )
        values = [one.read(logits, maximum, vocab) - log_sum[one.rows] for one in (tokens, candidates)]
        entropy = log_sum - sums[1] / sums[0]
        # By row, so that each chunk of the backward pass finds its entries next to one another.
        order = rows.argsort(stable=True)
        ctx.save_for_backward(logits, maximum + log_sum, entropy, order, *tokens, *candidates)
        ctx.vocab = vocab
        return values[0], entropy, values[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy, grad_candidates = grads
        logits, log_normalizer, entropy, order, *saved = ctx.saved_tensors
        vocab: VocabSlice = ctx.vocab
        grad_logits = torch.zeros_like(logits)
        if not vocab.num_real:
            return grad_logits, None, None, None, None
        tokens, candidates = _LocalTokens(*saved[:3]), _LocalTokens(*saved[3:])
        has_entropy_grad, has_candidates = bool(grad_entropy.any()), grad_candidates.numel() > 0
        total = grad_candidates.sum(dim=1).index_add(0, tokens.rows, grad_logprobs)
        used = (total != 0) | (grad_entropy != 0) | (grad_candidates != 0).any(dim=1)
        used = used.index_fill(0, tokens.rows[grad_logprobs != 0], True)
        at_tokens = torch.where(tokens.is_local, grad_logprobs, 0.0)[order]
        at_candidates = torch.where(candidates.is_local, grad_candidates, 0.0)
        rows, ids = tokens.rows[order], tokens.ids[order]
        firsts = torch.searchsorted(rows, torch.arange(len(logits) + 1, device=rows.device)).tolist()
        for part in row_chunks(logits, vocab):
            log_p = scaled_rows(logits, part, vocab).sub_(log_normalizer[part, None])
            p = log_p.exp()
            if has_entropy_grad:
                factor = (log_p + entropy[part, None]).mul_(grad_entropy[part, None]).add_(total[part, None])
                grad = p.mul_(factor).neg_()
            else:
                grad = p.mul_(-total[part, None])
            own = slice(firsts[part.start], firsts[min(part.stop, len(logits))])
            grad.view(-1).index_add_(0, (rows[own] - part.start) * vocab.num_real + ids[own], at_tokens[own])
            if has_candidates:
                grad.scatter_add_(1, candidates.ids[part], at_candidates[part])
            if vocab.temperature != 1:
                grad.div_(vocab.temperature)
            grad_logits[part, : vocab.num_real] = grad
        if not used.all():  # in a row that no gradient comes to, NaN times 0 would be NaN
            grad_logits[~used] = 0.0
        return grad_logits, None, None, None, None


class _LocalTokens(NamedTuple):
    """Tokens in rows of logits, of which this rank holds some."""

    rows: torch.Tensor
    ids: torch.Tensor
    """Like rows; place in this rank's vocabulary, 0 where another holds the token."""
    is_local: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, token_ids: torch.Tensor, vocab: VocabSlice) -> "_LocalTokens":
        ids = token_ids - vocab.start
        is_local = (ids >= 0) & (ids < vocab.num_real)
        return cls(rows, torch.where(is_local, ids, 0), is_local)

    def read(self, logits: torch.Tensor, maximum: torch.Tensor, vocab: VocabSlice) -> torch.Tensor:
        """Logits / temperature - maximum of the tokens, fp32, on all tensor ranks. Collective."""
        group = process_groups.tensor_group()
        values = torch.zeros(self.ids.shape, dtype=torch.float32, device=logits.device)
        if vocab.num_real:
            values = logits[self.rows, self.ids].float()
            if vocab.temperature != 1:
                values.div_(vocab.temperature)
            values.sub_(maximum[self.rows])
        if group.size() == 1:  # an id that is no token of this model is impossible, and not another token
            return torch.where(self.is_local, values, -torch.inf)
        values = torch.where(self.is_local, values, 0.0)
        dist.all_reduce(values, group=group)
        return values


def scaled_rows(logits: torch.Tensor, part: slice, vocab: VocabSlice) -> torch.Tensor:
    """fp32 copy [n, num_real] of some rows, divided by the temperature, without the padding."""
    z = logits[part, : vocab.num_real].to(torch.float32, copy=True)
    return z if vocab.temperature == 1 else z.div_(vocab.temperature)


def row_chunks(logits: torch.Tensor, vocab: VocabSlice) -> Iterator[slice]:
    """Slices of the rows, each so short that an fp32 copy of its logits is small."""
    step = max(1, _CHUNK_ELEMENTS[logits.device.type] // vocab.num_real)
    for first in range(0, len(logits), step):
        yield slice(first, min(first + step, len(logits)))
