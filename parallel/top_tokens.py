"""The likeliest next tokens of a row, from logits whose vocabulary is split over tensor ranks.

    logits of each rank -> its own k likeliest and its log-sum-exp -> k candidates of every rank -> the k likeliest

No rank ever holds another's logits, and fp32 copies of its own exist for a few rows at a time.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel import process_groups
from parallel.logprobs import VocabSlice, row_chunks, scaled_rows


class TopTokens(NamedTuple):
    """The k likeliest tokens of each of R rows of logits, likeliest first; on CPU between passes."""

    ids: torch.Tensor
    """int32 [R, k]; distinct in each row."""
    logprobs: torch.Tensor
    """float32 [R, k]; under the distribution over the whole vocabulary, so their probabilities sum to less than 1."""


def top_tokens(
    logits: torch.Tensor, *, k: int, vocab_size: int, temperature: float, ids_below: int | None = None
) -> TopTokens:
    """The k likeliest tokens under softmax(logits / temperature) of each row.

    `logits` [R, V] of this tensor rank, `vocab_size` without padding. With `ids_below` only ids under it are
    candidates. Equal on all tensor ranks, on the logits' device; no gradient. Collective over the tensor group.
    Raises ValueError where there are fewer than k candidates.
    """
    num_ids = vocab_size if ids_below is None else min(vocab_size, ids_below)
    if k > num_ids:
        raise ValueError(f"the {k} likeliest of {num_ids} tokens were asked for; lower algorithm.teacher.top_k")
    vocab = VocabSlice.of(logits, vocab_size=vocab_size, temperature=temperature)
    ids = torch.zeros((len(logits), k), dtype=torch.int32, device=logits.device)
    # The last column is the log of the sum of exp over this rank's vocabulary.
    values = torch.full((len(logits), k + 1), -torch.inf, device=logits.device)
    num_candidates = min(vocab.num_real, max(0, num_ids - vocab.start))
    num_own = min(k, num_candidates)
    if vocab.num_real:
        for part in row_chunks(logits, vocab):
            z = scaled_rows(logits.detach(), part, vocab)
            values[part, -1] = z.logsumexp(dim=-1)
            if num_own:
                own = z[:, :num_candidates].topk(num_own)
                values[part, :num_own] = own.values
                ids[part, :num_own] = (own.indices + vocab.start).int()
    all_values, all_ids = _of_all_ranks(values), _of_all_ranks(ids)
    log_normalizer = torch.stack([of_rank[:, -1] for of_rank in all_values]).logsumexp(dim=0)
    best = torch.cat([of_rank[:, :-1] for of_rank in all_values], dim=1).topk(k)
    return TopTokens(torch.cat(all_ids, dim=1).gather(1, best.indices), best.values - log_normalizer[:, None])


def _of_all_ranks(own: torch.Tensor) -> list[torch.Tensor]:
    group = process_groups.tensor_group()
    if group.size() == 1 or not own.numel():
        return [own] * group.size()
    shards = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(shards, own, group=group)
    return shards
