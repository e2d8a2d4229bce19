"""Groups of trainer ranks that run jobs one after the other: `trainer_worker.py FOLDER`, started by trainer_launch.

The process imports torch and Megatron once and forks every rank, because the imports take longer than the jobs.
Each job builds the model under its own parallel sizes, loads a checkpoint or the HF folder, runs updates, and leaves
`<name>.json` (metrics of each update, and what else it measured) and `<name>.pt` (the whole model) on rank 0.
"""

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import trainer_rows

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_algorithm import TeacherConfig
from megatron_agent.errors import CheckpointError
from parallel import checkpoint, process_groups
from parallel.distribute import scatter_microbatches
from parallel.hf_folder import load_hf_weights
from parallel.model import build_model, read_hf_config
from parallel.optimizer import LrScheduler, build_optimizer
from parallel.reference import FrozenModel
from parallel.sft_step import run_sft
from parallel.train_step import PolicyTrainer
from parallel.weight_source import MegatronWeightSource


def experiment(job: dict) -> ExperimentConfig:
    options = {
        "run": {"name": "test"},
        "model": {"path": job["model"], "dtype": job.get("dtype", "fp32")},
        "data": {"train": "unused"},
        "sft": {"data": "unused", "lr": 1e-3},
        "parallel": {"timeout_s": 60} | job.get("parallel", {}),
        "rollout": {"temperature": job.get("temperature", 1.0)},
        "algorithm": {
            "loss": {"clip_low": 0.2, "clip_high": 0.25, "denominator": job.get("denominator", "token")},
            "kl": {"coef": 0.1},
            "entropy_coef": 0.01,
        }
        | job.get("algorithm", {}),
        "optimizer": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.5, "schedule": "linear"},
    }
    return ExperimentConfig.model_validate(options)


class Run:
    """One job's trainer."""

    def __init__(self, job: dict):
        self.job, self.config = job, experiment(job)
        process_groups.initialize(self.config.parallel, torch.device("cpu"), seed=0)
        self.chunks = build_model(job["model"], config=self.config, for_training=True)
        load_hf_weights(self.chunks, job["model"])
        self.optimizer = build_optimizer(self.config, self.chunks)
        self.scheduler = LrScheduler(self.optimizer, self.config.optimizer, total_updates=10)
        self.trainer = PolicyTrainer(self.config, self.chunks, self.optimizer, self.scheduler)
        self.extra: dict = {}
        if "load" in job:
            found = checkpoint.latest(job["load"])
            assert found is not None
            self.extra["loaded"] = found.name
            self.extra["extra_state"] = checkpoint.load(found, **self.state())

    def state(self) -> dict:
        return {"model_chunks": self.chunks, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, folder: str, step: int) -> None:
        checkpoint.save(folder, step, **self.state(), extra_state={"row": step * 8}, keep_last=2)

    def microbatches(self):
        kind = self.config.algorithm.loss.denominator
        plan = None
        if dist.get_rank() == 0:
            plan = trainer_rows.plan(self.job["packing"], kind, data_size=process_groups.data_size())
        total = trainer_rows.denominator(trainer_rows.make_samples(), kind)
        return scatter_microbatches(plan), total

    def updates(self) -> list[dict[str, float]]:
        microbatches, total = self.microbatches()
        if self.config.algorithm.teacher:
            microbatches = self.with_teachers_tokens(microbatches, self.config.algorithm.teacher)
        metrics = []
        for index in range(self.job.get("updates", 1)):
            if self.job.get("recompute_old"):
                old = self.trainer.compute_logprobs(microbatches)
                microbatches = [dataclasses.replace(m, old_logprobs=o) for m, o in zip(microbatches, old, strict=True)]
            metrics.append(self.trainer.update(microbatches, denominator=total))
            if index + 1 == self.job.get("save_after"):
                self.save(self.job["save"], index + 1)
        return metrics

    def with_teachers_tokens(self, microbatches, teacher: TeacherConfig):
        """On the last stage only, as in a run."""
        top = FrozenModel(self.config, teacher.path).compute_top_tokens(microbatches, k=teacher.top_k)
        assert bool(top) == process_groups.is_last_stage()
        if not top:
            return microbatches
        return [
            dataclasses.replace(m, teacher_top_ids=own.ids, teacher_top_logprobs=own.logprobs)
            for m, own in zip(microbatches, top, strict=True)
        ]

    def score_with_reference(self) -> None:
        """After the updates: what the frozen base model says, beside what the policy said before them."""
        microbatches, _ = self.microbatches()
        logprobs = FrozenModel(self.config, self.job["model"]).compute_logprobs(microbatches)
        self.extra["reference_logprobs"] = [values.tolist() for values in logprobs]

    def supervised_updates(self) -> list[dict[str, float]]:
        microbatches, total = self.microbatches()
        return list(run_sft(self.config, self.chunks, [(microbatches, total)] * self.job["sft_updates"]))

    def whole_model(self) -> dict[str, torch.Tensor]:
        source = MegatronWeightSource(self.chunks, read_hf_config(self.job["model"]))
        return {name: tensor.clone() for name, tensor in source}


def run_job(job: dict, out: Path) -> None:
    run = Run(job)
    if job.get("save_at_start"):
        run.save(job["save"], 0)
    microbatches, _ = run.microbatches()
    run.extra["first_logprobs"] = [values.tolist() for values in run.trainer.compute_logprobs(microbatches)]
    run.extra["metrics"] = run.supervised_updates() if "sft_updates" in job else run.updates()
    if job.get("reference"):
        run.score_with_reference()
    run.extra["main_grad_dtypes"] = sorted({str(p.main_grad.dtype) for p in run.chunks[0].parameters()})
    if "full_disk_on_rank" in job:
        run.extra["disk_full"] = save_on_full_disk(run, job)
    weights = run.whole_model()
    if dist.get_rank() == 0:
        (out / f"{job['name']}.json").write_text(json.dumps(run.extra))
        torch.save(weights, out / f"{job['name']}.pt")
    if "kill_in" in job:
        kill_while_saving(run, job)
    process_groups.shutdown()


def save_on_full_disk(run: Run, job: dict) -> dict:
    """Save while one rank can write no more than 4 KiB a file; returns what rank 0 saw."""
    if dist.get_rank() == job["full_disk_on_rank"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        run.save(job["save"], 99)
        error = ""
    except CheckpointError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=process_groups.cpu_group())
    return {"errors": errors, "left": sorted(os.listdir(job["save"]))}


def kill_while_saving(run: Run, job: dict) -> None:
    """SIGKILL this process at the end of one phase of a save, before the next one."""
    owner = checkpoint if hasattr(checkpoint, job["kill_in"]) else checkpoint.CheckpointState
    original = getattr(owner, job["kill_in"])

    def then_die(*args, **kwargs):
        if job["kill_in"] != "_complete":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, job["kill_in"], then_die)
    run.save(job["save"], 50)


def run_rank(rank: int, group: dict, folder: Path) -> None:
    log = os.open(folder / f"{group['name']}.rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group["world_size"])}
    for job, port in zip(group["jobs"], group["ports"], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        run_job(job, folder)


def run_group(group: dict, folder: Path) -> list[int | None]:
    """Exit codes of the group's ranks; None for one that had to be stopped."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, group, folder)) for rank in range(group["world_size"])]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + group["timeout_s"]
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    out_folder = Path(sys.argv[1])
    groups = json.loads((out_folder / "groups.json").read_text())
    (out_folder / "exit_codes.json").write_text(json.dumps([run_group(one, out_folder) for one in groups]))
