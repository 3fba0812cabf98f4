"""Tests of the charts: positions of bars, ticks, and labels that fit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import benchmarks
from benchmarks.charts import Bar, Curve, Group, curve_chart, ratio_chart

SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = sorted((Path(benchmarks.__file__).parent / "charts").glob("*.svg"))


def _bar(ratio: float, **changes: bool) -> Bar:
    return Bar(
        label="peer", ratio=ratio, low=ratio / 2, high=ratio * 2, text=f"{ratio}x", **changes
    )


def _rectangles(chart: str) -> list[tuple[float, float, str | None]]:
    """Return the left and right edges and the color of each bar."""
    _, *bars = ElementTree.fromstring(chart).iter(f"{SVG}rect")
    lefts = [float(bar.attrib["x"]) for bar in bars]
    return [
        (left, left + float(bar.attrib["width"]), bar.get("fill"))
        for left, bar in zip(lefts, bars, strict=True)
    ]


def test_bars_start_at_one_and_show_the_faster_by_side_and_color() -> None:
    bars = [_bar(4.0), _bar(0.25), _bar(0.5, is_limit=True)]
    faster, slower, limit = _rectangles(ratio_chart([Group(heading="", bars=bars)], ""))
    assert faster[0] == pytest.approx(slower[1], abs=0.2)
    assert faster[1] - faster[0] == pytest.approx(slower[1] - slower[0], abs=0.2)
    assert limit[1] - limit[0] == pytest.approx((slower[1] - slower[0]) / 2, abs=0.2)
    assert len({faster[2], slower[2], limit[2]}) == 3


def test_a_single_bar_is_drawn() -> None:
    assert len(_rectangles(ratio_chart([Group(heading="a & b", bars=[_bar(3.0)])], ""))) == 1


@pytest.mark.parametrize("ratio", [1.0, 0.0123, 3.0, 150.0, 2.5e6])
def test_the_axis_has_a_tick_at_one_and_room_between_ticks(ratio: float) -> None:
    root = ElementTree.fromstring(ratio_chart([Group(heading="", bars=[_bar(ratio)])], ""))
    ticks = {t.text: float(t.attrib["x"]) for t in root.iter(f"{SVG}text") if t.get("y") == "24.0"}
    assert "1x" in ticks
    edges = sorted(ticks.values())
    assert all(after - before >= 35 for before, after in pairwise(edges))


def test_a_curve_has_a_point_per_count_and_higher_values_are_higher() -> None:
    curve = Curve(title="t", unit="u", values={1: [2.0, 3.0, 7.0], 10: [1.0], 100: [6.0]})
    root = ElementTree.fromstring(curve_chart([curve], ""))
    first, second, third = (float(each.attrib["cy"]) for each in root.iter(f"{SVG}circle"))
    assert third < first < second
    assert first - third == pytest.approx((second - third) * 3 / 5, abs=0.2)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_labels_fit_into_committed_charts(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    for label in root.iter(f"{SVG}text"):
        content, x = label.text or "", float(label.attrib["x"])
        width = len(content) * float(label.attrib["font-size"]) * 0.5
        before = {"start": 0.0, "middle": 0.5, "end": 1.0}[label.attrib["text-anchor"]] * width
        assert x - before >= 0, content
        assert x - before + width <= float(root.attrib["width"]), content
