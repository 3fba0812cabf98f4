"""Preparation of gradients before they are sent: checks for non-finite values, and clipping.

Both need the whole gradient of all variables, so the client does them. Duplicate rows of a sparse
gradient have already been summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.bag_combiner import are_large_integers, combine_bags
from headrace.errors import InvalidArgumentError
from headrace.parameter_server.rules import put_rows
from headrace.parameter_server.specs import adding_dtype, working_dtype

__all__ = [
    "IdBatch",
    "NonFinite",
    "assign_shards",
    "check_ids",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "is_finite",
    "refuse_non_finite",
    "split_by_hash",
    "split_by_rows",
    "sum_rows",
    "sum_shared_rows",
    "unique_ids",
]


NonFinite = Literal["raise", "skip", "apply"]
"""What to do when a gradient contains a NaN or an infinity."""


def is_finite(values: NDArray[Any]) -> bool:
    """Return whether the values contain neither NaN nor infinity."""
    # One pass without a mask; only after an overflow is each element checked.
    return math.isfinite(_sum_of_squares(values)) or bool(np.isfinite(values).all())


def refuse_non_finite(names: Sequence[str], gradients: Sequence[NDArray[Any]]) -> None:
    """Raise unless all gradients are finite.

    Raises:
        InvalidArgumentError: If a gradient is not finite; the message names the variable and the
            index.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if not is_finite(gradient):
            positions = np.argwhere(~np.isfinite(gradient))
            index = ", ".join(map(str, positions[0]))
            raise InvalidArgumentError(
                f"the gradient of {name} has {len(positions)} of {gradient.size} elements that are "
                f"not finite, the first at [{index}]: {gradient[tuple(positions[0])]}; nothing was "
                'applied. Use non_finite="skip" to skip such steps'
            )


def global_norm(gradients: Sequence[NDArray[Any]]) -> float:
    """Return the Euclidean norm of all gradients together."""
    return math.sqrt(sum(map(_sum_of_squares, gradients)))


def clip_by_norm(gradients: Sequence[NDArray[Any]], max_norm: float) -> list[NDArray[Any]]:
    """Return gradients scaled so that their joint norm is at most `max_norm`.

    A non-finite norm makes them NaN.
    """
    found = global_norm(gradients)
    if found <= max_norm:
        return list(gradients)
    scale = max_norm / found if math.isfinite(found) else math.nan
    return [gradient * gradient.dtype.type(scale) for gradient in gradients]


def clip_by_value(gradients: Sequence[NDArray[Any]], max_value: float) -> list[NDArray[Any]]:
    """Return gradients with each element clipped to [-max_value, max_value]."""
    return [
        # `clip` widens dtypes of other packages.
        np.clip(gradient, -max_value, max_value).astype(gradient.dtype, copy=False)
        for gradient in gradients
    ]


def _sum_of_squares(values: NDArray[Any]) -> float:
    flat = np.ascontiguousarray(values, working_dtype(values.dtype)).reshape(-1)
    # In pieces: float32 sums over the whole array would lose precision.
    pieces = [flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE)]
    with np.errstate(all="ignore"):
        total = sum(float(np.dot(piece, piece)) for piece in pieces)
        if math.isfinite(total) or flat.dtype != np.float32:
            return total
        # Squares of values above 1e19 overflow float32.
        wide = (piece.astype(np.float64) for piece in pieces)
        return sum(float(np.dot(piece, piece)) for piece in wide)


_PIECE = 65_536


# --- ids of a batch: deduplication, requests to shards, and expansion of the replies --------------

#     unique, inverse = unique_ids(ids)                  ids to request, and where the rows go
#     batch = IdBatch(ids); batch.expand(parts, ...)     the same, for replies in several parts
#     batch.pool(parts, ..., combiner)                   one row for each bag of ids
#     unique, sums = sum_rows(ids, gradients)            gradients to push
#     unique, values, which = sum_shared_rows(...)       the same, if ids share values
#     split_by_rows(unique, ranges)                      shards of a variable: slices
#     split_by_hash(unique, shards)                      shards of a table: positions
#
# Shards of a variable have consecutive rows, so the concatenated replies of its shards are in the
# order of `unique`.

Ids = NDArray[np.int64]


def unique_ids(ids: Ids) -> tuple[Ids, Ids]:
    """Return the distinct ids, sorted, and the index of each of `ids` among them.

    Args:
        ids: Any shape; the second result has the same shape.
    """
    found = _sort_ids_cached(ids.reshape(-1))
    return found.unique(), found.inverse().reshape(ids.shape)


