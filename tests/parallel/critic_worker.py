"""Groups of ranks that run critic jobs: `critic_worker.py FOLDER`, started by model_launch as model_worker is.

Each job builds the critic under its own parallel sizes, loads a checkpoint or sets the head's weights, runs updates,
and leaves `<name>.pt` on rank 0: values before the first update, metrics of each update, and all weights.
"""

import dataclasses
import errno
import json
import os
import sys
from pathlib import Path

import model_worker
import torch
import torch.distributed as dist
import trainer_rows

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import CheckpointError
from parallel import checkpoint, cpu, process_groups
from parallel.critic import CriticTrainer
from parallel.distribute import scatter_microbatches
from parallel.hf_folder import load_hf_weights
from parallel.model import build_model, read_hf_config, unwrap
from parallel.optimizer import LrScheduler, build_optimizer
from parallel.weight_source import MegatronWeightSource
from trajectory.packing import PackedMicrobatch

NAN = float("nan")


def experiment(job: dict) -> ExperimentConfig:
    options = {
        "run": {"name": "test"},
        "model": {"path": job["model"], "dtype": job.get("dtype", "fp32")},
        "data": {"train": "unused"},
        "parallel": {"timeout_s": 60} | job.get("parallel", {}),
        "algorithm": {"critic": {"lr": 1e-3, "value_clip": job.get("value_clip"), "path": job.get("critic_path")}},
        "optimizer": {"lr": 0.5, "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.5, "schedule": "linear"},
    }
    return ExperimentConfig.model_validate(options)


def head_weight(hidden_size: int) -> torch.Tensor:
    """[1, H]; what the tests set, so that values differ from 0 and the gradient reaches the backbone."""
    return 0.3 * torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(3))


@dataclasses.dataclass(frozen=True)
class Values:
    """One sample's columns of the critic, [length], finite everywhere."""

    mask: torch.Tensor
    weights: torch.Tensor
    targets: torch.Tensor
    old_values: torch.Tensor


def value_columns() -> list[Values]:
    """For each of trainer_rows' samples: its trained tokens, and one more value that is asked for but not trained."""
    generator = torch.Generator().manual_seed(7)
    columns = []
    for sample in trainer_rows.make_samples():
        mask = trainer_rows.asked(sample)
        length = len(mask)
        weights = torch.where(mask, 0.5 + torch.rand(length, generator=generator), 0.0)
        weights[-1] = 0.0
        targets, old_values = torch.randn(2, length, generator=generator)
        columns.append(Values(mask, weights, targets, old_values))
    return columns


def denominator() -> float:
    return float(sum(int((columns.weights != 0).sum()) for columns in value_columns()))


def plan(packing: str, *, data_size: int) -> list[list[PackedMicrobatch]]:
    """[data rank][microbatch]: trainer_rows' packing with the critic's columns, NaN wherever nothing reads them."""
    everyone = value_columns()
    rows = []
    policy_rows = [row for shard in trainer_rows.plan(packing, "token", data_size=1) for row in shard]
    for members, row in zip(trainer_rows.PACKINGS[packing], policy_rows, strict=True):
        columns = [everyone[index] for index in members]

        def entries(name: str, empty: float, own: list[Values] = columns) -> torch.Tensor:
            return torch.cat([getattr(c, name)[c.mask] for c in own]) if own else torch.full((1,), empty)

        weights = entries("weights", 0.0)
        is_trained = weights != 0
        rows.append(
            dataclasses.replace(
                row,
                value_weights=weights,
                value_targets=torch.where(is_trained, entries("targets", NAN), NAN),
                old_values=torch.where(is_trained, entries("old_values", NAN), NAN),
            )
        )
    return [rows[rank::data_size] for rank in range(data_size)]


def set_head(critic: CriticTrainer, weight: torch.Tensor) -> None:
    """Before the first update: also into the optimizer's own copy."""
    if process_groups.is_last_stage():
        unwrap(critic.model_chunks[0]).output_layer.weight.data.copy_(weight)
    critic.optimizer.reload_model_params()


def policy_state(config: ExperimentConfig) -> dict:
    chunks = build_model(config.model.path, config=config, for_training=True)
    load_hf_weights(chunks, config.model.path)
    optimizer = build_optimizer(config, chunks)
    scheduler = LrScheduler(optimizer, config.optimizer, total_updates=10)
    return {"model_chunks": chunks, "optimizer": optimizer, "scheduler": scheduler}


