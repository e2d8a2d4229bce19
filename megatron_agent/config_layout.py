"""What follows from the configuration: which ranks run where, which GPUs are the fleet's, where a run writes."""

from dataclasses import dataclass
from pathlib import Path

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import ConfigError
from megatron_agent.weight_buckets import BACKEND


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """The trainer's ranks over its nodes."""

    nodes: int
    ranks_per_node: int
    data: int
    """Data-parallel size."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def trainer_layout(config: ExperimentConfig) -> TrainerLayout:
    """The ranks that the configuration asks for.

    Without `parallel.data`, one replica runs on one node, and several nodes are filled with their GPUs. Raises
    ConfigError, naming both numbers, where the ranks do not fit the nodes.
    """
    parallel, cluster = config.parallel, config.cluster
    nodes, gpus = cluster.trainer_nodes, cluster.gpus_per_node
    replica = parallel.tensor * parallel.pipeline
    replica_text = f"parallel.tensor {parallel.tensor} x parallel.pipeline {parallel.pipeline} = {replica} ranks"
    if parallel.data is not None:
        data = parallel.data
    elif nodes > 1 and gpus > 0:
        if nodes * gpus % replica:
            raise ConfigError(
                f"{nodes} trainer nodes x {gpus} GPUs = {nodes * gpus} ranks cannot be divided by {replica_text}; "
                "change one of them, or set parallel.data"
            )
        data = nodes * gpus // replica
    else:
        data = 1
    world_size = replica * data
    if world_size % nodes:
        raise ConfigError(
            f"{replica_text}, x {data} data parallel = {world_size}, cannot be divided by "
            f"cluster.trainer_nodes {nodes}; change one of them"
        )
    ranks_per_node = world_size // nodes
    if gpus and ranks_per_node > gpus:
        raise ConfigError(
            f"{ranks_per_node} trainer ranks per node ({replica_text}, x {data} data parallel, on {nodes} nodes) need "
            f"more than cluster.gpus_per_node {gpus}; use more trainer nodes or smaller parallel sizes"
        )
    return TrainerLayout(nodes=nodes, ranks_per_node=ranks_per_node, data=data)


def run_folder(config: ExperimentConfig) -> Path:
    """Where a run writes."""
    return Path(config.run.dir) / config.run.name


def checkpoint_folder(config: ExperimentConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder(config) / "checkpoints"


def log_folder(config: ExperimentConfig) -> Path:
    """Where ranks, replicas and jobs write their logs."""
    return run_folder(config) / "logs"


def runs_on_gpus(config: ExperimentConfig) -> bool:
    """Whether trainer and fleet run on GPUs: `cluster.gpus_per_node` says so, and cluster.device is not `cpu`."""
    return config.cluster.device != "cpu" and config.cluster.gpus_per_node > 0


def sync_backend(config: ExperimentConfig) -> str:
    """The transport of weights that `sync.backend` asks for on this device; both of its ends take it from here."""
    if config.sync.backend != "auto":
        return config.sync.backend
    if not runs_on_gpus(config):
        return BACKEND
    return "ipc" if config.cluster.colocate else "nccl"


def fleet_gpus(config: ExperimentConfig) -> list[int]:
    """Indices of the GPUs on a trainer node that the fleet may use; empty on CPU or with nodes of its own.

    Colocated fleets share those of the trainer's ranks, which hand their weights over there; others get the rest.
    """
    cluster = config.cluster
    if cluster.gpus_per_node == 0 or cluster.rollout_nodes > 0:
        return []
    ranks = trainer_layout(config).ranks_per_node
    return list(range(ranks)) if cluster.colocate else list(range(ranks, cluster.gpus_per_node))
