"""report.html from hand-made records: what it must show, escape, leave out and survive."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_agent import report_charts
from megatron_agent.report import format_duration, write_report
from megatron_agent.report_charts import Chart, Series, line_segments, make_axis, render_chart, round_ticks
from megatron_agent.report_episodes import read_comparison
from rollout.recorder import TrajectoryRecorder
from trajectory.steps import ContextChange, Step, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus


def make_step(response: str, **fields: Any) -> Step:
    """Five prompt tokens, three response tokens, of which the model sampled two."""
    return Step(
        prompt_ids=np.arange(5, dtype=np.int32),
        response_ids=np.arange(3, dtype=np.int32),
        rollout_logprobs=np.zeros(3, dtype=np.float32),
        response_mask=np.array([True, True, False]),
        policy_version=0,
        response_text=response,
        **fields,
    )


def make_episode(row: int, response: str, **fields: Any) -> Trajectory:
    last = make_step(
        response,
        observation=[{"role": "user", "content": f"question {row}"}],
        reward=0.25,
        terminated=True,
        stop_reason=StopReason.TERMINATED,
    )
    fields = {"steps": (last,), "success": True, "outcome_reward": 0.5} | fields
    return Trajectory(trajectory_id=f"episode-{row}", group_id=f"group-{row}", row_index=row, **fields)


def record(run_dir: Path, step: int, phase: str, *episodes: Trajectory) -> None:
    groups = [TrajectoryGroup(group_id=episode.group_id, trajectories=(episode,)) for episode in episodes]
    TrajectoryRecorder(run_dir).write(groups, step=step, phase=phase)


def write_metrics(run_dir: Path, *records: dict[str, Any]) -> None:
    lines = [json.dumps({"time": 1000.0 + 60 * number, **fields}) + "\n" for number, fields in enumerate(records)]
    (run_dir / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def page_of(run_dir: Path, **options: Any) -> str:
    path = write_report(run_dir, **options)
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob("*.incomplete"))
    return path.read_text(encoding="utf-8")


def curve(*values: float | None, **fields: Any) -> Series:
    return Series(label="a", points=list(enumerate(values)), color=1, **fields)


def test_a_straight_line_from_bottom_to_top() -> None:
    """Values 0, 50, 100 on an axis of 0..100: the lower edge, the middle, the upper edge, equally far apart."""
    html = render_chart(Chart(title="t", unit="%", series=[curve(0, 50, 100)], domain=(0, 100)), (0, 2))
    path = re.search(r'class="line s1" d="M([^"]+)"', html)
    assert path is not None
    points = [tuple(float(number) for number in point.split(",")) for point in path[1].split("L")]
    middle = (report_charts.TOP + report_charts.BOTTOM) / 2
    assert [y for _, y in points] == [report_charts.BOTTOM, middle, report_charts.TOP]
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.11)


def test_log_axis_gives_every_decade_the_same_height() -> None:
    chart = Chart(title="t", unit="nats", series=[curve(1e-4, 1e-3, 1e-2)], log=True)
    axis = make_axis(chart, chart.series)
    top, bottom = report_charts.TOP, report_charts.BOTTOM
    assert [axis.position(v) for v in (1e-4, 1e-3, 1e-2)] == pytest.approx([bottom, (top + bottom) / 2, top])
    assert axis.ticks == pytest.approx((1e-4, 1e-3, 1e-2))


def test_zero_has_no_place_on_a_log_axis() -> None:
    html = render_chart(Chart(title="t", unit="nats", series=[curve(0.0, 0.1, 0.2)], log=True), (0, 2))
    assert "a none" in html
    assert "1e-1" in html


def test_stacked_bars_begin_where_those_below_end() -> None:
    series = [
        Series(label="low", points=[(1, 1.0)], color=1),
        Series(label="high", points=[(1, 3.0)], color=2),
    ]
    html = render_chart(Chart(title="t", unit="s", series=series, stacked=True), (1, 1))
    bars = re.findall(r'class="bar s\d" d="M[\d.]+,([\d.]+)h[\d.]+V([\d.]+)', html)
    height = report_charts.BOTTOM - report_charts.TOP
    quarter = report_charts.BOTTOM - height / 4
    assert [(float(top), float(bottom)) for top, bottom in bars] == [
        (quarter, report_charts.BOTTOM),
        (report_charts.TOP, quarter),
    ]


def test_bars_of_long_runs_are_means_of_consecutive_steps() -> None:
    """1 and 3 alternate, so that every bar of an even number of steps is 2 high: half of an axis that ends at 4."""
    points = [(step, 1.0 + 2.0 * (step % 2)) for step in range(2 * report_charts.MAX_BARS)]
    chart = Chart(title="t", unit="s", series=[Series(label="a", points=points, color=1)], stacked=True, domain=(0, 4))
    bar = re.search(r'class="bar s1" d="([^"]+)"', render_chart(chart, (0, len(points) - 1)))
    assert bar is not None
    tops = [float(y) for y in re.findall(r"M[\d.]+,([\d.]+)", bar[1])]
    assert tops == [(report_charts.TOP + report_charts.BOTTOM) / 2] * report_charts.MAX_BARS


def test_none_is_a_gap() -> None:
    assert line_segments([(1, 2.0), (2, None), (3, 4.0), (4, 5.0)]) == [[(1, 2.0)], [(3, 4.0), (4, 5.0)]]
    html = render_chart(Chart(title="t", unit="u", series=[curve(1, 2, None, 3, 4)]), (0, 4))
    assert html.count('class="line') == 2
    assert "NaN" not in html


def test_a_series_without_values_draws_nothing() -> None:
    assert render_chart(Chart(title="t", unit="u", series=[curve(None, None)]), (0, 1)) == ""


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, (0, 0.25, 0.5, 0.75, 1)),
        (0, 7, (0, 2, 4, 6, 8)),
        (-3, 3, (-4, -2, 0, 2, 4)),
        (98, 101, (98, 99, 100, 101)),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0])
def test_a_constant_curve_has_an_axis(value: float) -> None:
    html = render_chart(Chart(title="t", unit="u", series=[curve(value, value)]), (0, 1))
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', html)]
    assert heights
    assert all(report_charts.TOP <= y <= report_charts.BOTTOM for y in heights)


def test_head_line_curves_and_last_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "my <run>"
    run_dir.mkdir()
    write_metrics(
        run_dir,
        {"step": 0, "eval_return_mean": 0.25, "eval_success_rate": 0.5, "eval_episodes": 8.0},
        {"step": 1, "return_mean": -1.5, "success_rate": 0.1, "grad_norm": None, "rollout_s": 2.0, "step_s": 3.0},
        {"step": 2, "return_mean": 0.75, "success_rate": 0.9, "grad_norm": 4.0, "rollout_s": 2.0, "step_s": 3.0},
    )
    page = page_of(run_dir)
    assert "<h1>my &lt;run&gt;</h1>" in page
    for head in ("-1.5 → 0.75", "10% → 90%", "<dd>0.25</dd>", "<dd>2 min 00 s</dd>"):
        assert head in page
    for title in ("Return per episode", "Success rate", "Gradient norm before clipping", "Time of a step by phase"):
        assert page.count(f"<figcaption>{title}</figcaption>") == 1
    assert "<figcaption>Entropy" not in page
    assert "<h2>Metrics of step 2</h2>" in page
    assert "<dt>grad_norm</dt><dd>4</dd>" in page


def test_a_chart_shows_rollouts_behind_training_where_there_were_any(tmp_path: Path) -> None:
    title = "<figcaption>Rollouts behind training</figcaption>"
    write_metrics(tmp_path, {"step": 1, "return_mean": 1.0, "rollout_s": 2.0, "rollout_hidden_s": 0.0})
    assert title not in page_of(tmp_path)
    write_metrics(
        tmp_path, *({"step": n, "return_mean": 1.0, "rollout_s": 2.0, "rollout_hidden_s": 3.0} for n in (1, 2))
    )
    assert page_of(tmp_path).count(title) == 1


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "return_mean": 1.0})
    record(tmp_path, 0, "eval_before", make_episode(0, "yes"))
    page = page_of(tmp_path)
    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(|@import", page)


def test_pages_are_well_formed(tmp_path: Path) -> None:
    write_metrics(tmp_path, *({"step": n, "return_mean": n, "update_s": 1.0, "entropy": 1.0} for n in range(1, 5)))
    record(tmp_path, 0, "eval_before", make_episode(0, "</div></article>"), make_episode(1, ""))
    record(tmp_path, 4, "eval_after", make_episode(0, "<p>"), make_episode(2, "b"))
    checker = TagChecker()
    checker.feed(page_of(tmp_path))
    assert checker.open == []


class TagChecker(HTMLParser):
    """Fails where a tag closes that is not the innermost open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_same_row_before_and_after_training(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "return_mean": 1.0})
    record(tmp_path, 0, "eval_before", make_episode(4, "early four"), make_episode(5, "early five"))
    record(tmp_path, 1, "train", make_episode(4, "in training"))
    record(tmp_path, 2, "eval", make_episode(5, "half-way five"))
    record(tmp_path, 3, "eval_after", make_episode(5, "late five"))
    page = page_of(tmp_path, num_episodes=1)
    assert "early five" in page
    assert "late five" in page
    assert page.index("Before training (evaluation, step 0)") < page.index("After training (evaluation, step 3)")
    for other in ("early four", "in training", "half-way five"):
        assert other not in page


