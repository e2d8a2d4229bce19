"""Recorded episodes as HTML: what the environment showed, what the model said, what came back, step by step."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from megatron_agent.report_episodes import Comparison, PlayedRows
from trajectory.steps import ContextChange, Step, StopReason, Trajectory, TrajectoryStatus

VERDICTS = {
    True: '<b class="chip good">✓ success</b>',
    False: '<b class="chip bad">✗ no success</b>',
    None: '<b class="chip">no verdict</b>',
}


def render_comparison(comparison: Comparison) -> str:
    """All pairs of episodes, each pair side by side."""
    early = render_label(comparison.before, is_early=True)
    late = render_label(comparison.after, is_early=False) if comparison.after else ""
    parts = []
    for before, after in comparison.pairs:
        sides = [(label, episode) for label, episode in ((early, before), (late, after)) if episode is not None]
        rows = sorted({episode.row_index for _, episode in sides})
        title = " and ".join(f"row {row}" for row in rows)
        returns = " → ".join(_number(episode.episode_return) for _, episode in sides)
        parts.append(
            f'<details class="pair" open><summary>Dataset {title}: return {returns}</summary><div class="sides">'
            + "".join(render_episode(episode, label) for label, episode in sides)
            + "</div></details>"
        )
    return "".join(parts)


def render_label(played: PlayedRows, *, is_early: bool) -> str:
    """When these episodes were played, in words."""
    if played.phase == "train":
        return f"{'First' if is_early else 'Latest'} training step ({played.step})"
    when = {"eval_before": "Before training", "eval_after": "After training"}.get(played.phase, "During training")
    return f"{when} (evaluation, step {played.step})"


def render_episode(episode: Trajectory, label: str) -> str:
    """How an episode came out, and each of its steps."""
    facts = [f"return <b>{_number(episode.episode_return)}</b>"]
    if episode.outcome_reward or episode.reward_parts:
        facts.append(f"outcome reward {_number(episode.outcome_reward)}{_parts(episode.reward_parts)}")
    facts.append(_count(len(episode.steps), "step"))
    facts.append(f"status {episode.status.value}")
    if "total_s" in episode.timings:
        facts.append(f"{episode.timings['total_s']:.3g} s")
    chip = "" if episode.status is TrajectoryStatus.OK else f'<b class="chip warn">{episode.status.value}</b>'
    error = f'<pre class="error">{escape(episode.error)}</pre>' if episode.error else ""
    steps = "".join(
        render_step(step, number, episode.steps[number - 2] if number > 1 else None)
        for number, step in enumerate(episode.steps, 1)
    )
    return (
        f"<article><h3>{label}</h3><p>{VERDICTS[episode.success]}{chip}</p>"
        f'<p class="facts">{" · ".join(facts)}</p><p class="id">{escape(episode.trajectory_id)}</p>{error}'
        + (steps or '<p class="none">The episode ended before its first step.</p>')
        + "</article>"
    )


def render_step(step: Step, number: int, previous: Step | None) -> str:
    """One decision. What it saw is not repeated where it is word for word what the previous step's answer was."""
    tokens = (
        f"{len(step.prompt_ids)} prompt + {_count(len(step.response_ids), 'response token')}, "
        f"{step.num_trained_tokens} trained"
    )
    if previous is not None and previous.feedback and step.observation == previous.feedback:
        observation = f'<p class="none">observation: the feedback of step {number - 1}</p>'
    else:
        observation = _messages("observation", step.observation)
    notes = [f"reward {_number(step.reward)}{_parts(step.reward_parts)}", tokens, f"weights {step.policy_version}"]
    if step.context_change in (ContextChange.REALIGN, ContextChange.FORK):
        notes.append(f"context {step.context_change.value}")
    notes += [f"{escape(name)} {_number(value)}" for name, value in _counters(step.info).items()]
    return (
        f'<section class="step"><h4>Step {number}{_ending(step)}</h4><p class="facts">{" · ".join(notes)}</p>'
        f"{observation}{_response(step)}{_messages('feedback', step.feedback)}</section>"
    )


def _ending(step: Step) -> str:
    if step.stop_reason is StopReason.NONE and not step.terminated and not step.truncated:
        return ""
    how = "truncated" if step.truncated else "terminated" if step.terminated else "ended"
    reason = step.stop_reason.value
    return f' <b class="chip{" warn" if step.truncated else ""}">{how if how == reason else f"{how}: {reason}"}</b>'


def _response(step: Step) -> str:
    text = step.response_text
    if text.strip():
        body = f"<pre>{escape(text)}</pre>"
    elif text:
        body = f'<p class="none">nothing but white space: {escape(repr(text))}</p>'
    else:
        body = '<p class="none">empty response</p>'
    return f'<div class="said model"><span>model</span>{body}</div>'


def _messages(kind: str, messages: list[dict[str, Any]]) -> str:
    """Chat messages; content that is not text, and keys beyond role and content, are shown as JSON."""
    blocks = []
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else "" if content is None else _json(content)
        others = {key: value for key, value in message.items() if key not in ("role", "content")}
        text = "\n".join(part for part in (text, _json(others) if others else "") if part)
        body = f"<pre>{escape(text)}</pre>" if text else '<p class="none">empty message</p>'
        blocks.append(
            f'<div class="said"><span>{kind} · {escape(str(message.get("role", "no role")))}</span>{body}</div>'
        )
    return "".join(blocks)


def _counters(info: Mapping[str, Any]) -> dict[str, float]:
    """The step's counters that are not 0; what the engine had cached says nothing about the episode."""
    return {
        name: value
        for name, value in info.items()
        if isinstance(value, int | float) and value and name not in ("num_cached_tokens", "cache_block_tokens")
    }


def _parts(parts: Mapping[str, float]) -> str:
    return f" ({escape(', '.join(f'{name} {_number(value)}' for name, value in parts.items()))})" if parts else ""


def _number(value: float) -> str:
    return f"{value:.4g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
