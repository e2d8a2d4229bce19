"""The critic: a value model of its own beside the policy, with its own backbone, optimizer and learning rate.

It is split over the same ranks as the policy and trained by the same schedule, so its values, gradients and metrics
depend on the parallel sizes as little as the policy's do. It stays on the device: unlike a frozen model it has
gradient buffers and optimizer state, which Megatron does not move.
"""

import torch

from megatron_agent.config import ExperimentConfig
from parallel.forward import score
from parallel.hf_folder import load_hf_weights
from parallel.losses.base import MetricTerms
from parallel.losses.value import value_loss
from parallel.model import build_model
from parallel.optimizer import LrScheduler, build_optimizer
from parallel.updates import accumulate_gradients, add_gradients_only, apply_gradients, total_terms
from trajectory.packing import PackedMicrobatch

# Variance of the targets over their mean square; below it, float32 targets are all equal.
_NO_VARIANCE = 1e-12


class CriticTrainer:
    """Owns the critic. All methods are collective: every rank calls them with as many microbatches."""

    def __init__(self, config: ExperimentConfig, *, total_updates: int) -> None:
        """Build this rank's part of the critic and load its backbone; `total_updates` is the schedule's length.

        The folder is `algorithm.critic.path`, else `model.path`; its tokenizer has to be the policy's. Raises
        ModelFolderError where it cannot be loaded.
        """
        assert config.algorithm.critic is not None, "the experiment has no algorithm.critic section"
        self._options = config.algorithm.critic
        self._clip_grad = config.optimizer.clip_grad
        folder = self._options.path or config.model.path
        self.model_chunks = build_model(folder, config=config, for_training=True, value_head=True)
        load_hf_weights(self.model_chunks, folder, backbone_only=True)
        self.optimizer = build_optimizer(config, self.model_chunks, lr=self._options.lr)
        self.scheduler = LrScheduler(
            self.optimizer, config.optimizer, total_updates=total_updates, peak=self._options.lr
        )
        for chunk in self.model_chunks:
            add_gradients_only(chunk)

    def compute_values(self, microbatches: list[PackedMicrobatch]) -> list[torch.Tensor]:
        """Values under the current weights, of the state before each entry's token.

        One float32 [N] CPU tensor per microbatch, on every rank of the model-parallel group.
        """
        return score(self.model_chunks, microbatches, _values)

    def update(self, microbatches: list[PackedMicrobatch], *, denominator: float) -> dict[str, float]:
        """One optimizer update on sum(value_weights * loss) / denominator; metrics of the whole batch, equal on all
        ranks.

        `microbatches` are this data rank's and have `value_targets` and `value_weights`, with `value_clip` also
        `old_values`; `denominator` is that of the whole batch. Metrics: `value_loss` (weighted like the loss);
        `value_mean`, `value_clip_frac` and `value_explained_var`, 1 - Var(target - value) / Var(target) and 0 where
        all targets are equal, over the values that are trained, before this update; `critic_grad_norm` (before
        clipping) and `critic_lr`.
        Raises TrainingError where the gradient is not finite; the weights are then unchanged.
        """
        collected = accumulate_gradients(
            self.model_chunks, self.optimizer, microbatches, self._loss, denominator=denominator
        )
        sums, _ = total_terms(collected)
        metrics = _metrics(sums, denominator)
        metrics["critic_lr"] = self.scheduler.lr
        metrics["critic_grad_norm"] = apply_gradients(
            self.optimizer, self.scheduler, clip_grad=self._clip_grad, lr_field="algorithm.critic.lr"
        )
        return metrics

    def _loss(self, microbatch: PackedMicrobatch, output: torch.Tensor) -> tuple[torch.Tensor, MetricTerms]:
        """Only what is trained is read, so what stands elsewhere, NaN too, reaches nothing."""
        weights, targets = microbatch.value_weights, microbatch.value_targets
        if weights is None or targets is None:
            raise ValueError("a microbatch has no value_targets or value_weights; compute the advantages first")
        old_values, value_clip = microbatch.old_values, self._options.value_clip
        if value_clip is not None and old_values is None:
            raise ValueError("a microbatch has no old_values; algorithm.critic.value_clip needs them")
        is_trained = weights != 0
        values = _values(microbatch, output)[is_trained.to(output.device)]

        def trained(column: torch.Tensor) -> torch.Tensor:
            return column[is_trained].to(values.device)

        target = trained(targets)
        terms, stopped = value_loss(
            values, target, old_values=None if old_values is None else trained(old_values), value_clip=value_clip
        )
        loss = (trained(weights) * terms).sum()
        return loss, MetricTerms(_metric_sums(loss, values, target, stopped), {})


def _values(microbatch: PackedMicrobatch, output: torch.Tensor) -> torch.Tensor:
    """fp32 [N]: each entry's value from the critic's output [R, 1]."""
    return output[microbatch.asked_index.to(output.device), 0]


def _metric_sums(
    loss: torch.Tensor, values: torch.Tensor, targets: torch.Tensor, stopped: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Scalars that add up over any split; float64, because variances come from differences of sums."""
    values, targets = values.detach().double(), targets.double()
    errors = targets - values
    return {
        "loss": loss.detach(),
        "num_values": values.new_tensor(values.numel()),
        "stopped": stopped.sum(),
        "values": values.sum(),
        "targets": targets.sum(),
        "squared_targets": targets.square().sum(),
        "errors": errors.sum(),
        "squared_errors": errors.square().sum(),
    }


def _metrics(sums: dict[str, float], denominator: float) -> dict[str, float]:
    count = max(1.0, sums["num_values"])
    mean_square = sums["squared_targets"] / count
    target_variance = mean_square - (sums["targets"] / count) ** 2
    error_variance = sums["squared_errors"] / count - (sums["errors"] / count) ** 2
    varies = target_variance > _NO_VARIANCE * mean_square
    return {
        "value_loss": sums["loss"] / denominator,
        "value_mean": sums["values"] / count,
        "value_clip_frac": sums["stopped"] / count,
        "value_explained_var": 1.0 - error_variance / target_variance if varies else 0.0,
    }
