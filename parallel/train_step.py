"""The policy's updates: forward and backward over packed microbatches, then one optimizer step.

    microbatches of this data rank -> 1F1B schedule -> gradients summed over microbatches and data ranks
                                   -> norm, clip, AdamW -> metrics of the whole batch, equal on all ranks

Every loss is a sum divided by one denominator that the caller computed for the whole batch, and nothing else
divides: the schedule and DDP are set to add. So any number of microbatches and any split over data, tensor and
pipeline ranks give the same gradient.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import TrainingError
from parallel import process_groups
from parallel.forward import compute_logprobs, microbatch_logprobs, run_schedule
from parallel.losses.base import LossInputs, MetricTerms, select
from parallel.losses.kl import k3
from parallel.losses.objective import rl_objective, sft_objective
from parallel.model import read_hf_config
from parallel.optimizer import LrScheduler
from trajectory.packing import PackedMicrobatch

Objective = Callable[[PackedMicrobatch, torch.Tensor], tuple[torch.Tensor, MetricTerms]]
"""(microbatch, logits [T, V]) -> (loss sum with gradient, metric terms)."""


class PolicyTrainer:
    """Owns the policy's updates. All methods are collective: every rank calls them with as many microbatches."""

    def __init__(
        self, config: ExperimentConfig, model_chunks: list[nn.Module], optimizer, scheduler: LrScheduler
    ) -> None:
        """`model_chunks` as built for training, `optimizer` from `optimizer.build_optimizer` over the same chunks."""
        self._algorithm = config.algorithm
        self._temperature = config.rollout.temperature
        self._vocab_size = read_hf_config(config.model.path).vocab_size
        self._clip_grad = config.optimizer.clip_grad
        self._chunks = model_chunks
        self._optimizer = optimizer
        self._scheduler = scheduler
        for chunk in model_chunks:
            _add_gradients_only(chunk)

    def compute_logprobs(self, microbatches: list[PackedMicrobatch]) -> list[torch.Tensor]:
        """Log-probs of the trained tokens under the current weights at the rollout temperature.

        One float32 [T] CPU tensor per microbatch, 0 where masked, on every rank of the model-parallel group.
        """
        return compute_logprobs(self._chunks, microbatches, vocab_size=self._vocab_size, temperature=self._temperature)

    def update(
        self, microbatches: list[PackedMicrobatch], *, denominator: float, on_policy: bool = False
    ) -> dict[str, float]:
        """One optimizer update; returns metrics of the whole batch, equal on all ranks.

        `microbatches` are this data rank's; `denominator` is that of the whole batch. `on_policy` says that these
        weights have not been updated since the batch was sampled: then old log-probs are not needed, because this
        pass computes them. Metrics are means over trained tokens, except `loss` and `policy_loss` (the loss's own
        weighting), `*_max`, `grad_norm` (before clipping), `lr` and `num_tokens`.
        Raises TrainingError where the gradient is not finite; the weights are then unchanged.
        """
        return self._update(microbatches, functools.partial(self._rl_loss, on_policy=on_policy), denominator)

    def compare(self, microbatches: list[PackedMicrobatch]) -> dict[str, float]:
        """The gap between trainer and fleet on rows that are not trained: `logprob_gap_mean`, `_max` and `_k3`."""
        terms = []
        for microbatch, logprobs in zip(microbatches, self.compute_logprobs(microbatches), strict=True):
            mask = microbatch.loss_mask
            gap_terms = _gap_terms(mask, logprobs, select(mask, microbatch.rollout_logprobs))
            terms.append(MetricTerms(gap_terms.sums | {"num_tokens": mask.sum()}, gap_terms.maxima))
        metrics = _reduce_metrics(terms, denominator=1.0)
        del metrics["num_tokens"]
        return metrics

    def sft_update(self, microbatches: list[PackedMicrobatch], *, denominator: float) -> dict[str, float]:
        """Like `update`, on the negative log-likelihood of the trained tokens (temperature 1)."""
        return self._update(microbatches, self._sft_loss, denominator)

    def _update(
        self, microbatches: list[PackedMicrobatch], objective: Objective, denominator: float
    ) -> dict[str, float]:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
        self._optimizer.zero_grad()

        def last_stage(microbatch: PackedMicrobatch, logits: torch.Tensor):
            loss_sum, terms = objective(microbatch, logits)
            return loss_sum / denominator, torch.zeros((), dtype=torch.int, device=logits.device), terms

        collected = run_schedule(self._chunks, microbatches, last_stage, forward_only=False)
        metrics = _reduce_metrics(collected, denominator)
        metrics["lr"] = self._scheduler.lr
        metrics["grad_norm"] = self._step()
        return metrics

    def _rl_loss(
        self, microbatch: PackedMicrobatch, logits: torch.Tensor, *, on_policy: bool
    ) -> tuple[torch.Tensor, MetricTerms]:
        logprobs, entropy = microbatch_logprobs(
            microbatch, logits, vocab_size=self._vocab_size, temperature=self._temperature
        )
        current = logprobs.detach()
        if self._algorithm.old_logprobs == "rollout":
            old = microbatch.rollout_logprobs
        elif on_policy:
            old = current
        else:
            old = microbatch.old_logprobs
            if old is None:
                raise ValueError("a microbatch has no old_logprobs; compute them before the first of several updates")
        inputs = _loss_inputs(microbatch, logprobs, entropy, old)
        loss, terms = rl_objective(inputs, self._algorithm)
        rollout = select(inputs.mask, microbatch.rollout_logprobs.to(current.device))
        trainer = current if self._algorithm.old_logprobs == "rollout" else inputs.old_logprobs
        gap = _gap_terms(inputs.mask, trainer, rollout)
        return loss, MetricTerms(terms.sums | gap.sums, terms.maxima | gap.maxima)

    def _sft_loss(self, microbatch: PackedMicrobatch, logits: torch.Tensor) -> tuple[torch.Tensor, MetricTerms]:
        logprobs, entropy = microbatch_logprobs(microbatch, logits, vocab_size=self._vocab_size, temperature=1.0)
        return sft_objective(_loss_inputs(microbatch, logprobs, entropy, logprobs.detach()))

    def _step(self) -> float:
        """Clip and apply the gradients; returns their norm before clipping."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        self._optimizer.prepare_grads()
        grad_norm = self._optimizer.get_grad_norm()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient of update {self._scheduler.num_updates} has norm {grad_norm}; the weights were not "
                "changed. Lower optimizer.lr, or look for extreme advantages or rewards in this batch"
            )
        for part in self._optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if self._clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, self._clip_grad, grad_norm)
        self._optimizer.step_with_ready_grads()
        self._scheduler.step()
        return float(grad_norm)


def _add_gradients_only(chunk: nn.Module) -> None:
    """Make schedule and DDP add gradients over microbatches and data ranks, without any division."""
    from megatron.core.distributed import finalize_model_grads

    config: Any = chunk.config
    # Without this, both the schedule and DDP divide; the triple that the loss returns relies on it too.
    assert config.calculate_per_token_loss, "build the model with calculate_per_token_loss=True"

    def finalize(chunks: list[nn.Module], _num_tokens: torch.Tensor | None, **options) -> None:
        finalize_model_grads(chunks, None, **options)  # a number of tokens would divide once more

    config.finalize_model_grads_func = finalize
    config.no_sync_func = chunk.no_sync


def _loss_inputs(
    microbatch: PackedMicrobatch, logprobs: torch.Tensor, entropy: torch.Tensor, old_logprobs: torch.Tensor
) -> LossInputs:
    """The loss's view of a microbatch, on the logits' device and with 0 wherever a token is not trained."""
    device = logprobs.device
    mask = microbatch.loss_mask.to(device)
    reference = microbatch.reference_logprobs
    return LossInputs(
        mask=mask,
        weights=select(mask, microbatch.loss_weights.to(device)),
        advantages=select(mask, microbatch.advantages.to(device)),
        logprobs=select(mask, logprobs),
        old_logprobs=select(mask, old_logprobs.to(device)),
        entropy=select(mask, entropy),
        reference_logprobs=None if reference is None else select(mask, reference.to(device)),
    )


def _gap_terms(mask: torch.Tensor, trainer: torch.Tensor, rollout: torch.Tensor) -> MetricTerms:
    """How far the trainer's log-probs are from the engine's; both are 0 where masked."""
    gap = (trainer - rollout).abs()
    sums = {"logprob_gap_mean": gap.sum(), "logprob_gap_k3": select(mask, k3(rollout, trainer)).sum()}
    return MetricTerms(sums, {"logprob_gap_max": gap.max()})


def _reduce_metrics(collected: list[MetricTerms], denominator: float) -> dict[str, float]:
    """Metrics of the whole batch from what each last stage collected; every rank gets them. Collective.

    Tensor ranks hold equal values, so only the first of them counts.
    """
    counts = process_groups.is_last_stage() and process_groups.tensor_rank() == 0
    mine = [(_to_floats(terms.sums), _to_floats(terms.maxima)) for terms in collected] if counts else []
    gathered: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine, group=process_groups.cpu_group())
    everyone = [terms for rank_terms in gathered for terms in rank_terms]
    sums = {name: math.fsum(sums[name] for sums, _ in everyone) for name in everyone[0][0]}
    maxima = {name: max(maxima[name] for _, maxima in everyone) for name in everyone[0][1]}
    num_tokens = sums.pop("num_tokens")
    weighted = {name: sums.pop(name) / denominator for name in ("loss", "policy_loss") if name in sums}
    means = {name: value / max(1.0, num_tokens) for name, value in sums.items()}
    return weighted | means | maxima | {"num_tokens": num_tokens}


def _to_floats(terms: dict[str, torch.Tensor]) -> dict[str, float]:
    """One device-to-host copy for all of them."""
    if not terms:
        return {}
    values = torch.stack([value.to(torch.float64) for value in terms.values()]).tolist()
    return dict(zip(terms, values, strict=True))
