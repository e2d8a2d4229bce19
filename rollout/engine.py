"""One replica: a vLLM AsyncLLM inside a Ray actor. Token ids in, token ids and log-probs out.

The replica serves only while it has the weights of a known version: not before its first update, and not between
`begin_update` and `commit_update`. So a trainer that dies in the middle of a sync leaves a replica that refuses, never
one that answers with half-new weights.

    runners --requests over TCP--> ReplicaServer --> generate() --> AsyncLLM --> the engine's own process(es)
    rank 0  --Ray calls----------> begin_update() waits for all of generate's requests, then buckets, commit_update()

Where the engine dies this process ends, whoever notices it: a call, or the watch that looks every LOOK_AFTER_S. With it
end the connections and Ray calls of all that wait.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import ray

from megatron_agent.config import ExperimentConfig
from megatron_agent.errors import FleetError
from megatron_agent.generation import Completion, SamplingParams
from rollout.chat_renderer import end_of_turn_ids
from rollout.transport import Endpoint, ReplicaServer

NO_WEIGHTS = -1
"""The version of a replica that waits for weights."""
LOOK_AFTER_S = 5.0
"""How often the replica looks whether its engine is still alive."""
MAX_KEPT_PARAMS = 4096


class ReplicaEngine:
    """Ray actor. All methods are coroutines and may run at the same time."""

    def __init__(self, config: ExperimentConfig, *, seed: int, on_cpu: bool, backend: str, log_path: str) -> None:
        """`seed` is this replica's alone: equal ones would sample alike from equal prompts."""
        self._config = config
        self._seed = seed
        self._on_cpu = on_cpu
        self._backend = backend
        self._version = NO_WEIGHTS
        self._committed = NO_WEIGHTS
        self._engine: Any = None
        self._next_request = 0
        self._is_updating = False
        self._sampling: dict[SamplingParams, Any] = {}
        self._server = ReplicaServer(self.generate)
        self._watch: asyncio.Task[None] | None = None
        self._end_of_turn = sorted(end_of_turn_ids(Path(config.model.path)))
        log_to(Path(log_path))
        if on_cpu:
            prepare_cpu(config)
        if backend == "ipc":
            # vLLM sends the memory handles to its workers pickled, which it refuses by default; both ends are ours.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

    async def start(self) -> None:
        """Build the engine and listen; returns when it can take weights."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_args()))
        self._watch = asyncio.create_task(self._watch_engine())
        await self._server.start(ray.util.get_node_ip_address())

    async def endpoint(self) -> Endpoint:
        """Where runners connect."""
        return self._server.endpoint

    def _engine_args(self) -> dict[str, Any]:
        from vllm.config import WeightTransferConfig

        own = {
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=self._backend),
            "seed": self._seed,
            "max_num_seqs": min(256, self._config.rollout.max_concurrent_episodes),
        }
        return base_engine_args(self._config, on_cpu=self._on_cpu) | own | self._config.rollout.engine_args

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        """Sample one completion; raises FleetError where the replica has no weights yet."""
        if self._version == NO_WEIGHTS:
            raise FleetError("a replica was asked to generate before it had weights; send weights first")
        self._next_request += 1
        prompt, name = {"prompt_token_ids": prompt_ids}, f"request-{self._next_request}"
        output = await self._while_alive(_last(self._engine.generate(prompt, self._vllm_params(params), name)))
        sampled = output.outputs[0]
        return Completion(
            token_ids=list(sampled.token_ids),
            logprobs=list(sampled.logprobs.logprobs),  # flat: one entry a token, as logprobs=0 asks for
            finish_reason=sampled.finish_reason or "abort",
            # An update waits for requests in flight, and one that slips in behind its pause waits for the update: so
            # the version that was committed last sampled all of it.
            policy_version=self._committed,
            num_cached_tokens=output.num_cached_tokens or 0,
            cache_block_tokens=self._engine.vllm_config.cache_config.block_size,
        )

    def _vllm_params(self, params: SamplingParams) -> Any:
        """vLLM's object for these; the same few come again and again, and it costs more than a dictionary's look-up."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if (known := self._sampling.get(params)) is not None:
            return known
        if len(self._sampling) >= MAX_KEPT_PARAMS:
            self._sampling.clear()
        made = self._sampling[params] = VllmSamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            stop=list(params.stop) or None,
            stop_token_ids=[*self._end_of_turn, *params.stop_token_ids],
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return made

    async def _while_alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What the call to the engine gives. Where the engine dies the process ends: the fleet starts another one."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            self._end()

    async def _watch_engine(self) -> None:
        """vLLM tells the calls that wait when the engine dies; one that comes in that moment would wait for ever."""
        while not self._engine.errored:
            await asyncio.sleep(LOOK_AFTER_S)
        self._end()

    def _end(self) -> NoReturn:
        """End this process at once, with all that waits for it."""
        self._engine.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    async def version(self) -> int:
        """The version of the weights that serve; NO_WEIGHTS where none do."""
        return self._version

    async def is_updating(self) -> bool:
        """True inside an update's bracket, where its weights are neither the old nor the new ones."""
        return self._is_updating

    async def begin_update(self) -> None:
        """Stop serving and wait until no request is in flight."""
        self._version = NO_WEIGHTS
        await self._while_alive(self._engine.pause_generation(mode="wait", clear_cache=True))

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """vLLM's handshake with the trainer's transport."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_weight_update(self) -> None:
        """Open the bracket of one update."""
        self._is_updating = True
        await self._while_alive(self._engine.start_weight_update())

    async def update_weights(self, update_info: Any) -> None:
        """Load one bucket."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._while_alive(self._engine.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    async def finish_weight_update(self) -> None:
        """Close the bracket."""
        await self._while_alive(self._engine.finish_weight_update())
        self._is_updating = False

    async def commit_update(self, version: int) -> None:
        """Serve again, with these weights and without cached prefixes of older ones."""
        await self._engine.update_weight_version(str(version))
        await self._engine.reset_prefix_cache()
        self._version = self._committed = version
        await self._engine.resume_generation()

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        self._server.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._engine is not None:
            self._engine.shutdown()
        await asyncio.sleep(0)


async def _last(outputs: AsyncIterator[Any]) -> Any:
    """The last of a request's outputs."""
    last = None
    async for output in outputs:
        last = output
    return last


def base_engine_args(config: ExperimentConfig, *, on_cpu: bool) -> dict[str, Any]:
    """The options of vLLM's EngineArgs that every engine of a run has."""
    rollout, model = config.rollout, config.model
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[model.dtype],
        "max_model_len": rollout.max_model_len,
        "tensor_parallel_size": rollout.tensor_parallel,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if on_cpu:
        # Compiling costs 25 s at every start and gains nothing measurable on CPU.
        arguments |= {"kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30), "enforce_eager": True}
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    if rollout.tensor_parallel == 1:
        arguments["distributed_executor_backend"] = "uni"
    return arguments


def log_to(path: Path) -> None:
    """Send what this actor and the engine's processes print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def prepare_cpu(config: ExperimentConfig) -> None:
    """Environment that vLLM's CPU build reads when it is imported."""
    threads = config.rollout.engine_threads or max(1, len(os.sched_getaffinity(0)) // config.rollout.replicas)
    if config.rollout.tensor_parallel == 1:
        # Lets the worker live in the engine's own process, which saves 18 s at each start.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP threads sleep at once: the trainer's ranks need the cores.
        "KMP_BLOCKTIME": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
