"""Numbers, bytes and times as people read them, and the lines and columns of a frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from headrace.versions import Versions, python_mismatch, release_mismatch

__all__ = [
    "bytes_of",
    "cut",
    "duration",
    "fitted",
    "letters",
    "number",
    "other_versions",
    "plural",
    "printable",
    "rate",
    "table",
    "trend",
]


_CHANGE = 1.1
"""By how much a rate differs from the one before that is marked as rising or falling."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float) -> str:
    """Write a number with as many places as matter."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def bytes_of(value: float) -> str:
    """Write a number of bytes."""
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def rate(value: float) -> str:
    """Write how many there are per second."""
    return f"{number(value)}/s"


def trend(now: float, before: float | None) -> str:
    """Write whether a rate rises or falls; empty: neither, as far as is known."""
    if before is None or now == before:
        return ""
    if now > before * _CHANGE:
        return " rising"
    return " falling" if now * _CHANGE < before else ""


def duration(seconds: float) -> str:
    """Write a time, in the two units that matter."""
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


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Write how many of something there are; `nouns` where an s does not do."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or f'{noun}s'}"


def printable(text: str) -> str:
    """Return a text that others chose without what would move the cursor or hide a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_LEVELS = " .:-=+*#"
"""Of any terminal's letters; nothing at all is the first."""


def letters(values: Sequence[float]) -> str:
    """Return a letter for each number, in brackets; the largest is the darkest.

    Args:
        values: Numbers of at least 0.
    """
    most = max(values, default=0.0)
    if most <= 0:
        return f"[{_LEVELS[0] * len(values)}]"
    steps = len(_LEVELS) - 1
    # Rounded up: what is little is not nothing.
    return f"[{''.join(_LEVELS[-int(-value * steps // most)] for value in values)}]"


_MOST_NAMED = 3


class _Worker(Protocol):
    """Whoever has an address and versions."""

    @property
    def address(self) -> str:
        """Where it listens."""

    @property
    def versions(self) -> Versions:
        """Of its process."""


def other_versions(mine: Versions, workers: Sequence[_Worker]) -> Iterator[str]:
    """Yield a line that names workers with other versions than the server they belong to."""
    others = [
        each
        for each in workers
        if python_mismatch(mine.python, each.versions.python)
        or release_mismatch(mine, each.versions)
    ]
    if others:
        named = ", ".join(f"{each.address} has {each.versions}" for each in others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        yield f"versions differ: this server has {mine}; {named}{more}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield lines for rows of cells, the first of which is the head.

    Args:
        rows: All of one length.
        left: So many of the first columns begin at their left.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(wide) if column < left else cell.rjust(wide)
            for column, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def fitted(lines: Iterable[str], width: int) -> str:
    """Return lines as a text, none longer than `width`, without what would move the cursor."""
    return "\n".join(cut(printable(line), width) for line in lines) + "\n"


def cut(line: str, width: int) -> str:
    """Return a line, or as much of it as fits, with dots."""
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."