class IdBatch:
    """Distinct ids of a batch, with the mapping back to all of its ids.

    Args:
        ids: Any shape.

    Attributes:
        unique: The distinct ids, sorted.
    """

    def __init__(self, ids: Ids) -> None:
        self._shape = ids.shape
        flat = ids.reshape(-1)
        self._ids = _sort_ids_cached(flat)
        self.unique = self._ids.unique()
        #: Whether the ids were sorted and distinct already.
        self._is_unique = ids.ndim == 1 and np.array_equal(self.unique, flat)

    def pool(
        self,
        parts: Sequence[NDArray[Any]],
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        combiner: str,
    ) -> NDArray[Any]:
        """Return a row for each bag of ids along their last axis (`distribute.bag_combiner`).

        Args:
            parts: Values of `unique`, in order, in one or several parts.
            row_shape: Shape of a value.
            dtype: Dtype of the values.
            combiner: How the rows of a bag are combined.
        """
        rows = (
            parts[0]
            if len(parts) == 1
            else np.concatenate([np.empty((0, *row_shape), dtype), *parts])
        )
        bags = self._ids.inverse().reshape(self._shape)
        return combine_bags(rows, bags, combiner, adding_dtype(dtype))

    def expand(
        self, parts: Sequence[NDArray[Any]], row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Return a value for each id.

        Args:
            parts: Values of `unique`, in order, in one or several parts.
            row_shape: Shape of a value.
            dtype: Dtype of the values.
        """
        if self._is_unique and len(parts) == 1:
            return parts[0]
        order, first, first_positions = self._ids.order, self._ids.first, self._ids.sorted_positions
        found = np.empty((len(order), *row_shape), dtype)
        if found.size:
            rows = found.reshape(len(order), -1)
            start = 0
            for part in parts:  # each row goes to the first position of its id
                put_rows(
                    rows,
                    first_positions[start : start + len(part)],
                    part.reshape(-1, rows.shape[1]),
                )
                start += len(part)
            if len(first) < len(order):
                (repeats,) = (~self._ids.is_first).nonzero()
                source = first_positions[first.searchsorted(repeats) - 1]
                put_rows(rows, order[repeats], rows.take(source, axis=0))
        return found.reshape((*self._shape, *row_shape))


def sum_rows(ids: Ids, values: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
    """Return the distinct ids, sorted, and the sum of the rows of each.

    Args:
        ids: 1-D.
        values: A row for each id. Dtypes of less than 32 bits are summed, and returned, as float32.
    """
    values = _summable(values)
    known = _sort_ids_cached(ids)
    repeated, sums = _sums(known, values)
    found = values.take(known.sorted_positions, axis=0)
    if len(repeated):
        found[repeated] = sums
    return known.unique(), found


def sum_shared_rows(
    ids: Ids, values: NDArray[Any], value_indices: NDArray[np.intp]
) -> tuple[Ids, NDArray[Any], NDArray[np.intp]]:
    """Return the distinct ids, sorted, rows, and for each id the index of its sum among the rows.

    Rows of ids that occur once are not copied.

    Args:
        ids: 1-D.
        values: Rows; as for `sum_rows`.
        value_indices: Index of the row of each id.
    """
    values = _summable(values)
    known = _sort_ids_cached(ids)
    repeated, sums = _sums(known, values, value_indices)
    found = value_indices.take(known.sorted_positions)
    if len(repeated):
        found[repeated] = np.arange(len(values), len(values) + len(repeated))
        values = np.concatenate([values, sums])
    return known.unique(), values, found


def _summable(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(adding_dtype(values.dtype), copy=False)


def _sums(
    known: _SortedIds, values: NDArray[Any], value_indices: NDArray[np.intp] | None = None
) -> tuple[Ids, NDArray[Any]]:
    """Return the indices of ids that occur more than once, and the sums of their rows."""
    is_first, first = known.is_first, known.first
    if len(first) == len(is_first):
        return first[:0], values[:0]
    # Most ids occur once: only the others are processed.
    (repeats,) = (~is_first).nonzero()
    repeated_firsts = repeats[is_first[repeats - 1]] - 1
    summed = np.concatenate([repeated_firsts, repeats])
    summed.sort(kind="stable")
    rows = known.order[summed]
    if value_indices is not None:
        rows = value_indices[rows]
    return first.searchsorted(repeated_firsts), _sum_runs(
        values, rows, summed.searchsorted(repeated_firsts)
    )


def _sum_runs(values: NDArray[Any], order: Ids, starts: Ids) -> NDArray[Any]:
    """Return the sum of each run of the rows in `order`, given the start of each run."""
    product = _sparse_product() if values.dtype.kind == "f" else None
    if product is None or len(order) < _MIN_IDS_FOR_SPARSE_PRODUCT:
        return np.add.reduceat(values.take(order, axis=0), starts, axis=0)
    flat = values.reshape(len(values), -1)
    sums = product(flat, order, np.append(starts, len(order)))
    return sums.reshape(len(starts), *values.shape[1:])


_MIN_IDS_FOR_SPARSE_PRODUCT = 1024
"""Fewer rows are summed faster than SciPy creates its matrix."""


@cache
def _sparse_product() -> Callable[[NDArray[Any], Ids, Ids], NDArray[Any]] | None:
    """Return a sum of rows by a sparse matrix of ones, 3 times as fast; None without SciPy."""
    try:
        import scipy.sparse  # noqa: PLC0415 - optional dependency
    except ImportError:
        return None

    def product(values: NDArray[Any], columns: Ids, starts: Ids) -> NDArray[Any]:
        ones = np.ones(len(columns), values.dtype)
        shape = (len(starts) - 1, len(values))
        return np.asarray(scipy.sparse.csr_array((ones, columns, starts), shape=shape) @ values)

    return product


class _SortedIds(NamedTuple):
    """Sorted ids. The arrays are shared: they must not be written to or returned to callers.

    Attributes:
        ids: Ids in their original order.
        ordered: Ids in ascending order.
        order: Original position of each of `ordered`; equal ids keep their order.
        is_first: Whether each of `ordered` is the first of its id.
        first: Index in `ordered` at which each id begins.
        sorted_positions: First original position of each id.
    """

    ids: Ids
    ordered: Ids
    order: Ids
    is_first: NDArray[np.bool_]
    first: Ids
    sorted_positions: Ids

    def unique(self) -> Ids:
        """Return the distinct ids, as an array owned by the caller."""
        return self.ordered.take(self.first)

    def inverse(self) -> Ids:
        """Return the index of each of `ids` among them, as an array owned by the caller."""
        inverse = np.empty(len(self.order), np.int64)
        inverse[self.order] = np.cumsum(self.is_first) - 1
        return inverse


class _SortCache:
    """Recently sorted batches; replaced as a whole, so concurrent threads do no harm."""

    batches: tuple[_SortedIds, ...] = ()


_sort_cache = _SortCache()

_MAX_CACHED_BATCHES = 8
_MAX_CACHED_IDS = 1 << 18
"""Number of cached ids of all batches together: 41 bytes each."""


def _sort_ids_cached(ids: Ids) -> _SortedIds:
    """Return sorted ids.

    A step mostly pushes the ids that it read, so a few batches are cached: a comparison of ids
    takes a thirtieth of the time of a sort.
    """
    count = len(ids)
    if not 0 < count <= _MAX_CACHED_IDS:
        return _sort_ids(ids)
    batches = _sort_cache.batches
    for known in batches:
        if len(known.ids) == count and known.ids[0] == ids[0] and (known.ids == ids).all():
            return known
    made = _sort_ids(ids.copy())
    cached, remaining = [made], _MAX_CACHED_IDS - count
    for known in batches[: _MAX_CACHED_BATCHES - 1]:
        remaining -= len(known.ids)
        if remaining >= 0:
            cached.append(known)
    _sort_cache.batches = tuple(cached)
    return made


def _sort_ids(ids: Ids) -> _SortedIds:
    ordered, order = _stable_sort(ids)
    is_first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    (first,) = is_first.nonzero()
    return _SortedIds(ids, ordered, order, is_first, first, order.take(first))


def _stable_sort(ids: Ids) -> tuple[Ids, Ids]:
    """Return the sorted ids, and the original position of each; equal ids keep their order."""
    if len(ids) == 0:
        return ids.astype(np.int64), np.zeros(0, np.int64)
    lowest, highest = int(ids.min()), int(ids.max())
    # A radix sort by 16-bit digits: NumPy sorts these by counting, and wider numbers by comparison,
    # several times as slowly. The subtraction may overflow int64, but wraps around correctly.
    with np.errstate(over="ignore"):
        offsets = (ids - np.int64(lowest)).view(np.uint64)
    order = offsets.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, (highest - lowest).bit_length(), 16):
        digit = (offsets >> np.uint64(shift)).astype(np.uint16)
        order = order.take(digit.take(order).argsort(kind="stable"))
    return ids.take(order), order


def check_ids(ids: NDArray[Any], owner: str) -> Ids:
    """Return ids of a table as int64, of the same shape.

    Raises:
        TypeError: If they are not integers.
        InvalidArgumentError: If an id is too large.
    """
    if not ids.size:
        return ids.astype(np.int64)
    if are_large_integers(ids):
        raise InvalidArgumentError(
            f"ids of {owner} must fit in 64 bits, but one is {max(ids.flat, key=abs)}; hash them "
            "to int64 first"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"ids of {owner} must be integers, but have dtype {ids.dtype}; hash strings to int64 "
            "first"
        )
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        raise InvalidArgumentError(
            f"ids of {owner} are int64, but one is {ids.max()}; convert uint64 hashes with "
            "hashes.view(np.int64)"
        )
    return ids.astype(np.int64, copy=False)


def split_by_rows(rows: Ids, ranges: Sequence[range]) -> list[slice]:
    """Return the slice of the sorted `rows` in each range."""
    edges = rows.searchsorted([part.stop for part in ranges]).tolist()
    return [slice(first, last) for first, last in zip([0, *edges], edges, strict=False)]


def assign_shards(ids: Ids, shards: int) -> NDArray[np.int64]:
    """Return the table shard of each id, by a hash, so that regular strides are spread evenly."""
    high = (ids.view(np.uint64) * _HASH_MULTIPLIER) >> np.uint64(32)
    return ((high * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)


_HASH_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)


def split_by_hash(ids: Ids, shards: int) -> list[Ids]:
    """Return the positions of the ids of each shard, in order."""
    if shards == 1:
        return [np.arange(len(ids))]
    owner = assign_shards(ids, shards)
    return [np.flatnonzero(owner == shard) for shard in range(shards)]
