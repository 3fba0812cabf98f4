"""Partitioning of variables into shards along the first axis, and placement on servers.

partitioner(shape, dtype) -> [shards, 1, 1]      shards along each axis
split_rows(13, 5)         -> rows 0-2, 3-5, 6-8, 9-10, 11-12
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
]


def __dir__() -> list[str]:
    return list(__all__)


class Partitioner:
    """Determines the number of parts of a variable along each axis.

    A function of a shape and a dtype can be used instead.

    >>> class OneRowPerShard(hr.distribute.partitioners.Partitioner):
    ...     def parts(self, rows, row_bytes):
    ...         return rows
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts along each axis: 1 for all but `axis`.

        Args:
            shape: Shape of the variable.
            dtype: Dtype of the variable.
            axis: Axis to partition.

        Raises:
            ValueError: If the shape is not fully defined, or has no such axis.
        """
        sizes = _check_shape(shape)
        check_int("axis", axis, minimum=0)
        if axis >= len(sizes):
            raise ValueError(
                f"`axis` must be less than the number of axes of shape {sizes}, {len(sizes)}, but "
                f"got {axis}"
            )
        parts = [1] * len(sizes)
        size = sizes[axis]
        if size > 0:
            row = math.prod(sizes[:axis]) * math.prod(sizes[axis + 1 :]) * as_dtype(dtype).itemsize
            parts[axis] = max(1, min(size, self.parts(size, row)))
        return parts

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the number of parts for `rows` rows of `row_bytes` bytes each."""
        raise NotImplementedError(f"{type(self).__name__} must implement `parts`")


class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, or one for each row if there are fewer rows.

    >>> import headrace as hr
    >>> hr.distribute.partitioners.FixedShardsPartitioner(2)([10, 3], "float32")
    [2, 1]

    Args:
        num_shards: Number of shards; at least 1.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = check_int("num_shards", num_shards, minimum=1)

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the fixed number."""
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """The largest number of shards such that none is below a minimum size.

    >>> partitioner = hr.distribute.partitioners.MinSizePartitioner(1024, max_shards=8)
    >>> partitioner([1000, 2], "float32")
    [7, 1]

    Args:
        min_shard_bytes: Minimum size of a shard, unless the variable is smaller.
        max_shards: Largest number of shards. The default is one; set it to the number of servers to
            use.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the number of shards that have enough rows each."""
        min_rows = math.ceil(self._min_shard_bytes / row_bytes) if row_bytes else rows
        return min(self._max_shards, rows // min_rows)


class MaxSizePartitioner(Partitioner):
    """The smallest number of shards such that none exceeds a maximum size; rows are never split.

    >>> hr.distribute.partitioners.MaxSizePartitioner(4096)([1000, 4], "float32")
    [4, 1]

    Args:
        max_shard_bytes: Maximum size of a shard, unless a row is larger or `max_shards` limits the
            number.
        max_shards: Largest number of shards; None means unlimited.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def parts(self, rows: int, row_bytes: int) -> int:
        """Return the number of shards that are small enough."""
        max_rows = max(1, self._max_shard_bytes // row_bytes) if row_bytes else rows
        parts = math.ceil(rows / max_rows)
        return parts if self._max_shards is None else min(parts, self._max_shards)


def count_shards(partitions: object, shape: Sequence[int]) -> int:
    """Return the number of shards in a partitioner's result, at most one for each row.

    >>> hr.distribute.partitioners.count_shards([4, 1], (10, 3))
    4

    Raises:
        ValueError: If it is not a list with a number for each axis, 1 for all but the first.
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
    >>> hr.distribute.partitioners.split_rows(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    base, extra = divmod(rows, shards)
    starts = [index * base + min(index, extra) for index in range(shards + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if not all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0
        for size in sizes
    ):
        raise ValueError(f"shape is not fully defined: {sizes}")
    return tuple(map(int, sizes))


def _positive(name: str, value: int) -> int:
    """Return a number of 1 or more; the error message is that of TensorFlow."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value < 1:
        raise ValueError(f"Argument `{name}` must be positive. Received: {value}")
    return check_int(name, value, minimum=1)


# --- placement of shards: arithmetic that gives the same result in each process -------------------


class RoundRobinPlacement:
    """Places the k-th shard on server k modulo the number of servers."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._placed = 0

    def place(self, shard_bytes: int) -> int:
        """Return the next server in turn."""
        server = self._placed % self._servers
        self._placed += 1
        return server


class LeastBytesPlacement:
    """Places a shard on the server with the fewest bytes.

    So no server exceeds the mean plus the largest shard, and none exceeds 1.05 times the mean if no
    shard exceeds 5 % of it. Ties go to the server with the fewest shards, then to the first, so
    shards without bytes are placed in turn.
    """

    def __init__(self, servers: int) -> None:
        self._bytes = [0] * servers
        self._shards = [0] * servers

    def place(self, shard_bytes: int) -> int:
        """Return the server with the fewest bytes."""
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
    """Return a placement for a number of servers, by name.

    >>> hr.distribute.partitioners.make_placement("in turn", 2)
    Traceback (most recent call last):
    ValueError: ...'in turn'...

    Raises:
        ValueError: If there is no placement of this name.
    """
    if kind not in _PLACEMENTS:
        raise ValueError(f"`placement` must be one of {', '.join(_PLACEMENTS)}, but got {kind!r}")
    return _PLACEMENTS[kind](servers)
