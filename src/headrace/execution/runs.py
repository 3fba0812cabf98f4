"""Sets of small numbers: as the bits of an integer, and as runs, which is how they are saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["mask_of", "runs_of"]


def mask_of(runs: Iterable[Sequence[int]]) -> int:
    """Return an integer with the bits of these runs, [first, one after the last] each."""
    mask = 0
    for start, stop in runs:
        mask |= (1 << stop) - (1 << start)
    return mask


def runs_of(mask: int) -> list[list[int]]:
    """Return the runs of bits that are set, in order."""
    runs = []
    at = 0
    while mask:
        low = (mask & -mask).bit_length() - 1
        mask >>= low
        size = (~mask & (mask + 1)).bit_length() - 1
        mask >>= size
        runs.append([at + low, at + low + size])
        at += low + size
    return runs
