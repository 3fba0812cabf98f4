"""Quantities as people read them: 1,234/s, 45.6 MB, 2 h 13 min."""

from __future__ import annotations

__all__ = ["bytes_of", "duration", "number", "plural", "printable", "rate", "trend"]

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
