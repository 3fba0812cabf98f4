"""Sums of many or large arrays over all workers, in chunks that are pipelined.

While one chunk is summed, the next is sent. Small arrays share a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.state import SUM

__all__ = ["sum_arrays"]

_CHUNK_BYTES = 8 << 20
_MAX_IN_FLIGHT = 8


def sum_arrays(
    client: CollectiveClient, arrays: Sequence[NDArray[Any]], description: str
) -> list[NDArray[Any]]:
    """Return the elementwise sums of the workers' arrays.

    Args:
        client: Client of this worker.
        arrays: Arrays; the same number and shapes on all workers.
        description: Description of the operation.

    Raises:
        InvalidArgumentError: If the workers' shapes differ.
        FailedPreconditionError: If large arrays differ.
    """
    if sum(array.nbytes for array in arrays) <= _CHUNK_BYTES:
        words = f"{description} of {len(arrays)} arrays"
        return list(client.run(words, SUM, arrays=arrays).arrays)
    made: list[NDArray[Any]] = []
    under_way: deque[int] = deque()
    # All workers chunk alike; if their arrays differ, the first differing description says where.
    words = f"{description} of {sum(array.size for array in arrays)} values in {len(arrays)} arrays"
    for number, part in enumerate(_split_chunks(arrays)):
        if len(under_way) == _MAX_IN_FLIGHT:
            made += client.wait(under_way.popleft()).arrays
        shapes = ", ".join(str(piece.shape) for piece in part)
        under_way.append(client.start(f"{words}, part {number} ({shapes})", SUM, arrays=part))
    for meeting in under_way:
        made += client.wait(meeting).arrays
    return _join_chunks(made, arrays)


def _split_chunks(arrays: Sequence[NDArray[Any]]) -> Iterator[list[NDArray[Any]]]:
    """Yield flat pieces of arrays, up to the chunk size in bytes together."""
    part: list[NDArray[Any]] = []
    room = _CHUNK_BYTES
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
                part, room = [], _CHUNK_BYTES
            if start >= len(flat):
                break
    if part:
        yield part


def _join_chunks(
    chunks: Sequence[NDArray[Any]], like: Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Reverse `_split_chunks`."""
    made: list[NDArray[Any]] = []
    rest = iter(chunks)
    for array in like:
        found = [next(rest)]
        while sum(len(piece) for piece in found) < array.size:
            found.append(next(rest))
        flat = found[0] if len(found) == 1 else np.concatenate(found)
        made.append(flat.reshape(array.shape))
    return made
