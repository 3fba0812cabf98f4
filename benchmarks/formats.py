"""Numbers with units, as tables show them."""

from __future__ import annotations

from benchmarks.workload import Workload

__all__ = [
    "cost",
    "duration",
    "lower_is_better",
    "number",
    "rate_text",
    "ratio_text",
    "workload_rate",
]

_SINGULAR = {"batches": "batch"}

#: Items per second of a machine that is always busy, by units of utilisation.
_ALWAYS_BUSY = {"busy ms": 1e3, "µs of work of two workers": 2e6}


def rate_text(
    rate: float | None, unit: str, *, item_bytes: int | None = None, self_timed: bool = False
) -> str:
    """Format a rate; or, if `self_timed`, the seconds per item or the utilisation."""
    if rate is None:
        return "–"
    if unit in _ALWAYS_BUSY:
        return f"{rate / _ALWAYS_BUSY[unit]:.1%} busy".replace("%", " %")
    if self_timed:
        return f"{cost(1 / rate)} per {_SINGULAR.get(unit, unit.removesuffix('s'))}"
    if item_bytes is not None:
        return f"{rate * item_bytes / 1e9:.2f} GB/s"
    return f"{number(rate)} {unit}/s"


def lower_is_better(unit: str, *, self_timed: bool) -> bool:
    """Return whether `rate_text` shows a cost instead of a rate or a utilisation."""
    return self_timed and unit not in _ALWAYS_BUSY


def workload_rate(rate: float | None, workload: Workload) -> str:
    """Format a rate of a workload."""
    return rate_text(
        rate, workload.unit, item_bytes=workload.item_bytes, self_timed=workload.self_timed
    )


def number(value: float) -> str:
    """Format a number with three or four digits, such as "1,784" or "31.7 k"."""
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    if value >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:,.4g}"


def ratio_text(value: float) -> str:
    """Format a ratio, such as "1.63x"."""
    if value >= 20:
        return f"{value:,.0f}x"
    return f"{value:.3g}x" if value > 0.1 else f"{value:.2g}x"


def duration(seconds: float) -> str:
    """Format seconds of waiting."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def cost(seconds: float) -> str:
    """Format seconds per item, which may be far less than a microsecond."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
