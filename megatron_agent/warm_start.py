"""The `sft:` stage: a few supervised updates on demonstrations before reinforcement learning starts."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_agent.batching import Minibatch
from megatron_agent.config import ExperimentConfig
from megatron_agent.data import load_records
from megatron_agent.errors import DataError
from megatron_agent.scoring import share_minibatch
from megatron_agent.session import Session
from megatron_agent.tools.formats import get_tool_format
from parallel.sft_step import run_sft
from rollout.chat_renderer import TemplateRenderer
from trajectory.packing import plan_microbatches
from trajectory.samples import Sample


def warm_start(session: Session) -> None:
    """Train the session's model on `sft.data` for `sft.steps` updates. Collective."""
    config = session.config
    assert config.sft is not None, "called only where the experiment has an sft section"
    samples = demonstration_samples(config) if session.rollout else None
    batches = (share_minibatch(_minibatch(session, samples, update))[:2] for update in range(config.sft.steps))
    for update, metrics in enumerate(run_sft(config, session.model_chunks, batches), start=1):
        if session.rollout:
            session.rollout.display.phase(f"warm start {update}/{config.sft.steps}, loss {metrics['loss']:.3f}")
            last = metrics
    if session.rollout:
        session.rollout.display.message(f"warm start: {config.sft.steps} updates, last loss {last['loss']:.3f}")


def demonstration_samples(config: ExperimentConfig) -> list[Sample]:
    """One sample for each demonstration; the assistant's turns are trained."""
    assert config.sft is not None
    renderer = TemplateRenderer(config.model.path, get_tool_format(config.agent.tool_format))
    samples = []
    for index, (where, record) in enumerate(load_records(config.sft.data, config.sft.data_args)):
        samples.append(_sample(renderer, record, index=index, where=where))
    if not samples:
        raise DataError(f"sft.data {config.sft.data}: no demonstrations")
    return samples


def _sample(renderer: TemplateRenderer, record: Any, *, index: int, where: str) -> Sample:
    messages = record.get("messages")
    if not messages or not any(message.get("role") == "assistant" for message in messages):
        raise DataError(f"{where}: a demonstration has `messages` with at least one of the assistant")
    ids, mask = renderer.demonstration(messages, record.get("tools") or [])
    loss_mask = np.array(mask)
    return Sample(
        trajectory_index=index,
        first_trained=0,
        token_ids=np.array(ids, dtype=np.int64),
        loss_mask=loss_mask,
        value_mask=loss_mask,
        step_index=np.where(loss_mask, 0, -1).astype(np.int32),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        loss_weights=loss_mask.astype(np.float32),
    )


def _minibatch(session: Session, samples: Sequence[Sample] | None, update: int) -> Minibatch | None:
    """The demonstrations of one update (rank 0), drawn in an order that depends on the seed alone."""
    if samples is None:
        return None
    config = session.config
    assert config.sft is not None
    chosen = [samples[index] for index in _draw(len(samples), config.sft.batch_size, config.run.seed, update)]
    return Minibatch(
        per_data_rank=plan_microbatches(
            chosen,
            tokens_per_row=config.packing.tokens_per_row,
            share=config.packing.prefix_tree,
            **session.layout,
        ),
        denominator=float(sum(sample.loss_mask.sum() for sample in chosen)),
    )


def _draw(total: int, count: int, seed: int, update: int) -> Iterator[int]:
    """`count` indices: passes over all demonstrations, each in an order of its own."""
    order: list[int] = []
    for position in range(update * count, (update + 1) * count):
        number, place = divmod(position, total)
        if not order or place == 0:
            order = list(range(total))
            random.Random(f"{seed}/{number}").shuffle(order)
        yield order[place]
