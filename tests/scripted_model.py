"""A GenerateFn that says what a script tells it to, on the quickstart's tokenizer: for tests of what is around it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_agent.config import ExperimentConfig
from megatron_agent.data import Row, parse_row
from megatron_agent.generation import Completion, SamplingParams
from megatron_agent.model_folders.tiny_qwen3 import make_tokenizer
from rollout.dispatch import EpisodeRequest
from rollout.episode_runner import EpisodeRunner
from trajectory.steps import Trajectory

END = "<|im_end|>"
TOKENIZER = make_tokenizer(2048)

Reply = str | Callable[[], Completion]


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def text_of(ids: Iterable[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


class ScriptedModel:
    """Answers the n-th prompt of a session with the n-th reply; a reply without end-of-turn token counts as cut off.

    Replies longer than max_tokens are cut. What was asked is kept in `prompts` and `params`.
    """

    def __init__(self, *replies: Reply) -> None:
        self._replies = replies
        self._asked: dict[str, int] = {}
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.forgotten: list[str] = []
        self.placed: dict[str, int] = {}
        self.asked_by = ""

    async def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, *, session_id: str) -> Completion:
        await asyncio.sleep(0)
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        self.asked_by = session_id
        number = self._asked[session_id] = self._asked.get(session_id, 0) + 1
        reply = self._replies[number - 1]
        return completion(reply, params.max_tokens) if isinstance(reply, str) else reply()

    def place(self, session_id: str, replica: int) -> None:
        self.placed[session_id] = replica

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


def completion(text: str, max_tokens: int = 10_000, **fields: Any) -> Completion:
    ids = ids_of(text)[:max_tokens]
    is_stopped = bool(ids) and ids[-1] == TOKENIZER.eos_token_id
    return Completion(
        **{
            "token_ids": ids,
            "logprobs": [-0.1 * (place + 1) for place in range(len(ids))],
            "finish_reason": "stop" if is_stopped else "length",
            "policy_version": 3,
            "num_cached_tokens": 0,
            **fields,
        }
    )


def make_config(folder: Path | str, *, agent: dict[str, Any] | None = None, **rollout: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": str(folder)},
            "data": {"train": "rows.jsonl"},
            "agent": agent or {},
            "rollout": rollout,
        }
    )


def make_row(prompt: Any = "go", **fields: Any) -> Row:
    return parse_row({"prompt": prompt, **fields}, index=0, where="row")


def make_request(row: Row, name: str = "episode") -> EpisodeRequest:
    return EpisodeRequest(row=row, group_id="group", trajectory_id=name, temperature=1.0)


def play(config: ExperimentConfig, model: ScriptedModel, row: Row) -> Trajectory:
    """One episode on a runner of its own."""
    runner = EpisodeRunner(config, model)  # pyright: ignore[reportArgumentType]
    trajectory = asyncio.run(runner.play(make_request(row)))
    assert trajectory is not None
    return trajectory
