"""Every option of an experiment, typed, with its default and meaning. Loaded by `config_loading.py`.

Unknown keys are errors. Downstream code trusts a validated ExperimentConfig and repeats no checks.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_agent.config_algorithm import AlgorithmConfig
from megatron_agent.config_types import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class RunConfig(Section):
    name: str
    """Name of the run; its files go to `dir`/`name`."""
    dir: str = "runs"
    """Folder that holds all runs."""
    seed: int = 0
    """Seeds data order and sampling. A model from scratch has a seed of its own, in model.builder.args."""
    steps: PositiveInt = 100
    """Training steps; one step is rollout, update, weight sync."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto` continues from the newest checkpoint of this run when there is one; `must` fails without one;
    `never` refuses to start where checkpoints exist already."""
    report_episodes: NonNegativeInt = 3
    """Episodes shown step by step in report.html, before and after training."""


class ModelBuilderConfig(Section):
    name: str
    """A registered builder (`tiny_qwen3`, `smollm2`) or `package.module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the builder."""


class ModelConfig(Section):
    path: str
    """HF folder: config.json, safetensors, tokenizer with a chat template."""
    builder: ModelBuilderConfig | None = None
    """Makes the folder on first use when `path` does not exist; absent means the folder must exist."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Parameter and compute type of trainer and fleet. With bf16 the optimizer keeps fp32 masters and gradients."""


class DataConfig(Section):
    train: str
    """JSONL or parquet file of rows, or `package.module:function` that yields rows."""
    eval: str | None = None
    """Like `train`; the held-out rows. Absent: no evaluation."""
    train_args: dict[str, Any] = {}
    """Keyword arguments where `train` is a function."""
    eval_args: dict[str, Any] = {}
    """Keyword arguments where `eval` is a function."""
    shuffle: bool = True
    """A new order each pass, from run.seed and the pass number."""


class ToolConfig(Section):
    name: str
    """A registered tool or `package.module:Class`."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor."""
    timeout_s: PositiveFloat | None = None
    """Wall time of one call; absent means rollout.tool_timeout_s."""
    retries: NonNegativeInt = 0
    """How often a call that raised or timed out is made again, each time with the whole time-out."""
    max_concurrency: PositiveInt | None = None
    """Calls of this tool that one runner (rollout.runners) makes at the same time; the others wait their turn."""
    max_result_chars: PositiveInt | None = None
    """Longer results keep their head and tail, with a note of what was left out between; absent means all of it."""
    cost: NonNegativeFloat = 0.0
    """Taken from the step's reward for every call that reached the tool."""


def _named_tool(entry: Any) -> Any:
    return {"name": entry} if isinstance(entry, str) else entry


ToolEntry = Annotated[ToolConfig, BeforeValidator(_named_tool, json_schema_input_type=str | ToolConfig)]
"""A tool in a list of tools: its name, or a section with its options."""


class AgentConfig(Section):
    flow: str = "agent_env_loop"
    """Flow for rows without `agent_name`: `agent_env_loop`, `single_step` or `package.module:Class`."""
    env: str | None = None
    """Environment name or `package.module:Class`; absent means `tool_env` when tools are given."""
    env_kwargs: dict[str, Any] = {}
    """Defaults for the environment's constructor; a row's `env_kwargs` override them key by key."""
    tools: list[ToolEntry] = []
    """For `tool_env`: names, `package.module:Class`, or `{name, args, timeout_s, retries, max_concurrency,
    max_result_chars, cost}`."""
    tool_format: str = "hermes"
    """How tool calls are written in the model's text."""
    reward: str | None = None
    """Outcome reward: a registered name or `package.module:function`; absent means a row's
    `reward_model.style` decides, or the environment's own rewards are all there is."""
    system_prompt: str | None = None
    """Put before the row's messages when they have no system message of their own."""
    max_steps: PositiveInt = 8
    """Steps per episode; the last one is `truncated` when the environment has not terminated."""
    max_response_tokens: PositiveInt = 256
    """Sampled tokens per step."""
    max_episode_tokens: PositiveInt = 4096
    """Prompt + response tokens of the longest context in an episode; must fit rollout.max_model_len."""
    bad_call: Literal["observe", "end"] = "observe"
    """What a broken tool call leads to: an error observation, or the end of the episode."""
    stop: list[str] = []
    """Stop strings besides the end-of-turn token."""


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 8
    """Dataset rows per training step."""
    group_size: PositiveInt = 8
    """Episodes per row."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Fraction = 1.0
    """Must be 1 in training: truncated sampling has other log-probs than the trainer computes."""
    top_k: int = -1
    """Must be -1 in training, for the same reason."""
    replicas: PositiveInt = 1
    """vLLM engines."""
    tensor_parallel: PositiveInt = 1
    """Devices per replica."""
    max_model_len: PositiveInt = 4096
    """Context length of the engines."""
    max_concurrent_episodes: PositiveInt = 256
    """Episodes in flight over the whole fleet."""
    runners: PositiveInt = 1
    """Ray actors that run flows, environments and tools."""
    engine_threads: NonNegativeInt = 0
    """CPU threads per replica on machines without GPU; 0 takes all cores divided by replicas."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache per replica on CPU."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of GPU memory per replica on CUDA."""
    engine_args: dict[str, Any] = {}
    """Passed on to vLLM's AsyncEngineArgs; keys that this file already sets are refused."""
    episode_timeout_s: PositiveFloat = 600
    """Wall time of one episode; then it is truncated with its steps so far."""
    step_timeout_s: PositiveFloat = 120
    """Wall time of one environment step (tools included)."""
    tool_timeout_s: PositiveFloat = 60
    """Wall time of one tool call."""
    generate_timeout_s: PositiveFloat = 300
    """Wall time of one completion."""
    start_timeout_s: PositiveFloat = 900
    """Wall time until all replicas are ready."""
    replay: str | None = None
    """A `trajectories.jsonl` that is trained on, step by step, instead of acting: no fleet starts. For repeating a
    run's updates and for work on algorithms without an engine."""
    max_episode_retries: NonNegativeInt = 2
    """How often an episode is run again after its replica died."""
    max_failed_frac: Fraction = 0.5
    """The run stops when more than this share of a step's episodes failed in environment code."""
    overlap: bool = False
    """Play the next step's episodes while this step trains, so that a step takes the longer of both and not their sum.
    They are sampled by weights one training step old: needs algorithm.correction, or algorithm.old_logprobs rollout."""


class PackingConfig(Section):
    tokens_per_row: PositiveInt = 4096
    """Token budget of one packed row; a longer sample gets a row of its own."""
    prefix_tree: bool = True
    """Lay out what the samples of a row begin with in common once, so that it is computed once; the gradient is the
    same."""


class ParallelConfig(Section):
    tensor: PositiveInt = 1
    """Tensor-parallel size."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size."""
    data: PositiveInt | None = None
    """Data-parallel size; absent: 1 on one node; on several, what their GPUs allow."""
    sequence: bool = False
    """Sequence parallelism over the tensor-parallel group."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of each trainer rank; 0 takes cores divided by local ranks."""
    timeout_s: PositiveFloat = 1800
    """Wall time of any collective, rollout waits included."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)  # a list in YAML
    """Adam moments."""
    eps: PositiveFloat = 1e-8
    """Adam epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient-norm clip; 0 means none."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Decay after the warm-up over the planned number of updates. `wsd` stays at the peak and then falls linearly
    over the last `decay_frac` of them."""
    warmup_updates: NonNegativeInt = 0
    """Linear warm-up."""
    min_lr_frac: Fraction = 0.1
    """Where the decay ends, as a share of `lr`."""
    decay_frac: Fraction = 0.2
    """wsd: share of the updates over which the learning rate falls."""


class SftConfig(Section):
    data: str
    """JSONL or parquet file of rows with `messages` (and `tools`), or `package.module:function` that yields them."""
    data_args: dict[str, Any] = {}
    """Keyword arguments where `data` is a function."""
    steps: PositiveInt = 20
    """Optimizer updates before reinforcement learning starts."""
    batch_size: PositiveInt = 32
    """Demonstrations per update."""
    lr: PositiveFloat = 1e-4
    """Learning rate of this stage; its optimizer state is dropped afterwards."""


class SyncConfig(Section):
    backend: Literal["auto", "shared_memory", "nccl", "ipc"] = "auto"
    """Transport of weights into the fleet; `auto` is shared_memory on CPU, nccl on CUDA, ipc when colocated."""
    verify: bool = False
    """Compare a checksum of every tensor on both sides; costs one more pass over the weights."""
    delta: bool = False
    """CPU: send only decoder layers, and modules outside of them, whose bytes changed since the last sync; costs a
    SHA-256 of every tensor. Training all weights changes all of them, so there it only costs; it saves where a part of
    the model keeps its bytes."""
    bucket_mib: PositiveInt = 256
    """Size of a bucket. Two of them take turns: one is filled while the other is loaded."""
    timeout_s: PositiveFloat = 300
    """Wall time of one sync."""


class EvalConfig(Section):
    every: NonNegativeInt = 0
    """Training steps between evaluations; 0 means only before and after."""
    rows: PositiveInt | None = None
    """Rows of data.eval that are used; absent means all."""
    samples: PositiveInt = 1
    """Episodes per row."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""


class CheckpointConfig(Section):
    every: NonNegativeInt = 0
    """Training steps between checkpoints; 0 means only at the end."""
    keep_last: PositiveInt = 2
    """Older checkpoints are removed after a newer one is complete."""
    export_hf: bool = False
    """Also write an HF folder at the end."""


class WandbConfig(Section):
    project: str
    """W&B project."""
    entity: str | None = None
    """W&B entity."""
    mode: Literal["online", "offline"] = "online"
    """W&B mode."""


class LoggingConfig(Section):
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""
    trajectories: bool = True
    """Write trajectories.jsonl, one episode a line."""
    report: bool = True
    """Write report.html at the end."""


class ClusterConfig(Section):
    ray_address: str | None = None
    """Address of a running Ray cluster; absent starts a local one."""
    trainer_nodes: PositiveInt = 1
    """Machines that run trainer ranks."""
    rollout_nodes: NonNegativeInt = 0
    """Machines that only run the fleet; 0 shares the trainer's machines."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of one machine; 0 means CPU."""
    colocate: bool = False
    """Fleet and trainer share the same GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer and fleet run."""
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Rendezvous port of torchrun; 0 takes a free one (one machine only)."""


class ExperimentConfig(Section):
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    packing: PackingConfig = PackingConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sft: SftConfig | None = None
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()
