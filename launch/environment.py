"""Environment variables of trainer ranks: thread counts, network interface, quiet libraries."""

import os

from megatron_agent.config import ExperimentConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",  # its warning after fork would be printed once per rank
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's announcement of a default that changes some day
    "VLLM_NO_USAGE_STATS": "1",
    # Said by every rank at each import of megatron-core, about what is as it should be without a GPU.
    "PYTHONWARNINGS": "ignore:Transformer Engine and Apex,ignore:Apex is not installed,ignore:full scope is deprecated",
}


def available_cores() -> int:
    """Cores that this process may run on; fewer than the machine's under SLURM or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(config: ExperimentConfig, ranks_on_node: int) -> int:
    """`parallel.threads_per_rank`, or the cores shared out evenly."""
    return config.parallel.threads_per_rank or max(1, available_cores() // ranks_on_node)


def torchrun_environment() -> dict[str, str]:
    """What torchrun and its ranks need on any machine."""
    return _QUIET | {
        # Megatron overlaps tensor-parallel communication with compute in the order of one queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}",  # an empty role: no prefix before rank 0's lines
    }


def local_environment(config: ExperimentConfig, ranks: int) -> dict[str, str]:
    """The full environment of a launch on one machine.

    gloo is held on the loopback interface: otherwise it looks up the host's name, which laptops and containers
    often cannot resolve.
    """
    threads = dict.fromkeys(THREAD_VARIABLES, str(threads_per_rank(config, ranks)))
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if os.path.exists("/sys/class/net/lo") else {}
    return {**os.environ, **threads, **torchrun_environment(), **loopback}
