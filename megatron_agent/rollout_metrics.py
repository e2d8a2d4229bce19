"""Numbers about a set of episodes: returns, success, lengths, endings, failures, age of the weights."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from trajectory.filters import equal_returns
from trajectory.steps import ContextChange, Trajectory, TrajectoryGroup, TrajectoryStatus


def rollout_metrics(groups: Sequence[TrajectoryGroup], *, step: int) -> dict[str, float]:
    """Flat metrics of all trajectories. `step` is the training step, against which the weights' age is measured:
    `staleness_*` count the versions from the weights that sampled a step to those that are trained on it.

    `success_rate` counts an episode without a verdict by its return being positive.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {"episodes": 0.0}
    scored = [t for t in trajectories if t.status is not TrajectoryStatus.ENV_FAILED]
    returns = np.array([t.episode_return for t in scored] or [0.0])
    steps = [step_ for t in trajectories for step_ in t.steps]
    staleness = np.array([max(0, step - 1 - step_.policy_version) for step_ in steps] or [0])
    tokens = np.array([step_.num_trained_tokens for step_ in steps] or [0])
    metrics: dict[str, float] = {
        "episodes": float(len(trajectories)),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "success_rate": float(np.mean([_succeeded(t.success, t.episode_return) for t in scored] or [0.0])),
        "steps_per_episode": len(steps) / len(trajectories),
        "response_tokens": float(tokens.sum()),
        "response_tokens_per_step": float(tokens.mean()),
        "prompt_tokens": float(sum(len(step_.prompt_ids) for step_ in steps)),
        "env_failed_frac": 1.0 - len(scored) / len(trajectories),
        "equal_return_groups_frac": float(np.mean([_all_equal(group) for group in groups])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
    }
    prompt_tokens = max(1.0, metrics["prompt_tokens"])
    cached = sum(step_.info.get("num_cached_tokens", 0) for step_ in steps)
    metrics["prefix_cache_hit_frac"] = cached / prompt_tokens
    metrics["prefix_cache_ideal_frac"] = sum(_ideal_cached_tokens(group) for group in groups) / prompt_tokens
    endings = Counter(t.steps[-1].stop_reason.value for t in trajectories if t.steps)
    metrics |= {f"ended_{reason}_frac": count / len(trajectories) for reason, count in sorted(endings.items())}
    changes = Counter(step_.context_change for step_ in steps)
    metrics |= {f"context_{change.value}": float(changes[change]) for change in ContextChange if changes[change]}
    for counter in (
        *("tool_calls", "tool_errors", "tool_retries", "bad_actions", "cut_off"),
        *("bad_calls", "call_bad_json", "call_cut_off", "call_unknown_tool", "call_bad_arguments"),
    ):
        if any(counter in step_.info for step_ in steps):
            metrics[counter] = float(sum(step_.info.get(counter, 0) for step_ in steps))
    parts = [_reward_parts(t) for t in scored]
    for name in sorted({name for own in parts for name in own}):
        metrics[f"reward_{name}_mean"] = float(np.mean([own[name] for own in parts]))
    return metrics


def _ideal_cached_tokens(group: TrajectoryGroup) -> int:
    """Prompt tokens that an endless prefix cache would have had, if every episode of the group only appended.

    For a step that follows another one of its episode, that one's prompt and response; for the first step of all
    members but one, the prompt; both in whole blocks of the engine's cache. The last token of a prompt is always
    computed. Episodes of the same dataset row in other groups, and system prompts that all rows share, can only add.
    """
    total, seen = 0, False
    for trajectory in group.trajectories:
        before = None
        for step in trajectory.steps:
            known = len(step.prompt_ids) if seen else 0
            if before is not None:
                known = len(before.prompt_ids) + len(before.response_ids)
            block = step.info.get("cache_block_tokens", 0)
            if block:
                total += min(known, len(step.prompt_ids) - 1) // block * block
            before, seen = step, True
    return total


def _reward_parts(trajectory: Trajectory) -> Counter[str]:
    """The parts of the outcome reward and of all step rewards, added up by name."""
    parts: Counter[str] = Counter()
    for own in (trajectory.reward_parts, *(step.reward_parts for step in trajectory.steps)):
        for name, value in own.items():
            parts[name] += value  # pyright: ignore[reportArgumentType]
    return parts


def _succeeded(success: bool | None, episode_return: float) -> bool:
    return episode_return > 0 if success is None else success


def _all_equal(group: TrajectoryGroup) -> bool:
    return equal_returns([t for t in group.trajectories if t.status is not TrajectoryStatus.ENV_FAILED])
