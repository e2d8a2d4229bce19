"""report.html of a run: one page with its curves, its last numbers and some episodes from before and after training."""

import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_agent.metrics import read_metrics
from megatron_agent.report_charts import Chart, Series, format_value, render_chart
from megatron_agent.report_episodes import read_comparison
from megatron_agent.report_page import render_page
from megatron_agent.report_steps import render_comparison
from rollout.recorder import FILE_NAME as TRAJECTORIES

FILE_NAME = "report.html"
PHASES = ("rollout", "credit", "logprobs", "update", "sync")
"""The parts of a training step, in the order in which they run and are stacked."""
Records = Sequence[Mapping[str, Any]]


def write_report(run_dir: Path, *, num_episodes: int = 3) -> Path:
    """Write `run_dir`/report.html from metrics.jsonl and trajectories.jsonl, and return its path.

    Also while the run goes on, and for a run that records no trajectories. `num_episodes` are shown step by step from
    before training and as many from after it.
    """
    by_step = {record["step"]: record for record in read_metrics(run_dir)}
    records = [by_step[step] for step in sorted(by_step)]
    name = run_dir.resolve().name
    sections = [render_head(name, records), render_charts(records), render_last_step(records)]
    if num_episodes:
        sections.append(render_episodes(run_dir / TRAJECTORIES, num_episodes))
    path = run_dir / FILE_NAME
    temporary = path.with_name(path.name + ".incomplete")
    temporary.write_text(render_page(name, "".join(sections)), encoding="utf-8")
    os.replace(temporary, path)
    return path


def render_head(name: str, records: Records) -> str:
    """The run's name, and its result in one line of numbers."""
    trained = [record for record in records if record.get("return_mean") is not None]
    tiles = [
        ("return", _change(records, "return_mean", format_value)),
        ("success", _change(records, "success_rate", _percent)),
        ("evaluation return", _change(records, "eval_return_mean", format_value)),
        ("evaluation success", _change(records, "eval_success_rate", _percent)),
        ("training steps", str(trained[-1]["step"]) if trained else "0"),
        ("wall time", format_duration(wall_seconds(records))),
    ]
    cells = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in tiles if value)
    return f'<h1>{escape(name)}</h1><dl class="tiles">{cells}</dl>'


def render_charts(records: Records) -> str:
    """All curves that have a value."""
    if not records:
        return "<p>No step has been recorded yet.</p>"
    steps = (records[0]["step"], records[-1]["step"])
    figures = "".join(render_chart(chart, steps) for chart in _charts(records))
    note = "Legends give the latest value. A gap is a step without a finite value. Point at a curve to read it."
    return f'<h2>Curves</h2><p>{note}</p><div class="charts">{figures}</div>'


def render_last_step(records: Records) -> str:
    """Every number of the latest training step, or of the only record there is."""
    last = next((record for record in reversed(records) if "return_mean" in record), records[-1] if records else None)
    if last is None:
        return ""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{format_value(value, 5) if value is not None else 'not finite'}</dd></div>"
        for name, value in sorted(last.items())
        if name not in ("step", "time")
    )
    note = "docs/metrics.md of the repository says what each of them is."
    return f'<h2>Metrics of step {last["step"]}</h2><p>{note}</p><dl class="metrics">{cells}</dl>'


def render_episodes(path: Path, num_episodes: int) -> str:
    """Sampled episodes, or why there are none."""
    title = "<h2>Episodes, step by step</h2>"
    if not path.exists():
        return f"{title}<p>No episodes were recorded: there is no {TRAJECTORIES} (see logging.trajectories).</p>"
    comparison = read_comparison(path, num_episodes)
    if comparison is None:
        return f"{title}<p>No episodes were recorded: {TRAJECTORIES} is empty.</p>"
    shown = (
        "The first recorded episode of each dataset row shown; rows are spread evenly over those that were played, "
        "without looking at the result."
    )
    return f"{title}<p>{shown}</p>{render_comparison(comparison)}"


def wall_seconds(records: Records) -> float:
    """Seconds from the start of the first record's step to the end of the last one's; pauses count."""
    if not records:
        return 0.0
    return records[-1]["time"] - records[0]["time"] + (records[0].get("step_s") or 0.0)


def format_duration(seconds: float) -> str:
    """Two units at most: 42 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _charts(records: Records) -> list[Chart]:
    def curve(label: str, key: str, color: int, *, factor: float = 1.0) -> Series:
        dots = key.startswith("eval_")
        measured = [record for record in records if (key in record if dots else "return_mean" in record)]
        values = [(record["step"], record.get(key)) for record in measured]
        points = [(step, None if value is None else value * factor) for step, value in values]
        return Series(label=label, points=points, color=color, dots=dots)

    return [
        Chart(
            title="Return per episode",
            unit="mean return",
            series=[curve("training", "return_mean", 1), curve("evaluation", "eval_return_mean", 2)],
        ),
        Chart(
            title="Success rate",
            unit="% of episodes",
            series=[
                curve("training", "success_rate", 1, factor=100),
                curve("evaluation", "eval_success_rate", 2, factor=100),
            ],
            domain=(0, 100),
        ),
        Chart(
            title="Episode length",
            unit="steps per episode",
            series=[curve("training", "steps_per_episode", 1), curve("evaluation", "eval_steps_per_episode", 2)],
            domain=(0, None),
        ),
        Chart(
            title="Response length",
            unit="tokens per step",
            series=[
                curve("training", "response_tokens_per_step", 1),
                curve("evaluation", "eval_response_tokens_per_step", 2),
            ],
            domain=(0, None),
        ),
        Chart(
            title="Throughput",
            unit="tokens/s",
            series=[curve("rollout", "rollout_tokens_per_s", 1), curve("training", "train_tokens_per_s", 3)],
            domain=(0, None),
        ),
        Chart(
            title="Log-prob gap between trainer and fleet",
            unit="nats per token, log scale",
            series=[curve("mean", "logprob_gap_mean", 1), curve("max", "logprob_gap_max", 5)],
            log=True,
        ),
        Chart(title="Entropy", unit="nats per token", series=[curve("entropy", "entropy", 1)], domain=(0, None)),
        Chart(
            title="Gradient norm before clipping",
            unit="L2 norm",
            series=[curve("norm", "grad_norm", 1)],
            domain=(0, None),
        ),
        Chart(
            title="Time of a step by phase",
            unit="seconds",
            series=[curve(phase, f"{phase}_s", color) for color, phase in enumerate(PHASES, 1)],
            stacked=True,
        ),
        *_overlap_charts(records, curve),
    ]


def _overlap_charts(records: Records, curve: Callable[[str, str, int], Series]) -> list[Chart]:
    """How long episodes were played before their step waited for them; nothing where no step's were."""
    if not any(record.get("rollout_hidden_s") for record in records):
        return []
    return [
        Chart(
            title="Rollouts behind training",
            unit="seconds",
            series=[curve("hidden", "rollout_hidden_s", 3), curve("waited for", "rollout_s", 1)],
            stacked=True,
        )
    ]


def _change(records: Records, key: str, text: Callable[[float], str]) -> str:
    """First and last value of a metric; empty where it has none."""
    values = [record[key] for record in records if record.get(key) is not None]
    if not values:
        return ""
    return text(values[0]) if len(values) == 1 else f"{text(values[0])} → {text(values[-1])}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
