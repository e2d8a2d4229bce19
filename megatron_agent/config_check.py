"""Finds mistakes in a validated configuration before anything starts, in well under a second.

Nothing heavy is imported: model folders are read as JSON, registries and user modules as source text. A check is a
generator of problems, each with its option, the values and the remedy; a new one is one function and one line in
CHECKS. What a check cannot know without starting is left to the part that will.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_check_algorithm import (
    check_algorithm_names,
    check_credit,
    check_updates,
    inert_algorithm_options,
)
from megatron_agent.config_check_data import check_eval_rows, check_sft_rows, check_train_rows
from megatron_agent.config_check_model import (
    check_builder,
    check_model_folder,
    check_model_sizes,
    check_other_models,
    folder_exists,
)
from megatron_agent.config_check_names import check_agent_names, check_tool_format, has_tool_env
from megatron_agent.config_layout import fleet_gpus, run_folder, runs_on_gpus, trainer_layout
from megatron_agent.config_loading import override_keys
from megatron_agent.errors import ConfigError, list_problems

Check = Callable[[ExperimentConfig], Iterator[str]]


def check_config(config: ExperimentConfig, overrides: Sequence[str] = ()) -> None:
    """Raise ConfigError that lists every problem found.

    `overrides` are the `key=value` options already merged into `config`: one that the other options make
    meaningless is a problem as well.
    """
    problems = [problem for check in CHECKS for problem in check(config)]
    problems += check_overrides(config, override_keys(overrides))
    if problems:
        raise ConfigError(list_problems(problems))


def check_run(config: ExperimentConfig) -> Iterator[str]:
    """The run's name, which is a folder's."""
    name = config.run.name
    if not name or name.startswith(".") or "/" in name or not name.isprintable():
        yield f"run.name {name!r} cannot be the name of a folder; leave out slashes and leading dots"


def check_layout(config: ExperimentConfig) -> Iterator[str]:
    """Parallel sizes against nodes and GPUs."""
    try:
        trainer_layout(config)
    except ConfigError as error:
        yield str(error)
    if config.parallel.sequence and config.parallel.tensor == 1:
        yield "parallel.sequence splits work over tensor-parallel ranks, but parallel.tensor is 1; raise it or drop it"


def check_devices(config: ExperimentConfig) -> Iterator[str]:
    """Device, GPU counts and who shares them."""
    cluster, rollout = config.cluster, config.rollout
    if cluster.device == "cpu" and cluster.gpus_per_node:
        yield f"cluster.device is cpu, but cluster.gpus_per_node is {cluster.gpus_per_node}; set it to 0"
    if cluster.device == "cuda" and not cluster.gpus_per_node:
        yield "cluster.device is cuda, but cluster.gpus_per_node is 0; say how many GPUs a node has"
    if not runs_on_gpus(config):
        if cluster.colocate:
            yield "cluster.colocate shares GPUs, and cluster.gpus_per_node is 0; drop it (on CPU all cores are shared)"
        if cluster.rollout_nodes:
            yield (
                f"cluster.rollout_nodes is {cluster.rollout_nodes}, but on CPU weights travel through shared "
                "memory, which other machines cannot read; set it to 0"
            )
        return
    if cluster.colocate and cluster.rollout_nodes:
        yield f"cluster.colocate and cluster.rollout_nodes {cluster.rollout_nodes} contradict each other; keep one"
    if rollout.tensor_parallel > cluster.gpus_per_node:
        yield (
            f"rollout.tensor_parallel {rollout.tensor_parallel} is more than cluster.gpus_per_node "
            f"{cluster.gpus_per_node}; a replica stays on one node"
        )
    yield from _check_fleet_fits(config)


def _check_fleet_fits(config: ExperimentConfig) -> Iterator[str]:
    cluster, rollout = config.cluster, config.rollout
    wanted = rollout.replicas * rollout.tensor_parallel
    teacher = config.algorithm.teacher
    of_teacher = teacher.replicas * teacher.tensor_parallel if teacher else 0
    try:
        shared = len(fleet_gpus(config)) * cluster.trainer_nodes
    except ConfigError:  # the layout itself is wrong and reported
        return
    available = cluster.rollout_nodes * cluster.gpus_per_node or shared
    if wanted + of_teacher > available:
        plus = f", and {of_teacher} of the teacher" if of_teacher else ""
        yield (
            f"rollout.replicas {rollout.replicas} x rollout.tensor_parallel {rollout.tensor_parallel} = {wanted} "
            f"GPUs{plus}, but {available} are left to the fleet; use fewer, add cluster.rollout_nodes, or set "
            "cluster.colocate"
        )


def check_sync(config: ExperimentConfig) -> Iterator[str]:
    """The transport of weights against the device."""
    backend, colocate = config.sync.backend, config.cluster.colocate
    if config.sync.verify and runs_on_gpus(config):
        yield "sync.verify compares what went through shared_memory, which GPUs do not use; set it to false"
    if config.sync.delta and runs_on_gpus(config):
        yield "sync.delta leaves out what did not change, but GPUs' nccl and ipc send the whole model; set it to false"
    if not runs_on_gpus(config):
        if backend in ("nccl", "ipc"):
            yield f"sync.backend {backend} needs GPUs, and cluster.gpus_per_node is 0; use auto or shared_memory"
    elif backend == "shared_memory":
        yield "sync.backend shared_memory is for CPU; on GPUs use auto, nccl, or ipc with cluster.colocate"
    elif backend == "ipc" and not colocate:
        yield "sync.backend ipc hands over memory of the same GPU; set cluster.colocate, or use nccl"
    elif backend == "nccl" and colocate:
        yield "sync.backend nccl cannot have trainer and fleet on the same GPU; use ipc, or drop cluster.colocate"


def check_lengths(config: ExperimentConfig) -> Iterator[str]:
    """Token budgets against one another."""
    agent, rollout = config.agent, config.rollout
    if agent.max_episode_tokens > rollout.max_model_len:
        yield (
            f"agent.max_episode_tokens {agent.max_episode_tokens} is more than rollout.max_model_len "
            f"{rollout.max_model_len}; raise the second or lower the first"
        )
    if agent.max_response_tokens >= agent.max_episode_tokens:
        yield (
            f"agent.max_response_tokens {agent.max_response_tokens} leaves no room for a prompt within "
            f"agent.max_episode_tokens {agent.max_episode_tokens}; lower the first or raise the second"
        )


def check_sampling(config: ExperimentConfig) -> Iterator[str]:
    """Sampling that the trainer cannot reproduce."""
    rollout = config.rollout
    reason = "the engine would sample from a cut distribution, whose log-probs the trainer does not compute"
    if rollout.top_p < 1:
        yield f"rollout.top_p is {rollout.top_p}: {reason}; set it to 1"
    if rollout.top_k != -1:
        yield f"rollout.top_k is {rollout.top_k}: {reason}; set it to -1"


def check_eval(config: ExperimentConfig) -> Iterator[str]:
    """Rows to evaluate on."""
    if config.eval.every and config.data.eval is None:
        yield f"eval.every is {config.eval.every}, but data.eval names no rows; name them or set eval.every to 0"


def check_replay(config: ExperimentConfig) -> Iterator[str]:
    """A recording in place of the fleet."""
    replay = config.rollout.replay
    if replay is None:
        return
    if not Path(replay).is_file():
        yield f"rollout.replay {replay}: no such file; name the trajectories.jsonl of a run"
    if Path(replay).resolve().parent == run_folder(config).resolve():
        yield f"rollout.replay {replay} lies in the folder that this run writes; choose another run.name"
    if config.data.eval is not None:
        yield "rollout.replay starts no fleet, so data.eval cannot be played; set data.eval=null"


def check_overlap(config: ExperimentConfig) -> Iterator[str]:
    """Episodes that are one training step behind, and a fleet that works at the same time as the trainer."""
    if not config.rollout.overlap:
        return
    algorithm = config.algorithm
    if algorithm.old_logprobs == "recompute" and not algorithm.correction.is_on():
        yield (
            "rollout.overlap trains on episodes of weights one step old, and nothing corrects for that: set "
            "algorithm.correction.tis to token (or step, sequence), or a mask, or algorithm.old_logprobs to rollout"
        )
    if algorithm.old_logprobs == "rollout" and algorithm.loss.name == "reinforce":
        yield (
            "rollout.overlap trains on episodes of weights one step old, but algorithm.loss.name reinforce has no "
            "ratio that algorithm.old_logprobs rollout could correct; use recompute with algorithm.correction.tis, or "
            "the loss ppo_clip"
        )
    if algorithm.filters.max_staleness == 0 and config.rollout.replay is None:
        yield (
            "algorithm.filters.max_staleness 0 drops every episode that rollout.overlap plays, for they are one step "
            "old; remove it: none is older than that"
        )
    if config.cluster.colocate:
        yield (
            "rollout.overlap has fleet and trainer work at the same time, but with cluster.colocate they take turns on "
            "the same GPUs; drop one of them"
        )


def check_engine_args(config: ExperimentConfig) -> Iterator[str]:
    """Engine options that this file sets elsewhere."""
    for key in config.rollout.engine_args:
        if key in ENGINE_ARGS_SET_ELSEWHERE:
            yield f"rollout.engine_args.{key} is set by {ENGINE_ARGS_SET_ELSEWHERE[key]}; remove it here"


ENGINE_ARGS_SET_ELSEWHERE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_model_len": "rollout.max_model_len",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "logprobs_mode": "the fleet: training needs the log-probs of the sampled distribution",
    "weight_transfer_config": "sync.backend",
}

INERT: dict[str, tuple[Callable[[ExperimentConfig], bool], str]] = {
    "optimizer.decay_frac": (lambda c: c.optimizer.schedule != "wsd", "optimizer.schedule is not wsd"),
    "optimizer.min_lr_frac": (lambda c: c.optimizer.schedule == "constant", "optimizer.schedule is constant"),
    "agent.tool_format": (
        lambda c: not has_tool_env(c),
        "agent.env is set, and it parses replies itself",
    ),
    "agent.bad_call": (
        lambda c: not has_tool_env(c),
        "agent.env is set, and it parses replies itself",
    ),
    "rollout.tool_timeout_s": (lambda c: not has_tool_env(c), "agent.env is set, which has no tools"),
    "run.report_episodes": (lambda c: not c.logging.report, "logging.report is false"),
    "eval": (lambda c: c.data.eval is None, "data.eval names no rows"),
    "rollout.gpu_memory_utilization": (lambda c: not runs_on_gpus(c), "the fleet runs on CPU"),
    "rollout.kv_cache_gib": (lambda c: runs_on_gpus(c), "the fleet runs on GPUs"),
    "rollout.engine_threads": (lambda c: runs_on_gpus(c), "the fleet runs on GPUs"),
    "sync.delta": (lambda c: c.rollout.replay is not None, "rollout.replay starts no fleet that weights are sent to"),
    "model.builder": (lambda c: folder_exists(c), "the folder model.path exists already; remove it or name another"),
}
"""Options that do nothing in some configurations, and why."""


def check_overrides(config: ExperimentConfig, keys: Sequence[str]) -> Iterator[str]:
    """Overrides that the rest of the configuration makes meaningless."""
    inert = {option: (is_inert(config), why) for option, (is_inert, why) in INERT.items()}
    inert |= inert_algorithm_options(config)
    for key in keys:
        for option, (does_nothing, why) in inert.items():
            if (key == option or key.startswith(f"{option}.")) and does_nothing:
                yield f"the override of {key} has no effect: {why}"


CHECKS: tuple[Check, ...] = (
    check_run,
    check_layout,
    check_devices,
    check_sync,
    check_lengths,
    check_sampling,
    check_eval,
    check_replay,
    check_overlap,
    check_engine_args,
    check_algorithm_names,
    check_credit,
    check_updates,
    check_tool_format,
    check_agent_names,
    check_builder,
    check_model_folder,
    check_model_sizes,
    check_other_models,
    check_train_rows,
    check_eval_rows,
    check_sft_rows,
)
