"""Curves over training steps as SVG inside HTML figures. No script: colours and the hover box are the page's CSS."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 440, 216
LEFT, RIGHT, TOP, BOTTOM = 50, 424, 22, 178
"""Edges of the plot inside the drawing; y grows downwards."""
MAX_DOTS = 60
DENSE = 400
"""Above so many points a line is drawn thin."""
MAX_BARS = 190
MAX_HOVER_PLACES = 200
"""Longer runs show every second, third, ... step under the pointer; the curves keep all of them."""
CHARACTER_WIDTH = 6.6
"""Of the hover box's text, rather too wide than too narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity over training steps."""

    label: str
    points: Sequence[tuple[int, float | None]]
    """(training step, value), steps ascending; None is a gap."""
    color: int
    """Which of the page's series colours, from 1."""
    dots: bool = False
    """Mark every value, up to MAX_DOTS of them; for quantities that are measured now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series of one unit that share an axis."""

    title: str
    unit: str
    series: Sequence[Series]
    log: bool = False
    """Decades on the y axis; values that are not positive are gaps."""
    domain: tuple[float | None, float | None] = (None, None)
    """What the y axis covers at least."""
    stacked: bool = False
    """One bar per step, its series on top of each other; all have the same steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps values to y positions."""

    ticks: tuple[float, ...]
    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """TOP for `high`, BOTTOM for `low`."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)


def render_chart(chart: Chart, steps: tuple[int, int]) -> str:
    """The figure: caption, legend and drawing. `steps` is the first and last step of the x axis.

    An empty text where no series has a value.
    """
    series = [_drawable(one, log=chart.log) for one in chart.series]
    series = [one for one in series if _values(one)]
    if not series:
        return ""
    axis = make_axis(chart, series)
    x = x_positions(steps)
    draw = _bars if chart.stacked else _lines
    drawing = "".join(
        [_grid(axis, chart.unit), _step_axis(steps, x), draw(series, axis, x), _hover(chart, series, steps, x)]
    )
    legend = "".join(
        f'<span><i class="key s{one.color}"></i>{escape(one.label)} <b>{format_value(_values(one)[-1])}</b></span>'
        for one in series
    )
    summary = "; ".join(
        f"{one.label} from {format_value(_values(one)[0])} to {format_value(_values(one)[-1])}" for one in series
    )
    spoken = escape(f"{chart.title}, {chart.unit}: {summary}")
    return (
        f'<figure><figcaption>{escape(chart.title)}</figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{spoken}">{drawing}</svg></figure>'
    )


def make_axis(chart: Chart, series: Sequence[Series]) -> Axis:
    """A y axis of round ticks around all values of `series`, of which there is at least one."""
    values = _totals(series) if chart.stacked else [value for one in series for value in _values(one)]
    low, high = (bound(values) for bound in (min, max))
    if chart.log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        ticks = tuple(10.0**power for power in range(first, last + 1, math.ceil((last - first) / 5)))
        return Axis(ticks=ticks, low=10.0**first, high=10.0**last, log=True)
    least, most = chart.domain
    low, high = min(low, low if least is None else least), max(high, high if most is None else most)
    if low == high:
        high = low + (abs(low) or 1.0)
    ticks = round_ticks(low, high)
    return Axis(ticks=ticks, low=ticks[0], high=ticks[-1])


def round_ticks(low: float, high: float, *, least: float = 0.0) -> tuple[float, ...]:
    """About five multiples of 1, 2, 2.5 or 5 times a power of ten (and not below `least`) that enclose the range."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    size = max(least, next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return tuple(size * index for index in range(first, last + 1))


def x_positions(steps: tuple[int, int]) -> Callable[[float], float]:
    """Step -> x; each step has a slot of its own, so that a single one lies in the middle."""
    first, last = steps
    return lambda step: LEFT + (RIGHT - LEFT) * (step - first + 0.5) / (last - first + 1)


