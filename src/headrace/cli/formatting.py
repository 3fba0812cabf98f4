"""Human-readable numbers, bytes and times, and the lines and columns of a frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from headrace.versions import Versions, python_mismatch, release_mismatch

__all__ = [
    "density_bar",
    "escape_controls",
    "fit_lines",
    "format_bytes",
    "format_duration",
    "format_number",
    "format_rate",
    "format_table",
    "format_trend",
    "pluralize",
    "truncate_line",
    "version_mismatches",
]


_TREND_FACTOR = 1.1
"""Smallest ratio of a rate to the previous one that is marked as rising or falling."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_number(value: float) -> str:
    """Format a number with only the significant decimals."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def format_bytes(value: float) -> str:
    """Format a number of bytes."""
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def format_rate(value: float) -> str:
    """Format a number per second."""
    return f"{format_number(value)}/s"


def format_trend(now: float, before: float | None) -> str:
    """Return a mark for a rising or falling rate; empty if it is neither, or unknown."""
    if before is None or now == before:
        return ""
    if now > before * _TREND_FACTOR:
        return " rising"
    return " falling" if now * _TREND_FACTOR < before else ""


def format_duration(seconds: float) -> str:
    """Format a time in its two most significant units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def pluralize(count: int, noun: str, nouns: str = "") -> str:
    """Format a count with its noun; `nouns` is the plural if it is irregular."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or f'{noun}s'}"


def escape_controls(text: str) -> str:
    """Remove characters from foreign text that would move the cursor or hide a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_DENSITY_LEVELS = " .:-=+*#"
"""ASCII characters by density; the first stands for 0."""


def density_bar(values: Sequence[float]) -> str:
    """Return a character for each number, in brackets; the largest is the densest.

    Args:
        values: Numbers of at least 0.
    """
    most = max(values, default=0.0)
    if most <= 0:
        return f"[{_DENSITY_LEVELS[0] * len(values)}]"
    steps = len(_DENSITY_LEVELS) - 1
    # Rounded up, so that only 0 is shown as nothing; divided first, so that the largest gives 1.
    return f"[{''.join(_DENSITY_LEVELS[math.ceil(value / most * steps)] for value in values)}]"


_MAX_LISTED = 3


class _VersionedWorker(Protocol):
    """Object with an address and versions."""

    @property
    def address(self) -> str:
        """Address at which it listens."""

    @property
    def versions(self) -> Versions:
        """Versions of its process."""


def version_mismatches(mine: Versions, workers: Sequence[_VersionedWorker]) -> Iterator[str]:
    """Yield a line that names workers with other versions than their server."""
    others = [
        each
        for each in workers
        if python_mismatch(mine.python, each.versions.python)
        or release_mismatch(mine, each.versions)
    ]
    if others:
        named = ", ".join(f"{each.address} has {each.versions}" for each in others[:_MAX_LISTED])
        more = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
        yield f"versions differ: this server has {mine}; {named}{more}"


def format_table(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield lines for rows of cells, the first of which is the header.

    Args:
        rows: Rows of equal length.
        left: Number of first columns that are left-aligned.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(wide) if column < left else cell.rjust(wide)
            for column, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def fit_lines(lines: Iterable[str], width: int) -> str:
    """Join lines of at most `width` characters, without characters that move the cursor."""
    return "\n".join(truncate_line(escape_controls(line), width) for line in lines) + "\n"


def truncate_line(line: str, width: int) -> str:
    """Return a line, shortened with dots to fit `width`."""
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."
