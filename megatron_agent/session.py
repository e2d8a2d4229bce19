"""What one rank of a run holds: model, optimizer and weight sender everywhere, the rollout side on rank 0.

Wired here once and released here once; the loop in train.py only uses it. Methods are collective unless they
say otherwise: every rank calls them, in the same order.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_agent.batching import BatchBuilder
from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import checkpoint_folder, runs_on_gpus, sync_backend
from megatron_agent.errors import CheckpointError
from megatron_agent.model_folders.registry import ensure_model_folder
from megatron_agent.rollout_side import RolloutSide, open_rollout_side
from parallel import checkpoint, process_groups
from parallel.critic import CriticTrainer
from parallel.distribute import broadcast_object
from parallel.families.registry import family_for
from parallel.hf_export import export_hf
from parallel.hf_folder import load_hf_weights
from parallel.model import build_model, read_hf_config
from parallel.optimizer import LrScheduler, build_optimizer
from parallel.reference import FrozenModel
from parallel.train_step import PolicyTrainer
from parallel.weight_sender import WeightSender
from parallel.weight_source import MegatronWeightSource
from rollout.episodes import RolloutResult
from trajectory.packing import PackedMicrobatch


@dataclass(kw_only=True)
class Session:
    """One rank's parts of a run. `rollout` and `batches` exist on rank 0 only; what trains, where the run trains."""

    config: ExperimentConfig
    model_chunks: list[nn.Module]
    rollout: RolloutSide | None
    sender: WeightSender
    batches: BatchBuilder | None = None
    policy: PolicyTrainer | None = None
    reference: FrozenModel | None = None
    teacher: FrozenModel | None = None
    critic: CriticTrainer | None = None
    optimizer: Any = None
    scheduler: LrScheduler | None = None
    version: int = -1
    """Of the weights that the fleet got last."""
    in_flight: int | None = None
    """The training step whose episodes are being played, on every rank."""
    brought_in: tuple[int, RolloutResult | None] | None = None
    """The training step whose episodes have been played but not used, and on rank 0 the episodes."""

    def start_training(self) -> None:
        """Make the optimizer, whose fp32 masters copy the weights as they are now, and the policy trainer."""
        algorithm = self.config.algorithm
        critic = algorithm.critic
        steps = self.config.run.steps
        total_updates = (steps - (critic.warmup_steps if critic else 0)) * algorithm.epochs * algorithm.minibatches
        self.optimizer = build_optimizer(self.config, self.model_chunks)
        self.scheduler = LrScheduler(self.optimizer, self.config.optimizer, total_updates=total_updates)
        self.policy = PolicyTrainer(self.config, self.model_chunks, self.optimizer, self.scheduler)
        if critic:
            self.critic = CriticTrainer(self.config, total_updates=steps * critic.epochs * algorithm.minibatches)
        if algorithm.kl.coef > 0:
            self.reference = FrozenModel(self.config, self.config.model.path)
        if algorithm.teacher and not algorithm.teacher.replicas:
            self.teacher = FrozenModel(self.config, algorithm.teacher.path)
        if self.rollout:
            self.batches = BatchBuilder(self.config, **self.layout, teacher=self.rollout.teacher)

    def newest_checkpoint(self) -> Path | None:
        """Where this run goes on from, as run.resume says; None for a fresh start."""
        folder = checkpoint_folder(self.config)
        found = broadcast_object(checkpoint.latest(folder))
        if found and self.config.run.resume == "never":
            raise CheckpointError(
                f"run.resume is `never`, but {found} exists; choose another run.name, or resume with run.resume=auto"
            )
        if found is None and self.config.run.resume == "must":
            raise CheckpointError(f"run.resume is `must`, but {folder} holds no complete checkpoint")
        return found

    def restore(self, path: Path) -> int:
        """Continue from a checkpoint: weights, optimizer, schedule, RNG, data position, metrics. Returns its step."""
        assert self.scheduler is not None
        state = checkpoint.load(
            path,
            model_chunks=self.model_chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            critic=self.critic,
        )
        if self.rollout and self.batches:
            self.rollout.restore(state)
            self.batches.load_state_dict(state.get("credit", {}))
        return state["step"]

    def load_policy(self, path: Path | None) -> int:
        """Take the weights of a checkpoint: of `path`, or of this run's newest. Returns its step; 0, with the base
        model's weights, where there is none."""
        path = path or broadcast_object(checkpoint.latest(checkpoint_folder(self.config)))
        return checkpoint.load_weights(path, model_chunks=self.model_chunks) if path else 0

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`; the last `checkpoint.keep_last` stay."""
        assert self.scheduler is not None
        own: dict[str, Any] = {}
        if self.rollout and self.batches:
            own = self.rollout.state_dict() | {"credit": self.batches.state_dict()}
        checkpoint.save(
            checkpoint_folder(self.config),
            step,
            model_chunks=self.model_chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            critic=self.critic,
            extra_state={"step": step, **own},
            keep_last=self.config.checkpoint.keep_last,
        )

    def export(self, folder: Path) -> None:
        """Write the weights as an HF folder."""
        export_hf(self.model_chunks, self.config.model.path, folder)

    @property
    def layout(self) -> dict[str, Any]:
        """How batches have to be laid out for these ranks and this model."""
        hf_config = read_hf_config(self.config.model.path)
        sequence_parallel = self.config.parallel.sequence and process_groups.tensor_size() > 1
        return {
            "data_parallel_size": process_groups.data_size(),
            "pad_multiple": process_groups.tensor_size() if sequence_parallel else 1,
            "pair_cost": family_for(hf_config).attention_pair_cost(hf_config),
        }

    def start_rollout(self, step: int) -> None:
        """Begin to play the episodes of a training step, in the background of rank 0. Waits for no rank."""
        assert self.in_flight is None
        assert self.brought_in is None, f"the episodes of step {self.brought_in} have not been used"
        self.in_flight = step
        if self.rollout and (batches := self.batches):
            self.rollout.start_training(step, kept=lambda groups: len(batches.kept(groups, step=step)[0]))

    def bring_in(self, *, version: int) -> None:
        """Wait until no training episode is in flight; what came is kept for its step.

        `version` is that of the trainer's weights.
        """
        if self.in_flight is not None:
            result = self.finish_episodes("train", version=version)
            self.brought_in, self.in_flight = (self.in_flight, result), None

    def training_episodes(self, step: int) -> RolloutResult | None:
        """The episodes of a training step on rank 0, None elsewhere: started now, or while the step before trained."""
        if self.in_flight is None and self.brought_in is None:
            self.start_rollout(step)
        self.bring_in(version=step - 1)
        assert self.brought_in is not None
        (of_step, result), self.brought_in = self.brought_in, None
        assert of_step == step, f"the episodes are those of step {of_step}, not {step}"
        if self.rollout and result:
            self.rollout.take(result, step=step, phase="train")
        return result

    def finish_episodes(self, phase: str, *, version: int) -> RolloutResult | None:
        """Wait for what rank 0 started; its result there, None elsewhere.

        A restarted replica gets the trainer's weights, which are of `version`, before it serves: rank 0 asks the other
        ranks for them.
        """
        while True:
            result = None
            if self.rollout:
                beat = Heartbeat(self.config.parallel.timeout_s / 4)
                result = self.rollout.finish_episodes(phase, while_waiting=beat)
                state = broadcast_object("over" if result else "wants weights")
            else:
                while (state := broadcast_object(None)) == Heartbeat.STATE:
                    pass
            if state == "over":
                return result
            self.sync_weights(version=version)

    def sync_weights(self, *, version: int) -> dict[str, float]:
        """Hand the current weights to every replica of the fleet; returns what it took. No episode may be in flight."""
        self.version = version
        return self.sender.send(version)

    def refresh_fleet(self, *, version: int) -> dict[str, float]:
        """Like `sync_weights`, where the fleet has other weights than those of `version`."""
        return {} if self.version == version else self.sync_weights(version=version)

    def update(self, microbatches: list[PackedMicrobatch], *, denominator: float, on_policy: bool) -> dict[str, float]:
        """One optimizer update; see PolicyTrainer.update."""
        assert self.policy is not None
        return self.policy.update(microbatches, denominator=denominator, on_policy=on_policy)

    def update_critic(self, microbatches: list[PackedMicrobatch], *, denominator: float) -> dict[str, float]:
        """One update of the critic; see CriticTrainer.update."""
        assert self.critic is not None
        return self.critic.update(microbatches, denominator=denominator)

    def compare(self, microbatches: list[PackedMicrobatch]) -> dict[str, float]:
        """The log-prob gap on rows that are not trained; see PolicyTrainer.compare."""
        assert self.policy is not None
        return self.policy.compare(microbatches)


class Heartbeat:
    """Tells the other ranks from time to time that rank 0 is still playing: their wait has a time-out."""

    STATE = "playing"

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last > self._every_s:
            broadcast_object(self.STATE)
            self._last = time.monotonic()


@contextmanager
def open_session(config: ExperimentConfig, *, for_training: bool = True, with_fleet: bool = True) -> Iterator[Session]:
    """Join the other ranks, build the model with the base weights, start the fleet; release all of it at the end."""
    with ExitStack() as stack:
        process_groups.initialize(config.parallel, trainer_device(config), seed=config.run.seed)
        stack.callback(process_groups.shutdown)
        is_rank_0 = torch.distributed.get_rank() == 0
        if is_rank_0:
            ensure_model_folder(config.model)
        torch.distributed.barrier(group=process_groups.cpu_group())
        rollout = None
        if is_rank_0 and with_fleet:
            rollout = stack.enter_context(open_rollout_side(config, for_training=for_training))
        model_chunks = build_model(config.model.path, config=config, for_training=for_training)
        load_hf_weights(model_chunks, config.model.path)
        source = MegatronWeightSource(
            model_chunks, read_hf_config(config.model.path), to_all_ranks=sync_backend(config) == "ipc"
        )
        sender = WeightSender(source, config, rollout.fleet.sync_client() if rollout and rollout.fleet else None)
        yield Session(config=config, model_chunks=model_chunks, rollout=rollout, sender=sender)


def trainer_device(config: ExperimentConfig) -> torch.device:
    """This rank's device."""
    if not runs_on_gpus(config):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
