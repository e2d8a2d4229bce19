"""The supervised warm start: a stage with an optimizer of its own, dropped when the stage is over."""

from collections.abc import Iterable, Iterator

from torch import nn

from megatron_agent.config import ExperimentConfig
from parallel.optimizer import LrScheduler, build_optimizer
from parallel.train_step import PolicyTrainer
from trajectory.packing import PackedMicrobatch


def run_sft(
    config: ExperimentConfig, model_chunks: list[nn.Module], batches: Iterable[tuple[list[PackedMicrobatch], float]]
) -> Iterator[dict[str, float]]:
    """One update per batch (this data rank's microbatches, the whole batch's denominator), at a constant `sft.lr`.

    Yields each update's metrics. Build the optimizer of the next stage after the last one: it copies the weights
    into its fp32 masters when it is built. Collective.
    """
    assert config.sft is not None, "the experiment has no sft section"
    options = config.optimizer.model_copy(update={"schedule": "constant", "warmup_updates": 0, "lr": config.sft.lr})
    optimizer = build_optimizer(config, model_chunks, lr=config.sft.lr)
    scheduler = LrScheduler(optimizer, options, total_updates=config.sft.steps)
    trainer = PolicyTrainer(config, model_chunks, optimizer, scheduler)
    for microbatches, denominator in batches:
        yield trainer.sft_update(microbatches, denominator=denominator)
