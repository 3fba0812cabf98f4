"""Charts as SVG text: ratios on a logarithmic axis, and curves.

The drawing code is written by hand: the output depends on nothing but the figures, so that a test
can compare committed charts with new ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

__all__ = ["Bar", "Curve", "Group", "curve_chart", "ratio_chart"]

_WIDTH = 860
_INK, _QUIET, _GRID = "#1b2a38", "#5b6b78", "#dde3e8"
_FASTER, _SLOWER, _LIMIT = "#1f78b4", "#d95f02", "#9aa7b1"

#: Ends of the label column and of the plot of a ratio chart.
_LABELS, _PLOT_END = 330, 780
_BAR = 12

#: Steps within a decade of a logarithmic axis, from fine to coarse.
_STEPS: tuple[tuple[float, ...], ...] = ((1, 2, 5), (1,))
_MIN_TICK_DISTANCE = 44


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One ratio.

    Attributes:
        label: Label on the left.
        ratio: Median ratio; above 1, Headrace is faster.
        low: Lowest ratio of a round.
        high: Highest ratio of a round.
        text: Ratio as text.
        note: Second line of the label.
        is_limit: Whether the ratio is to an upper limit, which cannot be exceeded.
    """

    label: str
    ratio: float
    low: float
    high: float
    text: str
    note: str = ""
    is_limit: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Bars below a heading, if it is not empty."""

    heading: str
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values by the number of peers, each a list with one value per round."""

    title: str
    unit: str
    values: dict[int, list[float]]


def ratio_chart(groups: Sequence[Group], caption: str) -> str:
    """Return a chart of ratios as bars that start at 1, on a logarithmic axis.

    A thin line spans the lowest to the highest ratio of a round.
    """
    bars = [bar for group in groups for bar in group.bars]
    low = min(0.5, *(bar.low for bar in bars)) / 1.15
    high = max(2.0, *(bar.high for bar in bars)) * 1.15
    scale = (_PLOT_END - _LABELS) / math.log(high / low)

    def x_of(ratio: float) -> float:
        return _LABELS + math.log(ratio / low) * scale

    ticks = _ticks(low, high, scale)
    parts = [_text(x_of(tick), 24, f"{tick:,.15g}x", 11, _QUIET, anchor="middle") for tick in ticks]
    top = 34.0
    for group in groups:
        if group.heading:
            parts.append(_text(20, top + 18, group.heading, 13, bold=True))
        top += 26 if group.heading else 10
        height = sum(map(_height, group.bars))
        parts += [_line(x_of(tick), top, x_of(tick), top + height, _GRID) for tick in ticks]
        for bar in group.bars:
            parts += _bar(bar, top, x_of)
            top += _height(bar)
        parts.append(_line(x_of(1.0), top - height, x_of(1.0), top, _INK, 1.5))
        top += 6
    return _svg(top + 28, [*parts, _text(20, top + 16, caption, 12, _QUIET)])


def _height(bar: Bar) -> int:
    return 34 if bar.note else 20


def _bar(bar: Bar, top: float, x_of: Callable[[float], float]) -> list[str]:
    """Return the elements of one bar, with its labels."""
    middle = top + _height(bar) / 2
    left, right = sorted((x_of(1.0), x_of(bar.ratio)))
    color = _LIMIT if bar.is_limit else _FASTER if bar.ratio >= 1 else _SLOWER
    rows = [(bar.label, 12, _INK), (bar.note, 11, _QUIET)] if bar.note else [(bar.label, 12, _INK)]
    labels = [
        _text(_LABELS - 12, middle + 4 + 14 * (row - (len(rows) - 1) / 2), *each, anchor="end")
        for row, each in enumerate(rows)
    ]
    return [
        *labels,
        f"<rect x='{left:.1f}' y='{middle - _BAR / 2:g}' width='{max(1.0, right - left):.1f}' "
        f"height='{_BAR}' fill='{color}'/>",
        _line(x_of(bar.low), middle, x_of(bar.high), middle, _INK),
        _text(_PLOT_END + 12, middle + 4, bar.text, 12),
    ]


def _ticks(low: float, high: float, scale: float) -> list[float]:
    """Return the ticks of a logarithmic axis, as many as have room for their labels."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [float(f"{tick:.3g}") for tick in ticks if low <= tick <= high]
        if all(
            math.log(after / before) * scale >= _MIN_TICK_DISTANCE
            for before, after in pairwise(ticks)
        ):
            break
    return ticks


def curve_chart(curves: Sequence[Curve], caption: str) -> str:
    """Return a chart with a panel per curve, side by side; the horizontal axis is logarithmic.

    The line joins the medians of the rounds; the shaded area spans their lowest to highest values.
    """
    width = _WIDTH / len(curves)
    parts = [
        element
        for number, curve in enumerate(curves)
        for element in _panel(curve, number * width, width)
    ]
    return _svg(276, [*parts, _text(20, 264, caption, 12, _QUIET)])


def _panel(curve: Curve, left: float, width: float) -> list[str]:
    """Return the elements of one panel."""
    x0, x1, y0, y1 = left + 64, left + width - 24, 212, 62
    counts = sorted(curve.values)
    step = _round_step(max(map(max, curve.values.values())))
    top = step * math.ceil(max(map(max, curve.values.values())) / step)

    def x_of(count: int) -> float:
        return x0 + (x1 - x0) * math.log(count / counts[0]) / math.log(counts[-1] / counts[0])

    def y_of(value: float) -> float:
        return y0 - (y0 - y1) * value / top

    parts = [
        _text(left + 20, 24, curve.title, 13, bold=True),
        _text(left + 20, 42, curve.unit, 11, _QUIET),
    ]
    for number in range(round(top / step) + 1):
        value = number * step
        parts.append(_line(x0, y_of(value), x1, y_of(value), _GRID))
        label = f"{value:,.6g}"
        parts.append(_text(x0 - 8, y_of(value) + 4, label, 11, _QUIET, anchor="end"))
    for decade in range(round(math.log10(counts[0])), round(math.log10(counts[-1])) + 1):
        label = f"{10**decade:,}"
        parts.append(_text(x_of(10**decade), y0 + 18, label, 11, _QUIET, anchor="middle"))
    rounds = [(x_of(count), curve.values[count]) for count in counts]
    area = [(x, min(values)) for x, values in rounds]
    area += [(x, max(values)) for x, values in reversed(rounds)]
    medians = [(x, y_of(statistics.median(values))) for x, values in rounds]
    points = " ".join(f"{x:.1f},{y_of(value):.1f}" for x, value in area)
    parts.append(f"<polygon points='{points}' fill='{_FASTER}' fill-opacity='0.2'/>")
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in medians)
    parts.append(f"<polyline points='{points}' fill='none' stroke='{_FASTER}' stroke-width='2'/>")
    parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{_FASTER}'/>" for x, y in medians]
    return parts


def _round_step(highest: float) -> float:
    """Return a distance of ticks, 1, 2 or 5 times a power of ten, for at most five ticks."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= highest / 4)


def _text(
    x: float,
    y: float,
    content: str,
    size: int,
    fill: str = _INK,
    *,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' "
        f"text-anchor='{anchor}'{weight}>{escape(content)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1) -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}' "
        f"stroke-width='{width:g}'/>"
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height:g}' "
        f"viewBox='0 0 {_WIDTH} {height:g}' font-family='Helvetica, Arial, sans-serif'>"
    )
    background = f"<rect width='{_WIDTH}' height='{height:g}' fill='white'/>"
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"