def test_what_a_step_says(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "return_mean": 1.0})
    answer = [{"role": "tool", "content": "result <4>", "name": "calculator"}]
    first = make_step(
        "<script>alert('x')</script>", observation=[{"role": "user", "content": "2 & 2"}], feedback=answer
    )
    blank = make_step(" \n", observation=answer, feedback=[{"role": "user", "content": [{"type": "text"}]}])
    silent = make_step(
        "", reward=-0.5, truncated=True, stop_reason=StopReason.MAX_STEPS, context_change=ContextChange.FORK
    )
    episode = make_episode(
        7, "", steps=(first, blank, silent), success=False, outcome_reward=2.0,
        reward_parts={"exact": 2.0}, status=TrajectoryStatus.TRUNCATED,
    )  # fmt: skip
    record(tmp_path, 0, "eval_before", episode)
    page = page_of(tmp_path)
    assert "<script" not in page
    for text in (
        "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;",
        "2 &amp; 2",
        "feedback · tool",
        "result &lt;4&gt;\n{&quot;name&quot;: &quot;calculator&quot;}",
        "observation: the feedback of step 1",
        "nothing but white space: &#x27; \\n&#x27;",
        "[{&quot;type&quot;: &quot;text&quot;}]",
        "empty response",
        "5 prompt + 3 response tokens, 2 trained",
        "reward -0.5",
        "truncated: max_steps",
        "context fork",
        "return <b>1.5</b>",
        "outcome reward 2 (exact 2)",
        "✗ no success",
        "status truncated",
    ):
        assert text in page


