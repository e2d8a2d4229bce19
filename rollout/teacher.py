"""A teacher on vLLM engines of its own: the log-probs of tokens that somebody else sampled.

    TeacherFleet (rank 0) --token ids--> TeacherEngine actors --log-probs-->

The teacher's weights never change, so nothing is synced. Requests go to all replicas at once; each of them scores its
share as one batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from megatron_agent.config import ExperimentConfig
from megatron_agent.config_layout import log_folder, runs_on_gpus
from megatron_agent.errors import FleetError
from rollout.engine import base_engine_args, log_to, prepare_cpu
from rollout.fleet import last_line


class TeacherEngine:
    """Ray actor with one vLLM engine."""

    def __init__(self, config: ExperimentConfig, *, on_cpu: bool, log_path: str) -> None:
        """`config` is the run's, with the teacher's folder as model.path and its replicas as the fleet's."""
        self._config = config
        self._on_cpu = on_cpu
        self._engine: Any = None
        log_to(Path(log_path))
        if on_cpu:
            prepare_cpu(config)

    def start(self) -> None:
        """Build the engine with the folder's weights; returns when it can score."""
        from vllm import LLM

        self._engine = LLM(**base_engine_args(self._config, on_cpu=self._on_cpu))

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each sequence of ids [L] the log-probs [L] of its tokens, each given those before it; 0 for the first."""
        from vllm import SamplingParams

        outputs = self._engine.generate(
            [{"prompt_token_ids": ids.tolist()} for ids in sequences],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        return [_of_prompt(output) for output in outputs]


def _of_prompt(output: Any) -> np.ndarray:
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([0.0, *(entry[token].logprob for token, entry in pairs)], dtype=np.float32)


class TeacherFleet:
    """Owns the teacher's replicas. Used by rank 0 only; Ray must be connected."""

    def __init__(self, config: ExperimentConfig) -> None:
        teacher = config.algorithm.teacher
        assert teacher is not None, "the experiment has no algorithm.teacher section"
        self._path = teacher.path
        self._timeout_s = config.rollout.generate_timeout_s
        self._start_timeout_s = config.rollout.start_timeout_s
        self._logs = log_folder(config)
        on_cpu = not runs_on_gpus(config)
        rollout = config.rollout.model_copy(
            update={"replicas": teacher.replicas, "tensor_parallel": teacher.tensor_parallel, "engine_args": {}}
        )
        model = config.model.model_copy(update={"path": teacher.path})
        own = config.model_copy(update={"rollout": rollout, "model": model})
        actor: Any = ray.remote(TeacherEngine).options(num_cpus=0, num_gpus=0 if on_cpu else teacher.tensor_parallel)
        self._actors = [
            actor.remote(own, on_cpu=on_cpu, log_path=str((self._logs / f"teacher-{index}.log").absolute()))
            for index in range(teacher.replicas)
        ]

    def start(self) -> None:
        """Wait until all replicas can score; raises FleetError where they cannot within rollout.start_timeout_s."""
        try:
            ray.get([actor.start.remote() for actor in self._actors], timeout=self._start_timeout_s)
        except GetTimeoutError as error:
            raise FleetError(
                f"the teacher {self._path} was not up after rollout.start_timeout_s={self._start_timeout_s:g}; see "
                f"{self._logs}/teacher-*.log"
            ) from error
        except RayError as error:
            raise FleetError(
                f"the teacher {self._path} could not start: {last_line(error)}; see {self._logs}/teacher-*.log"
            ) from error

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each sequence of ids [L] the teacher's log-probs [L] at temperature 1; 0 for the first token.

        Raises FleetError where a replica dies, or where all together take longer than rollout.generate_timeout_s for
        each sequence of one replica's share.
        """
        count = len(self._actors)
        shares = [list(sequences[index::count]) for index in range(count)]
        timeout_s = self._timeout_s * max(1, max(len(share) for share in shares))
        try:
            scored = ray.get(
                [actor.score.remote(share) for actor, share in zip(self._actors, shares, strict=True)],
                timeout=timeout_s,
            )
        except GetTimeoutError as error:
            raise FleetError(f"the teacher {self._path} scored nothing within {timeout_s:g} s") from error
        except RayError as error:
            raise FleetError(
                f"the teacher {self._path} failed: {last_line(error)}; see {self._logs}/teacher-*.log"
            ) from error
        ordered: list[np.ndarray] = [np.zeros(0)] * len(sequences)
        for index, share in enumerate(scored):
            ordered[index::count] = share
        return ordered

    def shutdown(self) -> None:
        """End the replicas."""
        for actor in self._actors if ray.is_initialized() else ():
            ray.kill(actor)
