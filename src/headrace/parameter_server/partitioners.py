"""Into how many shards a variable is cut, and where: along its first axis, "div".

partitioner(shape, dtype) -> [shards, 1, 1]      shards along each axis
ranges_of_rows(13, 5)     -> rows 0-2, 3-5, 6-8, 9-10, 11-12
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.arguments import check_int
from headrace.parameter_server.specs import as_dtype

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "count_shards",
    "make_placement",
    "split_rows",
]


def __dir__() -> list[str]:
    return list(__all__)


class Partitioner:
    """Says into how many parts a variable is cut along each axis.

    Any function of a shape and a dtype may stand in its place.

    >>> class OneRowPerShard(hr.distribute.partitioners.Partitioner):
    ...     def parts(self, rows, row_bytes):
    ...         return rows
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts along each axis: 1 for all but `axis`.

        Args:
            shape: Of the variable.
            dtype: Of the variable.
            axis: The one to cut.

        Raises:
            ValueError: The shape is not fully defined, or has no such axis.
        """
        sizes = _checked_shape(shape)
        check_int("axis", axis, minimum=0)
        if axis >= len(sizes):
            raise ValueError(f"`axis` must be one of the {len(sizes)} of {sizes}, but got {axis}")
        parts = [1] * len(sizes)
        size = sizes[axis]
        if size > 0:
            row = math.prod(sizes[:axis]) * math.prod(sizes[axis + 1 :]) * as_dtype(dtype).itemsize
            parts[axis] = max(1, min(size, self.parts(size, row)))
        return parts

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return how many parts so many rows of so many bytes should make."""
        raise NotImplementedError(
            f"{type(self).__name__} must say in `parts` how many parts rows make"
        )


class FixedShardsPartitioner(Partitioner):
    """So many shards, or as many as there are rows.

    >>> import headrace as hr
    >>> hr.distribute.partitioners.FixedShardsPartitioner(2)([10, 3], "float32")
    [2, 1]

    Args:
        num_shards: At least 1.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = check_int("num_shards", num_shards, minimum=1)

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the number that was asked for."""
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """As many shards as can be with no shard below a size.

    >>> partitioner = hr.distribute.partitioners.MinSizePartitioner(1024, max_shards=8)
    >>> partitioner([1000, 2], "float32")
    [7, 1]

    Args:
        min_shard_bytes: No shard is smaller, unless the variable is.
        max_shards: At most so many. By default there is one: say how many servers may share.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the number of shards that have enough rows each."""
        enough = math.ceil(self._min_shard_bytes / row_bytes) if row_bytes else rows
        return min(self._max_shards, rows // enough)


class MaxSizePartitioner(Partitioner):
    """As few shards as can be with no shard above a size; one row is never cut.

    >>> hr.distribute.partitioners.MaxSizePartitioner(4096)([1000, 4], "float32")
    [4, 1]

    Args:
        max_shard_bytes: No shard is larger, unless a row is or `max_shards` says so.
        max_shards: At most so many; None: no bound.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the number of shards that few enough rows make."""
        most = max(1, self._max_shard_bytes // row_bytes) if row_bytes else rows
        parts = math.ceil(rows / most)
        return parts if self._max_shards is None else min(parts, self._max_shards)


def count_shards(partitions: object, shape: Sequence[int]) -> int:
    """Return how many shards a partitioner's answer means, at most one a row.

    >>> hr.distribute.partitioners.count_shards([4, 1], (10, 3))
    4

    Raises:
        ValueError: It is no list of a number for each axis, 1 for all but the first.
    """
    valid = (
        isinstance(partitions, list | tuple)
        and len(partitions) == len(shape) > 0
        and all(
            isinstance(part, int | np.integer) and not isinstance(part, bool) for part in partitions
        )
        and partitions[0] >= 1
        and all(part == 1 for part in partitions[1:])
    )
    if not valid:
        raise ValueError(
            "variable_partitioner must return a list/tuple whose elements are 1 besides the first "
            f"element (non-zero), got: {partitions!r} for a variable of shape {tuple(shape)}"
        )
    assert isinstance(partitions, list | tuple)
    return max(1, min(int(partitions[0]), shape[0]))


def split_rows(rows: int, shards: int) -> list[range]:
    """Return the rows of each shard: in order, and the first ones have one more.

    >>> import headrace as hr
    >>> hr.distribute.partitioners.ranges_of_rows(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    base, extra = divmod(rows, shards)
    starts = [index * base + min(index, extra) for index in range(shards + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if not all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0
        for size in sizes
    ):
        raise ValueError(f"shape is not fully defined: {sizes}")
    return tuple(map(int, sizes))


def _positive(name: str, value: int) -> int:
    """Return a number of 1 or more; the message is the one that others know."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value < 1:
        raise ValueError(f"Argument `{name}` must be positive. Received: {value}")
    return check_int(name, value, minimum=1)


# --- on which server the next shard goes: arithmetic that each process repeats alike --------------


class RoundRobinPlacement:
    """The k-th shard goes to server k modulo their number."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._placed = 0

    def place(self, shard_bytes: int) -> int:
        """Return the next server in turn."""
        server = self._placed % self._servers
        self._placed += 1
        return server


class LeastBytesPlacement:
    """A shard goes to the server that has the fewest bytes.

    So no server has more than the mean and the largest shard, and none more than 1.05 times the
    mean when no shard exceeds 5 % of it. Among equals the one with the fewest shards is chosen,
    then the first: shards without bytes go round.
    """

    def __init__(self, servers: int) -> None:
        self._bytes = [0] * servers
        self._shards = [0] * servers

    def place(self, shard_bytes: int) -> int:
        """Return the server that has the least."""
        server = min(
            range(len(self._bytes)),
            key=lambda index: (self._bytes[index], self._shards[index], index),
        )
        self._bytes[server] += shard_bytes
        self._shards[server] += 1
        return server


_PLACEMENTS: dict[str, type[RoundRobinPlacement] | type[LeastBytesPlacement]] = {
    "round_robin": RoundRobinPlacement,
    "bytes": LeastBytesPlacement,
}


def make_placement(kind: str, servers: int) -> RoundRobinPlacement | LeastBytesPlacement:
    """Return what deals shards to so many servers, one after another.

    >>> hr.distribute.partitioners.placement("in turn", 2)
    Traceback (most recent call last):
    ValueError: ...'in turn'...

    Raises:
        ValueError: There is no placement of this name.
    """
    if kind not in _PLACEMENTS:
        raise ValueError(
            f"`make_placement` must be one of {', '.join(_PLACEMENTS)}, but got {kind!r}"
        )
    return _PLACEMENTS[kind](servers)
