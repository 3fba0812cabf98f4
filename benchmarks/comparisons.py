"""Comparisons of Headrace with the other contenders of a workload, as rows and as bars."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.charts import Bar
from benchmarks.formats import rate_text, ratio_text
from benchmarks.measure import Measurement
from benchmarks.results import Result
from benchmarks.titles import contender_title

__all__ = [
    "Comparison",
    "compare",
    "exceeds_limit",
    "fastest_alternatives",
    "measured_text",
    "median_text",
    "range_text",
    "to_each_alternative",
    "variant_label",
    "variant_of",
]

#: Ratio to an upper limit above which the figures of a workload must be wrong.
_ABOVE_LIMIT = 1.1

#: Alternatives that a chart shows for each variant of Headrace: the fastest ones.
_MOST_BARS = 3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One variant of Headrace and one other contender.

    Attributes:
        ours: Measurement of Headrace.
        theirs: Measurement of the other contender; None if there is none to compare with.
        ratios: Headrace's rate divided by the other, by round; empty if one of them did not run.
    """

    ours: Measurement
    theirs: Measurement | None
    ratios: list[float]

    @property
    def ratio(self) -> float | None:
        """Median of the ratios, or None without any."""
        return statistics.median(self.ratios) if self.ratios else None

    def bars(self, label: str, note: str = "") -> list[Bar]:
        """Return one bar of a chart; none without a ratio."""
        if self.ratio is None or self.theirs is None:
            return []
        return [
            Bar(
                label=label,
                note=note,
                ratio=self.ratio,
                low=min(self.ratios),
                high=max(self.ratios),
                text=ratio_text(self.ratio),
                is_limit=self.theirs.role == "limit",
            )
        ]


def compare(ours: Measurement, theirs: Measurement) -> Comparison:
    """Compare two contenders within each round."""
    ratios = []
    if ours.rate is not None and theirs.rate is not None:
        ratios = [own / other for own, other in zip(ours.rates, theirs.rates, strict=True)]
    return Comparison(ours=ours, theirs=theirs, ratios=ratios)


def fastest_alternatives(result: Result) -> list[Comparison]:
    """Compare each variant of Headrace with the peer of the highest median rate.

    Without a peer that ran, the limit with the lowest rate replaces it.
    """
    peers, limits = _alternatives(result)
    best = [*peers, *limits][:1]
    variants = [m for m in result.measurements if m.role == "headrace"]
    return [
        compare(ours, best[0]) if best else Comparison(ours=ours, theirs=None, ratios=[])
        for ours in variants
    ]


def to_each_alternative(result: Result) -> list[Comparison]:
    """Compare each variant of Headrace with the fastest peers; without a peer, with the limits."""
    peers, limits = _alternatives(result)
    return [
        compare(ours, theirs)
        for ours in result.measurements
        if ours.role == "headrace" and ours.rate is not None
        for theirs in (peers or limits)[:_MOST_BARS]
    ]


def _alternatives(result: Result) -> tuple[list[Measurement], list[Measurement]]:
    """Return the peers that ran, the fastest first, and the limits, the lowest first."""
    ran = sorted((m for m in result.measurements if m.rate is not None), key=lambda m: m.rate or 0)
    peers = [m for m in reversed(ran) if m.role == "peer"]
    return peers, [m for m in ran if m.role == "limit"]


def exceeds_limit(result: Result) -> bool:
    """Return whether Headrace is faster than an upper limit by more than noise."""
    _, limits = _alternatives(result)
    ours = [m for m in result.measurements if m.role == "headrace"]
    ratios = [compare(own, limit).ratio for own in ours for limit in limits]
    return any(ratio is not None and ratio > _ABOVE_LIMIT for ratio in ratios)


def median_text(comparison: Comparison) -> str:
    """Return the median ratio."""
    return "–" if comparison.ratio is None else ratio_text(comparison.ratio)


def range_text(comparison: Comparison) -> str:
    """Return the lowest and the highest ratio of a round."""
    if not comparison.ratios:
        return "–"
    return f"{ratio_text(min(comparison.ratios))} to {ratio_text(max(comparison.ratios))}"


def measured_text(measured: Measurement, result: Result) -> str:
    """Return the median rate, or the reason why there is none."""
    return measured.problem or rate_text(
        measured.rate, result.unit, item_bytes=result.item_bytes, self_timed=result.self_timed
    )


def variant_of(comparison: Comparison) -> str:
    """Return the variant of Headrace, such as "shared memory"; empty if it has no name."""
    name = contender_title(comparison.ours.contender.removeprefix("headrace").removeprefix(", "))
    return "TCP" if name == "tcp" else name


def variant_label(comparison: Comparison, result: Result) -> str:
    """Return the label of a bar; it names the variant of Headrace if there are several."""
    assert comparison.theirs is not None
    label = contender_title(comparison.theirs.contender)
    if comparison.theirs.role == "limit":
        label += " (upper limit)"
    if sum(m.role == "headrace" for m in result.measurements) > 1:
        return f"{variant_of(comparison) or 'Headrace'} vs. {label}"
    return label
