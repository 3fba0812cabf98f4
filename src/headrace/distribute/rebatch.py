"""Division of a batch's rows among replicas: arithmetic on numbers of rows.

    ceil       each batch separately: pieces of ceil(rows / replicas), the last smaller or empty
    balanced   across batches: pieces whose sizes alternate and differ by one at most

A *piece* is the range of rows that one replica gets in a step: from `start` to `stop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = [
    "Piece",
    "ceil_split",
    "ceil_steps",
    "piece_size",
    "rotated_batch_sizes",
]

Piece: TypeAlias = tuple[int, int]


def ceil_split(rows: int, replicas: int) -> list[Piece]:
    """Return each replica's piece of a batch.

    >>> ceil_split(10, 4)
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    >>> ceil_split(4, 3)
    [(0, 2), (2, 4), (4, 4)]
    """
    interval = -(-rows // replicas)
    starts = [min(interval * index, rows) for index in range(replicas)]
    return [(start, min(start + interval, rows)) for start in starts]


def ceil_steps(rows: int, replicas: int, num_local: int, rows_used: int = 0) -> list[list[Piece]]:
    """Return the steps of one worker for a batch that it reads alone.

    The batch is split for all replicas of all workers, and this worker's replicas use the pieces in
    turn. No step is without rows, except that of an empty batch.

    >>> ceil_steps(4, 4, 2)
    [[(0, 1), (1, 2)], [(2, 3), (3, 4)]]
    >>> ceil_steps(5, 4, 2)
    [[(0, 2), (2, 4)], [(4, 5), (5, 5)]]

    Args:
        rows: Number of rows of the batch.
        replicas: Number of replicas of all workers.
        num_local: Number of replicas of this worker.
        rows_used: Number of rows already used; pieces start after them.
    """
    interval = -(-rows // replicas)
    starts = range(rows_used, rows, interval or 1)
    pieces = [(start, min(start + interval, rows)) for start in starts]
    if not rows:
        pieces = [(0, 0)]
    pieces += [(rows, rows)] * (-len(pieces) % num_local)
    return [pieces[first : first + num_local] for first in range(0, len(pieces), num_local)]


def rotated_batch_sizes(global_batch_size: int, replicas: int, first_replica: int) -> list[int]:
    """Return the piece sizes of a global batch, starting with that of replica `first_replica`.

    The worker that has this replica first uses the sizes in turn: they sum to the global batch
    size, as do the pieces of all workers in one step. Sizes differ by one at most.

    >>> rotated_batch_sizes(7, 4, 2)
    [2, 1, 2, 2]
    """
    floor, larger = divmod(global_batch_size, replicas)
    sizes = [floor + 1] * larger + [floor] * (replicas - larger)
    return sizes[first_replica:] + sizes[:first_replica]


def piece_size(sizes: Sequence[int], number: int) -> int:
    """Return the size of a worker's n-th piece.

    Sizes alternate. If some are 0, each turn starts one later than the previous one, so that no
    replica is idle permanently.

    >>> [piece_size([1, 1, 0], number) for number in range(9)]
    [1, 1, 0, 1, 0, 1, 0, 1, 1]

    Args:
        sizes: Result of `rotated_batch_sizes`.
        number: Number of the piece, from 0.
    """
    turn, offset = divmod(number, len(sizes))
    return sizes[(offset + (turn if 0 in sizes else 0)) % len(sizes)]
