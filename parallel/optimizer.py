"""Megatron-core's optimizer over the DDP-wrapped model chunks, and the learning rate of each update.

With bf16 parameters the optimizer keeps fp32 masters; gradients are accumulated and reduced in fp32
by the DDP buffers. AdamW is Transformer Engine's or Apex's fused kernel where installed, else torch's.
"""

import math

import torch
from torch import nn

from megatron_agent.config import ExperimentConfig, OptimizerConfig
from parallel import process_groups


def build_optimizer(config: ExperimentConfig, model_chunks: list[nn.Module], *, lr: float | None = None):
    """Megatron's optimizer of these chunks. Collective over all ranks.

    Build it after the weights are loaded: the fp32 masters of bf16 parameters are copied here.
    `lr` replaces `optimizer.lr` as the peak, for a stage with a learning rate of its own.
    """
    if process_groups.device().type == "cpu":
        from parallel import cpu

        cpu.enable()
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    options = config.optimizer
    bf16 = config.model.dtype == "bf16"
    peak = options.lr if lr is None else lr
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=peak,
            min_lr=0.0,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=config.parallel.distributed_optimizer,
        ),
        model_chunks,  # pyright: ignore[reportArgumentType]
    )
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            group["fused"] = True
        _allocate_adam_state(adam)
    return optimizer


def torch_adams(optimizer) -> list[torch.optim.AdamW]:
    """The torch AdamWs inside Megatron's optimizer; none where a fused kernel of TE or Apex is used."""
    inner = [getattr(part, "optimizer", None) for part in optimizer.chained_optimizers]
    return [adam for adam in inner if isinstance(adam, torch.optim.AdamW)]


def _allocate_adam_state(adam: torch.optim.AdamW) -> None:
    """Allocate what the first step would.

    Megatron's distributed optimizer reads `step` when it saves and
    when it loads, so without this neither would work before the first step; and memory that does not
    suffice shows here and not in the middle of a run.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def learning_rate(update: int, *, options: OptimizerConfig, peak: float, total_updates: int) -> float:
    """The learning rate of update number `update`, counted from 0.

    Warm-up rises linearly through `warmup_updates` updates, none of them at 0, and update number
    `warmup_updates` is the first at the peak. The decay ends at `min_lr_frac * peak` with the last update.
    """
    if update < options.warmup_updates:
        return peak * (update + 1) / (options.warmup_updates + 1)
    if options.schedule == "constant":
        return peak
    start = options.warmup_updates
    if options.schedule == "wsd":  # the first update below the peak comes right after the stable ones
        start = max(start, total_updates - 1 - round(options.decay_frac * total_updates))
    progress = min(1.0, max(0, update - start) / max(1, total_updates - 1 - start))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if options.schedule == "cosine" else 1.0 - progress
    return peak * (options.min_lr_frac + (1.0 - options.min_lr_frac) * remaining)


class LrScheduler:
    """Keeps the optimizer's groups at the learning rate of the next update and at the other options of the run.

    All of them are set again after a checkpoint was loaded, which brings those of the run that wrote it.
    """

    def __init__(self, optimizer, options: OptimizerConfig, *, total_updates: int, peak: float | None = None):
        self._optimizer = optimizer
        self._options = options
        self._peak = options.lr if peak is None else peak
        self._total_updates = total_updates
        self._num_updates = 0
        self._apply()

    @property
    def num_updates(self) -> int:
        """Updates done so far."""
        return self._num_updates

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return learning_rate(
            self._num_updates, options=self._options, peak=self._peak, total_updates=self._total_updates
        )

    def step(self) -> None:
        """Count one update."""
        self._num_updates += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_updates = state["num_updates"]
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
            group["betas"] = self._options.betas
            group["eps"] = self._options.eps
            # Megatron marks biases and norms with wd_mult 0 and leaves the multiplication to the scheduler.
            group["weight_decay"] = self._options.weight_decay * group["wd_mult"]
