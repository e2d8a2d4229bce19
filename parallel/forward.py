"""One microbatch through the model under Megatron's pipeline schedule, and scoring without gradients.

Old, reference and trained log-probs all come from one function of parallel/logprobs.py, with the same packing, so on
equal weights they are equal bit for bit, whatever else is asked for in the same pass.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from parallel import process_groups
from parallel.logprobs import token_logprobs
from parallel.model import forward_row
from parallel.top_tokens import TopTokens, top_tokens
from trajectory.packing import PackedMicrobatch

LastStageFn = Callable[[PackedMicrobatch, torch.Tensor], object]
"""(microbatch, the last stage's output: this tensor rank's logits [R, V], a critic's values [R, 1]) -> what the
schedule collects."""


def run_schedule(
    model_chunks: list[nn.Module], microbatches: list[PackedMicrobatch], last_stage: LastStageFn, *, forward_only: bool
) -> list:
    """Run all microbatches forward (and backward), 1F1B where there are pipeline stages. Collective.

    For training, `last_stage` returns Megatron's triple: loss, number of tokens, anything to collect. Returns what
    was collected, one entry per microbatch, on the last stage, and an empty list elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[PackedMicrobatch], chunk: nn.Module):
        microbatch = next(iterator)
        output = forward_row(chunk, microbatch)
        # Megatron passes `non_loss_data` when it only collects; both kinds are the same function here.
        return output, lambda result, non_loss_data=False: last_stage(microbatch, result)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model_chunks,
        num_microbatches=len(microbatches),
        seq_length=max(microbatch.num_tokens for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def microbatch_logprobs(
    microbatch: PackedMicrobatch, logits: torch.Tensor, *, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropy) of the row's entries, float32 [N] on the logits' device."""
    return token_logprobs(
        logits, microbatch.asked_index, microbatch.target_ids, vocab_size=vocab_size, temperature=temperature
    )


def compute_logprobs(
    model_chunks: list[nn.Module], microbatches: list[PackedMicrobatch], *, vocab_size: int, temperature: float
) -> list[torch.Tensor]:
    """Log-probs of the rows' entries without gradient: one float32 [N] CPU tensor per microbatch.

    Collective over the model-parallel group; every rank of it gets them.
    """

    def last_stage(microbatch: PackedMicrobatch, logits: torch.Tensor) -> torch.Tensor:
        return microbatch_logprobs(microbatch, logits, vocab_size=vocab_size, temperature=temperature)[0]

    return score(model_chunks, microbatches, last_stage)


def compute_top_tokens(
    model_chunks: list[nn.Module],
    microbatches: list[PackedMicrobatch],
    *,
    k: int,
    vocab_size: int,
    ids_below: int,
    temperature: float,
) -> list[TopTokens]:
    """The k likeliest tokens behind each of the R that are asked, of each microbatch, on CPU; see `top_tokens`.

    Only the ranks of the last stage get them, which is where losses are; [] elsewhere. Collective over the
    model-parallel group.
    """

    def last_stage(_microbatch: PackedMicrobatch, logits: torch.Tensor) -> TopTokens:
        found = top_tokens(logits, k=k, vocab_size=vocab_size, temperature=temperature, ids_below=ids_below)
        return TopTokens(found.ids.cpu(), found.logprobs.cpu())

    with torch.no_grad():
        return run_schedule(model_chunks, microbatches, last_stage, forward_only=True)


def score(
    model_chunks: list[nn.Module],
    microbatches: list[PackedMicrobatch],
    last_stage: Callable[[PackedMicrobatch, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Run the model without gradient: one float32 [N] CPU tensor per microbatch, as `last_stage` gives it there.

    Collective over the model-parallel group; every rank of it gets them.
    """
    with torch.no_grad():
        collected = run_schedule(model_chunks, microbatches, last_stage, forward_only=True)
    lengths = [len(microbatch.target_ids) for microbatch in microbatches]
    if process_groups.is_last_stage():
        flat = torch.cat(collected)
    else:
        flat = torch.empty(sum(lengths), dtype=torch.float32, device=process_groups.device())
    if process_groups.pipeline_size() > 1:
        group = process_groups.pipeline_group()
        dist.broadcast(flat, src=dist.get_process_group_ranks(group)[-1], group=group)
    return list(flat.cpu().split(lengths))
