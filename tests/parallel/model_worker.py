"""Groups of ranks that run model jobs one after the other: `model_worker.py FOLDER` (see model_launch).

A job names its `kind`, a function below, which leaves its findings in `<name>.pt`.
"""

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import model_folders
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import MegatronAgentError
from parallel import cpu, hf_export, process_groups
from parallel import logprobs as logprobs_module
from parallel.hf_folder import load_hf_weights
from parallel.logprobs import token_and_candidate_logprobs, token_logprobs
from parallel.model import build_model, forward_row, read_hf_config
from parallel.top_tokens import top_tokens
from parallel.weight_source import MegatronWeightSource
from trajectory.packing import PackedMicrobatch, pack_row


def build_and_load(job: dict) -> list[torch.nn.Module]:
    options = {
        "run": {"name": "test"},
        "model": {"path": job["model"], "dtype": job.get("dtype", "fp32")},
        "data": {"train": "unused"},
        "parallel": {"timeout_s": 60} | job.get("parallel", {}),
    }
    config = ExperimentConfig.model_validate(options)
    process_groups.initialize(config.parallel, torch.device("cpu"), seed=0)
    chunks = build_model(job["model"], config=config, for_training=job.get("training", True))
    load_hf_weights(chunks, job["model"])
    return chunks


def save(job: dict, out: Path, findings: Any, *, rank: int = 0) -> None:
    if dist.get_rank() == rank:
        torch.save(findings, out / f"{job['name']}.pt")


def last_stage_rank() -> int:
    """Tensor rank 0, data rank 0 of the last stage: the first rank of Megatron's last block."""
    return dist.get_world_size() // process_groups.pipeline_size() * (process_groups.pipeline_size() - 1)


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    shards = [torch.empty_like(logits) for _ in range(process_groups.tensor_size())]
    dist.all_gather(shards, logits.contiguous(), group=process_groups.tensor_group())
    return torch.cat(shards, dim=-1)


def run_row(
    chunks: list[torch.nn.Module],
    microbatch: PackedMicrobatch,
    num_microbatches: int,
    last_stage: Any,
    *,
    forward_only: bool,
) -> list:
    """The row through Megatron's schedule, `num_microbatches` times."""

    def forward_step(_iterator: Any, chunk: torch.nn.Module):
        output = forward_row(chunk, microbatch)
        return output, lambda logits, non_loss_data=False: last_stage(logits)

    config: Any = chunks[0].config
    config.finalize_model_grads_func = lambda chunks, _num_tokens, **options: finalize_model_grads(
        chunks, None, **options
    )
    return get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=None, model=chunks, num_microbatches=num_microbatches,
        seq_length=microbatch.num_tokens, micro_batch_size=1, forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )  # fmt: skip


def logits(job: dict, out: Path) -> None:
    """The row's logits, padding included."""
    chunks = build_and_load(job)
    with torch.no_grad():
        row = model_folders.everything(model_folders.row())
        collected = run_row(chunks, row, 1, gather_vocabulary, forward_only=True)
    save(job, out, collected[0] if collected else None, rank=last_stage_rank())


def gradient(job: dict, out: Path) -> None:
    """Gradient of the summed negative log-likelihood of the row under Hugging Face names, and the loss.

    Two microbatches and every data rank see the same row, so the sum is divided by their number.
    """
    chunks = build_and_load(job)
    hf_config = read_hf_config(job["model"])
    row = model_folders.row()
    copies = 2 * process_groups.data_size()

    def last_stage(logits: torch.Tensor):
        logprobs, _ = token_logprobs(
            logits, row.asked_index, row.target_ids, vocab_size=hf_config.vocab_size, temperature=1.0
        )
        loss = -logprobs.sum()
        return loss / copies, torch.zeros((), dtype=torch.int), loss.detach()

    losses = run_row(chunks, row, 2, last_stage, forward_only=False)
    for parameter in chunks[0].parameters():  # so that the weight stream carries the gradient
        parameter.data = parameter.main_grad
    gradients = {name: tensor.clone() for name, tensor in MegatronWeightSource(chunks, hf_config)}
    loss = losses[0] if losses else torch.zeros(())
    dist.broadcast(loss, src=last_stage_rank())
    save(job, out, {"loss": loss, "gradients": gradients})


