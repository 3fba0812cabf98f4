"""A row of numbers as a row of letters, the higher the darker."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["letters"]

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