def load(job: dict, config: ExperimentConfig, critic: CriticTrainer, findings: dict) -> None:
    """Restore policy and critic; or note the error of a checkpoint that holds no critic."""
    found = checkpoint.latest(job["load"])
    assert found is not None
    state = policy_state(config)
    try:
        findings["extra"] = checkpoint.load(found, **state, critic=critic)
    except CheckpointError as error:
        findings["error"] = str(error)
    findings["without_critic"] = checkpoint.load(found, **state)
    findings["policy_step"] = checkpoint.load_weights(found, model_chunks=state["model_chunks"])


def save(config: ExperimentConfig, critic: CriticTrainer | None, folder: str, *, step: int = 2) -> None:
    checkpoint.save(folder, step, **policy_state(config), extra_state={"row": 16}, keep_last=2, critic=critic)


def save_on_full_disk(config: ExperimentConfig, critic: CriticTrainer, folder: str) -> dict:
    """One more save, with no space left when the critic's turn comes."""
    write_common = checkpoint.CheckpointState.write_common

    def fill_up(self: checkpoint.CheckpointState, folder: Path) -> None:
        if folder.name == "critic":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_common(self, folder)

    checkpoint.CheckpointState.write_common = fill_up
    try:
        save(config, critic, folder, step=3)
        error = ""
    except CheckpointError as raised:
        error = str(raised)
    checkpoint.CheckpointState.write_common = write_common
    return {"error": error, "left": os.listdir(folder)}


def whole_critic(job: dict, critic: CriticTrainer) -> dict[str, torch.Tensor]:
    """`head`, and with tied embeddings the backbone by Hugging Face names, on rank 0."""
    hf_config = read_hf_config(job["model"])
    source = MegatronWeightSource(critic.model_chunks, hf_config) if hf_config.tie_word_embeddings else ()
    weights = {name: tensor.clone() for name, tensor in source}
    is_last = process_groups.is_last_stage()
    mine = unwrap(critic.model_chunks[0]).output_layer.weight.data.clone() if is_last else None
    heads: list = [None] * dist.get_world_size()
    dist.all_gather_object(heads, mine, group=process_groups.cpu_group())
    held = [head for head in heads if head is not None]
    assert all(torch.equal(head, held[0]) for head in held), "the ranks' heads differ"
    return weights | {"head": held[0]}


def run_job(job: dict, out: Path) -> None:
    config = experiment(job)
    process_groups.initialize(config.parallel, torch.device("cpu"), seed=0)
    critic = CriticTrainer(config, total_updates=10)
    microbatches = scatter_microbatches(
        plan(job["packing"], data_size=process_groups.data_size()) if dist.get_rank() == 0 else None
    )
    findings: dict = {"values_at_start": critic.compute_values(microbatches)}
    if "load" in job:
        load(job, config, critic, findings)
    else:
        set_head(critic, head_weight(read_hf_config(job["model"]).hidden_size))
    if "save_without_critic" in job:
        save(config, None, job["save_without_critic"])
    findings["values"] = critic.compute_values(microbatches)
    findings["metrics"] = []
    for index in range(job.get("updates", 2)):
        findings["metrics"].append(critic.update(microbatches, denominator=denominator()))
        if index + 1 == job.get("save_after"):
            save(config, critic, job["save"])
    if job.get("disk_fills_up"):
        findings |= save_on_full_disk(config, critic, job["save"])
    findings["weights"] = whole_critic(job, critic)
    findings["equal_metrics"] = all_equal(findings["metrics"])
    findings["equal_values"] = all_equal(
        [v.tolist() for v in findings["values"]], process_groups.model_parallel_group()
    )
    model_worker.save(job, out, findings)


def all_equal(value: object, group: dist.ProcessGroup | None = None) -> bool:
    group = group or process_groups.cpu_group()
    gathered: list = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return all(other == value for other in gathered)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cpu.enable()
    folder = Path(sys.argv[1])
    model_worker.KINDS["critic"] = run_job
    groups = json.loads((folder / "groups.json").read_text())
    sys.exit(0 if all(model_worker.run_group(world_size, jobs, folder) for world_size, jobs in groups) else 1)