def trees(job: dict, out: Path) -> None:
    """Loss and gradients of random trees, laid out as such and with every sample apart: the largest difference of any
    parameter's gradient over its norm, for each tree, and the two losses."""
    chunks = build_and_load(job)
    hf_config = read_hf_config(job["model"])
    pad_multiple = process_groups.tensor_size()
    errors, losses = [], []
    for seed in range(job["trees"]):
        samples = model_folders.tree_samples(seed)
        apart, own_losses = {}, []
        for share in (False, True):
            row = pack_row(samples, pad_multiple=pad_multiple, share=share)

            def last_stage(logits: torch.Tensor, row: PackedMicrobatch = row):
                logprobs, entropy = token_logprobs(
                    logits, row.asked_index, row.target_ids, vocab_size=hf_config.vocab_size, temperature=0.7
                )
                loss = (row.loss_weights * (logprobs + 0.3 * entropy)).sum()
                return loss, torch.zeros((), dtype=torch.int), loss.detach()

            for chunk in chunks:
                chunk.zero_grad_buffer()
            own_losses += run_row(chunks, row, 1, last_stage, forward_only=False)
            gradients = {name: p.main_grad.clone() for name, p in chunks[0].named_parameters()}
            apart = apart or gradients
        differences = [(gradients[name] - want).norm() / want.norm() for name, want in apart.items() if want.norm() > 0]
        errors.append(torch.stack([*differences, torch.zeros(())]).max())
        losses.append(torch.stack(own_losses) if own_losses else torch.zeros(2))
    worst = torch.stack(errors)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    save(job, out, {"errors": worst, "losses": torch.stack(losses)}, rank=last_stage_rank())


def export(job: dict, out: Path) -> None:
    """The model as a folder `<name>`; the weight stream as every rank sees it, and what the others yield."""
    chunks = build_and_load(job)
    hf_export._MAX_FILE_BYTES = job.get("max_file_bytes", hf_export._MAX_FILE_BYTES)
    hf_export.export_hf(chunks, job["model"], out / job["name"])
    hf_config = read_hf_config(job["model"])
    everywhere = MegatronWeightSource(chunks, hf_config, to_all_ranks=True)
    tensors = {name: tensor.clone() for name, tensor in everywhere}
    assert all(tensor.is_contiguous() for _, tensor in everywhere)
    metadata = [tuple(meta) for meta in everywhere.metadata()]
    only_rank_0 = {name: tensor.numel() for name, tensor in MegatronWeightSource(chunks, hf_config)}
    findings = {"tensors": tensors, "metadata": metadata, "numel": only_rank_0}
    torch.save(findings, out / f"{job['name']}_rank{dist.get_rank()}.pt")


def full_disk(job: dict, out: Path) -> None:
    """Export where rank 0 can write no more than 16 KiB a file."""
    chunks = build_and_load(job)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
    try:
        hf_export.export_hf(chunks, job["model"], Path(job["target"]))
        error = ""
    except MegatronAgentError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=process_groups.cpu_group())
    save(job, out, errors)


def refusal(job: dict, out: Path) -> None:
    """The message that building and loading fails with."""
    try:
        build_and_load(job)
        message = ""
    except MegatronAgentError as error:
        message = f"{type(error).__name__}: {error}"
    (out / f"{job['name']}.txt").write_text(message)


def split_vocabulary(job: dict) -> dict[str, torch.Tensor]:
    """All ranks as tensor ranks; the job's inputs."""
    options = {"tensor": int(os.environ["WORLD_SIZE"])}
    config = ExperimentConfig.model_validate(
        {"run": {"name": "t"}, "model": {"path": ""}, "data": {"train": ""}, "parallel": options}
    )
    process_groups.initialize(config.parallel, torch.device("cpu"), seed=0)
    logprobs_module._CHUNK_ELEMENTS["cpu"] = job["chunk_elements"]
    return torch.load(job["inputs"])


