"""How the rows of a batch are shared by replicas: arithmetic on numbers of rows, and no more.

    ceil       each batch by itself: pieces of ceil(rows / replicas), the last ones smaller or empty
    balanced   batches one after another: pieces whose sizes take turns and differ by one at most

A *piece* is what one replica gets in one step: rows from `start` to `stop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = [
    "Piece",
    "ceil_split",
    "ceil_steps",
    "rotated_batch_sizes",
    "size_of_piece",
]

Piece: TypeAlias = tuple[int, int]


def ceil_split(rows: int, replicas: int) -> list[Piece]:
    """Return the piece of a batch that each replica gets.

    >>> ceil_split(10, 4)
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    >>> ceil_split(4, 3)
    [(0, 2), (2, 4), (4, 4)]
    """
    interval = -(-rows // replicas)
    starts = [min(interval * index, rows) for index in range(replicas)]
    return [(start, min(start + interval, rows)) for start in starts]


def ceil_steps(rows: int, replicas: int, here: int, done: int = 0) -> list[list[Piece]]:
    """Return the steps that one worker makes of a batch that it has for itself.

    The batch is cut for all replicas, and those of this worker use its pieces in turn. There is no
    step without rows, but for a batch that has none.

    >>> ceil_steps(4, 4, 2)
    [[(0, 1), (1, 2)], [(2, 3), (3, 4)]]
    >>> ceil_steps(5, 4, 2)
    [[(0, 2), (2, 4)], [(4, 5), (5, 5)]]

    Args:
        rows: Of the batch.
        replicas: Of all workers.
        here: Of this worker.
        done: Rows that were used already; pieces begin after them.
    """
    interval = -(-rows // replicas)
    starts = range(done, rows, interval or 1)
    pieces = [(start, min(start + interval, rows)) for start in starts]
    if not rows:
        pieces = [(0, 0)]
    pieces += [(rows, rows)] * (-len(pieces) % here)
    return [pieces[first : first + here] for first in range(0, len(pieces), here)]


def rotated_batch_sizes(global_batch_size: int, replicas: int, first: int) -> list[int]:
    """Return the sizes of the pieces of a global batch, from that of replica `first` on.

    A worker whose first replica it is uses them in turn: they sum to the global batch size, and so
    does what all workers use in one step. They differ by one at most.

    >>> rotated_batch_sizes(7, 4, 2)
    [2, 1, 2, 2]
    """
    floor, larger = divmod(global_batch_size, replicas)
    sizes = [floor + 1] * larger + [floor] * (replicas - larger)
    return sizes[first:] + sizes[:first]


def size_of_piece(sizes: Sequence[int], number: int) -> int:
    """Return the size of a worker's n-th piece.

    The sizes take turns. Where some are 0, each turn begins one later than the one before, so that
    no replica is idle for good.

    >>> [size_of_piece([1, 1, 0], number) for number in range(9)]
    [1, 1, 0, 1, 0, 1, 0, 1, 1]

    Args:
        sizes: What `rotated_batch_sizes` returned.
        number: Counted from 0.
    """
    turn, place = divmod(number, len(sizes))
    return sizes[(place + (turn if 0 in sizes else 0)) % len(sizes)]