def line_segments(points: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    """The runs of points between gaps."""
    segments: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if value is None:
            segments.append([])
        else:
            segments[-1].append((step, value))
    return [segment for segment in segments if segment]


def format_value(value: float | None, digits: int = 3) -> str:
    """A short number: 12.3k, 0.25, 4.1e-05."""
    if value is None:
        return "–"
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor:
            return f"{value / factor:.{digits}g}{suffix}"
    if 1000 <= abs(value) < 10_000:
        return f"{value:.{max(digits, 4)}g}"
    return f"{value:.{digits}g}"


def _drawable(series: Series, *, log: bool) -> Series:
    if not log:
        return series
    points = [(step, None if value is None or value <= 0 else value) for step, value in series.points]
    return Series(label=series.label, points=points, color=series.color, dots=series.dots)


def _values(series: Series) -> list[float]:
    return [value for _, value in series.points if value is not None]


def _totals(series: Sequence[Series]) -> list[float]:
    totals: dict[int, float] = {}
    for one in series:
        for step, value in one.points:
            totals[step] = totals.get(step, 0.0) + (value or 0.0)
    return [0.0, *totals.values()]


def _grid(axis: Axis, unit: str) -> str:
    rows = [f'<text class="unit" x="4" y="10">{escape(unit)}</text>']
    for tick in axis.ticks:
        y = axis.position(tick)
        label = f"1e{round(math.log10(tick))}" if axis.log else format_value(tick, 6)
        rows.append(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
        )
    return "".join(rows)


def _step_axis(steps: tuple[int, int], x: Callable[[float], float]) -> str:
    first, last = steps
    ticks = round_ticks(first, last, least=1.0) if last > first else (float(first),)
    whole = [round(tick) for tick in ticks if first <= tick <= last and tick == round(tick)]
    labels = "".join(f'<text x="{x(t):.1f}" y="{BOTTOM + 15}" text-anchor="middle">{t}</text>' for t in whole)
    middle = (LEFT + RIGHT) / 2
    return f'{labels}<text class="unit" x="{middle}" y="{BOTTOM + 32}" text-anchor="middle">training step</text>'


def _lines(series: Sequence[Series], axis: Axis, x: Callable[[float], float]) -> str:
    parts = []
    for one in series:
        last = max(step for step, value in one.points if value is not None)
        dots = one.dots and len(one.points) <= MAX_DOTS
        style = " dashed" if dots else " dense" if len(one.points) > DENSE else ""
        for segment in line_segments(one.points):
            places = [(x(step), axis.position(value)) for step, value in segment]
            if len(places) > 1:
                path = "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in places)
                parts.append(f'<path class="line s{one.color}{style}" d="{path}"/>')
            marked = dots or len(places) == 1
            parts += [
                f'<circle class="dot s{one.color}" cx="{px:.1f}" cy="{py:.1f}" r="4"/>'
                for (px, py), (step, _) in zip(places, segment, strict=True)
                if marked or step == last
            ]
    return "".join(parts)


def _bars(series: Sequence[Series], axis: Axis, x: Callable[[float], float]) -> str:
    """One bar per step; in long runs one per so many consecutive steps, of their mean."""
    num_steps = max(len(one.points) for one in series)
    per_bar = math.ceil(num_steps / MAX_BARS)
    slot = (x(1) - x(0)) * per_bar
    width = min(24.0, slot - 2 if slot > 6 else slot)
    base: dict[int, float] = {}
    parts = []
    for one in series:
        path = ""
        for start in range(0, len(one.points), per_bar):
            members = one.points[start : start + per_bar]
            low = base.get(start, 0.0)
            base[start] = low + sum(value or 0.0 for _, value in members) / len(members)
            left = (x(members[0][0]) + x(members[-1][0]) - width) / 2
            y, bottom = axis.position(base[start]), axis.position(low)
            path += f"M{left:.2f},{y:.1f}h{width:.2f}V{bottom:.1f}h{-width:.2f}z"
        parts.append(f'<path class="bar s{one.color}" d="{path}"/>')
    return "".join(parts)


def _hover(chart: Chart, series: Sequence[Series], steps: tuple[int, int], x: Callable[[float], float]) -> str:
    """Invisible columns, each with a cursor and a box of its step's values that the page shows under the pointer."""
    by_step: dict[int, list[str]] = {}
    for one in series:
        for step, value in one.points:
            text = f"{one.label} {format_value(value, 4) if value is not None else 'none'}"
            by_step.setdefault(step, []).append(text)
    shown = sorted(by_step)[:: math.ceil(len(by_step) / MAX_HOVER_PLACES)]
    edges = [LEFT, *((x(a) + x(b)) / 2 for a, b in pairwise(shown)), RIGHT]
    places = []
    for index, step in enumerate(shown):
        lines = [f"step {step}", *by_step[step]]
        width = max(len(line) for line in lines) * CHARACTER_WIDTH + 14
        center = x(step)
        left = center + 8 if center + 8 + width <= RIGHT else center - 8 - width
        rows = "".join(
            f'<tspan x="{left + 7:.1f}" dy="{14 if row else 0}">{escape(line)}</tspan>'
            for row, line in enumerate(lines)
        )
        places.append(
            f'<g class="hover"><rect x="{edges[index]:.1f}" y="{TOP}" width="{edges[index + 1] - edges[index]:.1f}" '
            f'height="{BOTTOM - TOP}" fill="transparent"/><g class="tip"><line x1="{center:.1f}" x2="{center:.1f}" '
            f'y1="{TOP}" y2="{BOTTOM}"/><rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{len(lines) * 14 + 8}" rx="4"/><text y="{TOP + 15}">{rows}</text></g></g>'
        )
    return "".join(places)