def own_shard(logits: torch.Tensor) -> torch.Tensor:
    return logits.chunk(process_groups.tensor_size(), dim=-1)[process_groups.tensor_rank()].clone()


def logprobs(job: dict, out: Path) -> None:
    """token_logprobs of the job's inputs, and the gradient of sum(a * logprobs + b * entropy)."""
    inputs = split_vocabulary(job)
    shard = own_shard(inputs["logits"]).requires_grad_()
    shape = {"vocab_size": job["vocab_size"], "temperature": job["temperature"]}
    values = token_logprobs(shard, inputs["rows"], inputs["token_ids"], **shape)
    weights = (inputs["logprob_weights"], inputs["entropy_weights"] * job["entropy"])
    sum((w * v).sum() for w, v in zip(weights, values, strict=True)).backward()
    assert shard.grad is not None
    gradient = gather_vocabulary(shard.grad)
    unused = own_shard(torch.full_like(inputs["logits"], float("nan"))).requires_grad_()
    values_of_nan = token_logprobs(unused, inputs["rows"], inputs["token_ids"], **shape)
    sum(torch.where(torch.tensor(False), v, 0.0).sum() for v in values_of_nan).backward()
    assert unused.grad is not None
    assert (unused.grad == 0).all(), "entries that are masked pass no NaN on"
    save(job, out, {"logprobs": values[0].detach(), "entropy": values[1].detach(), "gradient": gradient})


def candidates(job: dict, out: Path) -> None:
    """A teacher's top tokens, the student's log-probs of them, and the gradient of
    sum(a * logprobs + b * entropy + c * candidate_logprobs)."""
    inputs = split_vocabulary(job)
    shape = {"vocab_size": job["vocab_size"], "temperature": job["temperature"]}
    top = top_tokens(own_shard(inputs["teacher_logits"]), k=job["k"], ids_below=job["ids_below"], **shape)
    shard = own_shard(inputs["logits"]).requires_grad_()
    values = token_and_candidate_logprobs(shard, inputs["rows"], inputs["token_ids"], top.ids, **shape)
    plain = token_logprobs(shard, inputs["rows"], inputs["token_ids"], **shape)
    assert all(torch.equal(one, other) for one, other in zip(plain, values[:2], strict=True))
    read = torch.zeros(len(shard), 1).index_fill(0, inputs["rows"], 1.0)
    weights = (inputs["logprob_weights"], inputs["entropy_weights"], read * inputs["candidate_weights"][:, : job["k"]])
    sum((w * v).sum() for w, v in zip(weights, values, strict=True)).backward()
    assert shard.grad is not None
    found = {"ids": top.ids, "teacher_logprobs": top.logprobs, "candidate_logprobs": values[2].detach()}
    same = [torch.empty_like(top.ids) for _ in range(process_groups.tensor_size())]
    dist.all_gather(same, top.ids, group=process_groups.tensor_group())
    assert all(torch.equal(other, top.ids) for other in same), "every tensor rank has to ask for the same tokens"
    save(job, out, found | {"logprobs": values[0].detach(), "gradient": gather_vocabulary(shard.grad)})


KINDS = {f.__name__: f for f in (logits, gradient, trees, export, full_disk, refusal, logprobs, candidates)}


def run_group(world_size: int, jobs: list[dict], out: Path) -> bool:
    """Fork the ranks, so that megatron-core is imported once for all of them; True where all succeed."""
    ranks = [pid for rank in range(world_size) if (pid := _fork_rank(rank, world_size, jobs, out))]
    succeeded = True
    while ranks and succeeded:
        pid, status = os.wait()
        ranks.remove(pid)
        succeeded = status == 0
    for pid in ranks:  # a rank failed: the others wait for it in vain
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return succeeded


def _fork_rank(rank: int, world_size: int, jobs: list[dict], out: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        for job in jobs:
            os.environ["MASTER_PORT"] = str(job["port"])
            KINDS[job["kind"]](job, out)
            process_groups.shutdown()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cpu.enable()
    folder = Path(sys.argv[1])
    groups = json.loads((folder / "groups.json").read_text())
    sys.exit(0 if all(run_group(world_size, jobs, folder) for world_size, jobs in groups) else 1)
