"""Sums of many and of large arrays: in parts, of which several are under way at once.

While one part is added up, the next is on its way. Small arrays go together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.meeting.hall import SUM
from headrace.distribute.meeting.member import Member

__all__ = ["summed"]

_PART_BYTES = 8 << 20
_UNDER_WAY = 8


def summed(member: Member, arrays: Sequence[NDArray[Any]], what: str) -> list[NDArray[Any]]:
    """Return the workers' arrays, added up element by element.

    Args:
        member: This worker.
        arrays: As many as on all other workers, of the same shapes.
        what: What it is about, in words.

    Raises:
        InvalidArgumentError: The workers' shapes differ.
        FailedPreconditionError: They differ in arrays that are large.
    """
    if sum(array.nbytes for array in arrays) <= _PART_BYTES:
        words = f"{what} of {len(arrays)} arrays"
        return list(member.meet(words, SUM, arrays=arrays).arrays)
    made: list[NDArray[Any]] = []
    under_way: deque[int] = deque()
    # All workers cut alike: where they do not, the first words that differ say where.
    words = f"{what} of {sum(array.size for array in arrays)} values in {len(arrays)} arrays"
    for number, part in enumerate(_parts(arrays)):
        if len(under_way) == _UNDER_WAY:
            made += member.result(under_way.popleft()).arrays
        shapes = ", ".join(str(piece.shape) for piece in part)
        under_way.append(member.come(f"{words}, part {number} ({shapes})", SUM, arrays=part))
    for meeting in under_way:
        made += member.result(meeting).arrays
    return _joined(made, arrays)


def _parts(arrays: Sequence[NDArray[Any]]) -> Iterator[list[NDArray[Any]]]:
    """Yield flat pieces of arrays, of so many bytes together."""
    part: list[NDArray[Any]] = []
    room = _PART_BYTES
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        start = 0
        while True:
            piece = flat[start : start + max(1, room // flat.itemsize)]
            part.append(piece)
            start += len(piece)
            room -= piece.nbytes
            if room <= flat.itemsize:
                yield part
                part, room = [], _PART_BYTES
            if start >= len(flat):
                break
    if part:
        yield part


def _joined(pieces: Sequence[NDArray[Any]], like: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Undo `_parts`."""
    made: list[NDArray[Any]] = []
    rest = iter(pieces)
    for array in like:
        found = [next(rest)]
        while sum(len(piece) for piece in found) < array.size:
            found.append(next(rest))
        flat = found[0] if len(found) == 1 else np.concatenate(found)
        made.append(flat.reshape(array.shape))
    return made
