"""One optimizer update, the same for policy and critic: gradients that only add up, the step, sums over the batch.

Every loss is a sum divided by one denominator that the caller computed for the whole batch, and nothing else
divides: the schedule and DDP are set to add.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_agent.errors import TrainingError
from parallel import process_groups
from parallel.forward import run_schedule
from parallel.losses.base import MetricTerms
from parallel.optimizer import LrScheduler
from trajectory.packing import PackedMicrobatch

Objective = Callable[[PackedMicrobatch, torch.Tensor], tuple[torch.Tensor, MetricTerms]]
"""(microbatch, the last stage's output) -> (loss sum with gradient, metric terms)."""


def add_gradients_only(chunk: nn.Module) -> None:
    """Make schedule and DDP add gradients over microbatches and data ranks, without any division."""
    from megatron.core.distributed import finalize_model_grads

    config: Any = chunk.config
    # Without this, both the schedule and DDP divide; the triple that the loss returns relies on it too.
    assert config.calculate_per_token_loss, "build the model with calculate_per_token_loss=True"

    def finalize(chunks: list[nn.Module], _num_tokens: torch.Tensor | None, **options) -> None:
        finalize_model_grads(chunks, None, **options)  # a number of tokens would divide once more

    config.finalize_model_grads_func = finalize
    config.no_sync_func = chunk.no_sync


def accumulate_gradients(
    chunks: list[nn.Module],
    optimizer: Any,
    microbatches: list[PackedMicrobatch],
    objective: Objective,
    *,
    denominator: float,
) -> list[MetricTerms]:
    """Gradients of the batch's loss in the chunks' buffers; the metric terms of each microbatch on the last stage,
    an empty list elsewhere. Collective."""
    for chunk in chunks:
        chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
    optimizer.zero_grad()

    def last_stage(microbatch: PackedMicrobatch, output: torch.Tensor):
        loss_sum, terms = objective(microbatch, output)
        return loss_sum / denominator, torch.zeros((), dtype=torch.int, device=output.device), terms

    return run_schedule(chunks, microbatches, last_stage, forward_only=False)


def apply_gradients(optimizer: Any, scheduler: LrScheduler, *, clip_grad: float, lr_field: str) -> float:
    """Clip and apply the gradients and count the update; returns their norm before clipping. Collective.

    `clip_grad` is the largest norm, 0 for none; `lr_field` is the setting that the error names. Raises TrainingError
    where the norm is not finite; the weights are then unchanged.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    optimizer.prepare_grads()
    grad_norm = optimizer.get_grad_norm()
    if not math.isfinite(grad_norm):
        raise TrainingError(
            f"the gradient of update {scheduler.num_updates} has norm {grad_norm}; the weights were not changed. "
            f"Lower {lr_field}, or look for extreme advantages or rewards in this batch"
        )
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    scheduler.step()
    return float(grad_norm)


def total_terms(collected: list[MetricTerms]) -> tuple[dict[str, float], dict[str, float]]:
    """(sums, maxima) of the whole batch from what each last stage collected; every rank gets them. Collective.

    Tensor ranks hold equal values, so only the first of them counts.
    """
    counts = process_groups.is_last_stage() and process_groups.tensor_rank() == 0
    mine = [(_to_floats(terms.sums), _to_floats(terms.maxima)) for terms in collected] if counts else []
    gathered: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine, group=process_groups.cpu_group())
    everyone = [terms for rank_terms in gathered for terms in rank_terms]
    sums = {name: math.fsum(sums[name] for sums, _ in everyone) for name in everyone[0][0]}
    maxima = {name: max(maxima[name] for _, maxima in everyone) for name in everyone[0][1]}
    return sums, maxima


def _to_floats(terms: dict[str, torch.Tensor]) -> dict[str, float]:
    """One device-to-host copy for all of them."""
    if not terms:
        return {}
    values = torch.stack([value.to(torch.float64) for value in terms.values()]).tolist()
    return dict(zip(terms, values, strict=True))
