"""The policy's updates: forward and backward over packed microbatches, then one optimizer step.

    microbatches of this data rank -> 1F1B schedule -> gradients summed over microbatches and data ranks
                                   -> norm, clip, AdamW -> metrics of the whole batch, equal on all ranks

Every loss is a sum divided by one denominator that the caller computed for the whole batch, and nothing else
divides: the schedule and DDP are set to add. So any number of microbatches and any split over data, tensor and
pipeline ranks give the same gradient.
"""

import functools

import torch
from torch import nn

from megatron_agent.config import ExperimentConfig
from parallel.forward import compute_logprobs, microbatch_logprobs
from parallel.logprobs import token_and_candidate_logprobs
from parallel.losses import distillation
from parallel.losses.base import LossInputs, MetricTerms, select
from parallel.losses.kl import k3
from parallel.losses.metrics import batch_metrics
from parallel.losses.objective import rl_objective, sft_objective
from parallel.model import read_hf_config
from parallel.optimizer import LrScheduler
from parallel.updates import Objective, accumulate_gradients, add_gradients_only, apply_gradients, total_terms
from trajectory.packing import PackedMicrobatch


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
            add_gradients_only(chunk)

    def compute_logprobs(self, microbatches: list[PackedMicrobatch]) -> list[torch.Tensor]:
        """Log-probs of the rows' entries under the current weights at the rollout temperature.

        One float32 [N] CPU tensor per microbatch, on every rank of the model-parallel group.
        """
        return compute_logprobs(self._chunks, microbatches, vocab_size=self._vocab_size, temperature=self._temperature)

    def update(
        self, microbatches: list[PackedMicrobatch], *, denominator: float, on_policy: bool = False
    ) -> dict[str, float]:
        """One optimizer update; returns metrics of the whole batch, equal on all ranks.

        `microbatches` are this data rank's; `denominator` is that of the whole batch. `on_policy` says that these
        weights are those from before the batch's first update: then old log-probs are not needed, because this pass
        computes them. Metrics are means over trained tokens, except `loss` and `policy_loss` (the loss's own
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
        collected = accumulate_gradients(
            self._chunks, self._optimizer, microbatches, objective, denominator=denominator
        )
        metrics = _reduce_metrics(collected, denominator)
        metrics["lr"] = self._scheduler.lr
        metrics["grad_norm"] = apply_gradients(
            self._optimizer, self._scheduler, clip_grad=self._clip_grad, lr_field="optimizer.lr"
        )
        return metrics

    def _rl_loss(
        self, microbatch: PackedMicrobatch, logits: torch.Tensor, *, on_policy: bool
    ) -> tuple[torch.Tensor, MetricTerms]:
        logprobs, entropy, divergence = self._token_terms(microbatch, logits)
        current = logprobs.detach()
        if self._algorithm.old_logprobs == "rollout":
            old = microbatch.rollout_logprobs
        elif on_policy:
            old = current
        else:
            old = microbatch.old_logprobs
            if old is None:
                raise ValueError("a microbatch has no old_logprobs; compute them before the first of several updates")
        inputs = _loss_inputs(microbatch, logprobs, entropy, old, divergence)
        loss, terms = rl_objective(inputs, self._algorithm)
        trainer = current if self._algorithm.old_logprobs == "rollout" else inputs.old_logprobs
        gap = _gap_terms(inputs.mask, trainer, inputs.rollout_logprobs)
        return loss, MetricTerms(terms.sums | gap.sums, terms.maxima | gap.maxima)

    def _token_terms(
        self, microbatch: PackedMicrobatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log-probs, entropy, divergence from the teacher) of the row's entries, float32 [N]; without the teacher's
        top tokens no divergence."""
        logprobs, entropy, of_teachers_tokens = token_and_candidate_logprobs(
            logits,
            microbatch.asked_index,
            microbatch.target_ids,
            microbatch.teacher_top_ids,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
        )
        if microbatch.teacher_top_logprobs is None:
            return logprobs, entropy, None
        assert self._algorithm.teacher is not None
        divergence = distillation.divergence(
            of_teachers_tokens,
            microbatch.teacher_top_logprobs.to(logits.device),
            kind=self._algorithm.teacher.divergence,
        )
        return logprobs, entropy, divergence[microbatch.asked_index.to(logits.device)]

    def _sft_loss(self, microbatch: PackedMicrobatch, logits: torch.Tensor) -> tuple[torch.Tensor, MetricTerms]:
        logprobs, entropy = microbatch_logprobs(microbatch, logits, vocab_size=self._vocab_size, temperature=1.0)
        return sft_objective(_loss_inputs(microbatch, logprobs, entropy, logprobs.detach()))


def _loss_inputs(
    microbatch: PackedMicrobatch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    old_logprobs: torch.Tensor,
    divergence: torch.Tensor | None = None,
) -> LossInputs:
    """The loss's view of a microbatch, on the logits' device."""
    device = logprobs.device
    reference = microbatch.reference_logprobs
    return LossInputs(
        mask=microbatch.loss_mask.to(device),
        weights=microbatch.loss_weights.to(device),
        advantages=microbatch.advantages.to(device),
        logprobs=logprobs,
        old_logprobs=old_logprobs.to(device),
        rollout_logprobs=microbatch.rollout_logprobs.to(device),
        entropy=entropy,
        sequence_ids=microbatch.sample_index.to(device),
        step_ids=_step_ids(microbatch).to(device),
        reference_logprobs=None if reference is None else reference.to(device),
        divergence=divergence,
    )


def _step_ids(microbatch: PackedMicrobatch) -> torch.Tensor:
    """int64 [N]: number of each trained token's step in the row; a step's trained tokens follow one another."""
    mask = microbatch.loss_mask
    trajectory, step = microbatch.trajectory_index[mask], microbatch.step_index[mask]
    begins = torch.zeros(len(step), dtype=torch.int64)
    begins[1:] = (trajectory[1:] != trajectory[:-1]) | (step[1:] != step[:-1])
    return torch.zeros(len(mask), dtype=torch.int64).masked_scatter(mask, begins.cumsum(0))


def _gap_terms(mask: torch.Tensor, trainer: torch.Tensor, rollout: torch.Tensor) -> MetricTerms:
    """How far the trainer's log-probs are from the engine's."""
    gap = select(mask, trainer - rollout).abs()
    sums = {"logprob_gap_mean": gap.sum(), "logprob_gap_k3": select(mask, k3(rollout, trainer)).sum()}
    return MetricTerms(sums, {"logprob_gap_max": gap.max()})


def _reduce_metrics(collected: list[MetricTerms], denominator: float) -> dict[str, float]:
    """Metrics of the whole batch from what each last stage collected; every rank gets them. Collective."""
    sums, maxima = total_terms(collected)
    return batch_metrics(sums, denominator) | maxima
