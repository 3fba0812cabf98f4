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
        name = f"{description} of {len(arrays)} arrays"
        return list(client.run(name, SUM, arrays=arrays).arrays)
    sums: list[NDArray[Any]] = []
    in_flight: deque[int] = deque()
    # All workers chunk alike; if their arrays differ, the first differing description says where.
    name = f"{description} of {sum(array.size for array in arrays)} values in {len(arrays)} arrays"
    for number, chunk in enumerate(_split_chunks(arrays)):
        if len(in_flight) == _MAX_IN_FLIGHT:
            sums += client.wait(in_flight.popleft()).arrays
        shapes = ", ".join(str(piece.shape) for piece in chunk)
        in_flight.append(client.start(f"{name}, part {number} ({shapes})", SUM, arrays=chunk))
    for pending in in_flight:
        sums += client.wait(pending).arrays
    return _join_chunks(sums, arrays)


def _split_chunks(arrays: Sequence[NDArray[Any]]) -> Iterator[list[NDArray[Any]]]:
    """Yield flat pieces of arrays, up to the chunk size in bytes together."""
    chunk: list[NDArray[Any]] = []
    remaining_bytes = _CHUNK_BYTES
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        start = 0
        while True:
            piece = flat[start : start + max(1, remaining_bytes // flat.itemsize)]
            chunk.append(piece)
            start += len(piece)
            remaining_bytes -= piece.nbytes
            if remaining_bytes <= flat.itemsize:
                yield chunk
                chunk, remaining_bytes = [], _CHUNK_BYTES
            if start >= len(flat):
                break
    if chunk:
        yield chunk


def _join_chunks(
    chunks: Sequence[NDArray[Any]], originals: Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Reverse `_split_chunks`."""
    arrays: list[NDArray[Any]] = []
    rest = iter(chunks)
    for array in originals:
        pieces = [next(rest)]
        while sum(len(piece) for piece in pieces) < array.size:
            pieces.append(next(rest))
        flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        arrays.append(flat.reshape(array.shape))
    return arrays