def test_a_failed_episode_shows_its_error(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "return_mean": 1.0})
    failed = make_episode(
        0, "", steps=(), success=None, status=TrajectoryStatus.ENV_FAILED, error="step 1: KeyError: '<door>'"
    )
    record(tmp_path, 1, "train", failed)
    page = page_of(tmp_path)
    for text in ("env_failed", "KeyError: &#x27;&lt;door&gt;&#x27;", "no verdict", "before its first step"):
        assert text in page


def test_without_evaluation_first_and_last_training_step(tmp_path: Path) -> None:
    for step, rows in ((1, (0, 1, 2)), (2, (3, 4, 5)), (3, (2, 6, 7))):
        record(tmp_path, step, "train", *(make_episode(row, f"step {step} row {row}") for row in rows))
    comparison = read_comparison(tmp_path / "trajectories.jsonl", 2)
    assert comparison is not None
    assert comparison.after is not None
    assert (comparison.before.step, comparison.after.step) == (1, 3)
    rows = [tuple(episode.row_index if episode else None for episode in pair) for pair in comparison.pairs]
    assert rows == [(2, 2), (0, 6)]


def test_one_training_step_is_shown_once(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "return_mean": 0.5})
    record(tmp_path, 1, "train", make_episode(0, "only words"))
    page = page_of(tmp_path)
    assert page.count("only words") == 1
    assert "0.5" in page


def test_rows_are_spread_over_all_and_the_first_sample_counts(tmp_path: Path) -> None:
    episodes = [make_episode(row, f"row {row} sample {sample}") for row in range(6) for sample in range(2)]
    record(tmp_path, 0, "eval_before", *episodes)
    comparison = read_comparison(tmp_path / "trajectories.jsonl", 3)
    assert comparison is not None
    texts = [before.steps[0].response_text for before, _ in comparison.pairs if before]
    assert texts == ["row 0 sample 0", "row 2 sample 0", "row 4 sample 0"]


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "return_mean": 1.0})
    record(tmp_path, 0, "eval_before", make_episode(0, "whole"))
    path = tmp_path / "trajectories.jsonl"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + whole.replace("eval_before", "eval_after")[:-40], encoding="utf-8")
    page = page_of(tmp_path)
    assert page.count("<pre>whole</pre>") == 1


def test_runs_without_episodes_or_steps(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 0, "eval_return_mean": 0.5, "eval_success_rate": None})
    page = page_of(tmp_path)
    assert "logging.trajectories" in page
    assert "<h2>Metrics of step 0</h2>" in page
    (tmp_path / "trajectories.jsonl").touch()
    assert "trajectories.jsonl is empty" in page_of(tmp_path)
    assert "Episodes, step by step" not in page_of(tmp_path, num_episodes=0)
    (tmp_path / "metrics.jsonl").unlink()
    assert "No step has been recorded yet." in page_of(tmp_path)


def test_durations() -> None:
    assert [format_duration(seconds) for seconds in (4.25, 59.9996, 185, 7625)] == [
        "4.25 s",
        "60 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
