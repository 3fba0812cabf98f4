"""What is done to gradients before they are sent: the look for what is not finite, and clipping.

Both need the whole gradient, of all variables: so they are the client's. Rows of a sparse gradient
have been summed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.pooling import are_large_integers, pool_rows
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
"""What to do when a gradient has a NaN or an infinity."""


def is_finite(values: NDArray[Any]) -> bool:
    """Whether there is neither a NaN nor an infinity."""
    # One pass without a mask; only where it overflows is each element looked at.
    return math.isfinite(_sum_of_squares(values)) or bool(np.isfinite(values).all())


def refuse_non_finite(names: Sequence[str], gradients: Sequence[NDArray[Any]]) -> None:
    """Raise unless all gradients are finite.

    Raises:
        InvalidArgumentError: One is not; it names the variable and the place.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if not is_finite(gradient):
            wrong = np.argwhere(~np.isfinite(gradient))
            place = ", ".join(map(str, wrong[0]))
            raise InvalidArgumentError(
                f"the gradient of {name} has {len(wrong)} of {gradient.size} elements that are not "
                f"finite, the first at [{place}]: {gradient[tuple(wrong[0])]}; nothing was "
                'applied. An optimizer made with non_finite="skip" passes over such a step'
            )


def global_norm(gradients: Sequence[NDArray[Any]]) -> float:
    """Return the Euclidean norm of all gradients together."""
    return math.sqrt(sum(map(_sum_of_squares, gradients)))


def clip_by_norm(gradients: Sequence[NDArray[Any]], max_norm: float) -> list[NDArray[Any]]:
    """Return gradients scaled so that their norm, all together, is at most `max_norm`.

    A norm that is not finite makes them NaN.
    """
    found = global_norm(gradients)
    if found <= max_norm:
        return list(gradients)
    scale = max_norm / found if math.isfinite(found) else math.nan
    return [gradient * gradient.dtype.type(scale) for gradient in gradients]


def clip_by_value(gradients: Sequence[NDArray[Any]], max_value: float) -> list[NDArray[Any]]:
    """Return gradients with each element brought into [-largest, largest]."""
    return [
        # Dtypes of other packages are widened by `clip`.
        np.clip(gradient, -max_value, max_value).astype(gradient.dtype, copy=False)
        for gradient in gradients
    ]


def _sum_of_squares(values: NDArray[Any]) -> float:
    flat = np.ascontiguousarray(values, working_dtype(values.dtype)).reshape(-1)
    # By pieces: sums in float32 over the whole would lose digits.
    pieces = [flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE)]
    with np.errstate(all="ignore"):
        total = sum(float(np.dot(piece, piece)) for piece in pieces)
        if math.isfinite(total) or flat.dtype != np.float32:
            return total
        # Squares of what is above 1e19 are no float32.
        wide = (piece.astype(np.float64) for piece in pieces)
        return sum(float(np.dot(piece, piece)) for piece in wide)


_PIECE = 65_536


# --- ids of a batch, for the servers: each once, to the shard that has it, and back in order ------

#     distinct, inverse = distinct_ids(ids)              what to ask for, and where it goes
#     asked = Batch(ids); asked.spread(answers)          the same, for answers in several parts
#     asked.pool(answers, combiner)                      one row for each bag of ids
#     distinct, sums = sum_rows(ids, gradients)          what to push
#     distinct, values, which = sum_shared(...)          the same, where ids share values
#     split_by_rows(distinct, ranges)                    shards of a variable: slices
#     split_by_hash(distinct, shards)                    shards of a table: positions
#
# Rows of a variable are dealt in order, so answers of its shards, one after another, are in the
# order of `unique`.

Ids = NDArray[np.int64]


def unique_ids(ids: Ids) -> tuple[Ids, Ids]:
    """Return the ids, rising and each once, and where each of `ids` is among them.

    Args:
        ids: Of any shape; the second answer has it too.
    """
    found = _sort_ids_cached(ids.reshape(-1))
    return found.unique(), found.inverse().reshape(ids.shape)


class IdBatch:
    """Ids, each once, and the way back to all of them.

    Args:
        ids: Of any shape.

    Attributes:
        unique: The ids, rising and each once.
    """

    def __init__(self, ids: Ids) -> None:
        self._shape = ids.shape
        flat = ids.reshape(-1)
        self._ids = _sort_ids_cached(flat)
        self.unique = self._ids.unique()
        #: Whether they were rising, and each there once.
        self._is_unique = ids.ndim == 1 and np.array_equal(self.unique, flat)

    def pool(
        self,
        parts: Sequence[NDArray[Any]],
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        combiner: str,
    ) -> NDArray[Any]:
        """Return a row for each bag of ids, along their last axis (`distribute.pooling`).

        Args:
            parts: Values of `unique`, in that order.
            row_shape: Of a value.
            dtype: Of its elements.
            combiner: How the rows of a bag become one.
        """
        rows = (
            parts[0]
            if len(parts) == 1
            else np.concatenate([np.empty((0, *row_shape), dtype), *parts])
        )
        bags = self._ids.inverse().reshape(self._shape)
        return pool_rows(rows, bags, combiner, adding_dtype(dtype))

    def expand(
        self, parts: Sequence[NDArray[Any]], row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Return a value for each id.

        Args:
            parts: Values of `unique`, in that order.
            row_shape: Of a value.
            dtype: Of its elements.
        """
        if self._is_unique and len(parts) == 1:
            return parts[0]
        order, first, homes = self._ids.order, self._ids.first, self._ids.sorted_positions
        found = np.empty((len(order), *row_shape), dtype)
        if found.size:
            rows = found.reshape(len(order), -1)
            start = 0
            for part in parts:  # each row goes to where its id stands first
                put_rows(rows, homes[start : start + len(part)], part.reshape(-1, rows.shape[1]))
                start += len(part)
            if len(first) < len(order):
                (again,) = (~self._ids.is_first).nonzero()
                source = homes[first.searchsorted(again) - 1]
                put_rows(rows, order[again], rows.take(source, axis=0))
        return found.reshape((*self._shape, *row_shape))


def sum_rows(ids: Ids, values: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
    """Return the ids, rising and each once, and the sum of the rows of each.

    Args:
        ids: 1-D.
        values: A row for each. Numbers of less than 32 bits are summed, and returned, in float32.
    """
    values = _summable(values)
    known = _sort_ids_cached(ids)
    doubled, sums = _sums(known, values)
    found = values.take(known.sorted_positions, axis=0)
    if len(doubled):
        found[doubled] = sums
    return known.unique(), found


def sum_shared_rows(
    ids: Ids, values: NDArray[Any], value_indices: NDArray[np.intp]
) -> tuple[Ids, NDArray[Any], NDArray[np.intp]]:
    """Return the ids, rising and each once, rows, and which of these is the sum of each id.

    Rows that stand there once are not copied for each id that has them.

    Args:
        ids: 1-D.
        values: Rows; as for `sum_rows`.
        value_indices: Which of them each id has.
    """
    values = _summable(values)
    known = _sort_ids_cached(ids)
    doubled, sums = _sums(known, values, value_indices)
    found = value_indices.take(known.sorted_positions)
    if len(doubled):
        found[doubled] = np.arange(len(values), len(values) + len(doubled))
        values = np.concatenate([values, sums])
    return known.unique(), values, found


def _summable(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(adding_dtype(values.dtype), copy=False)


def _sums(
    known: _SortedIds, values: NDArray[Any], which: NDArray[np.intp] | None = None
) -> tuple[Ids, NDArray[Any]]:
    """Return which ids stand there more than once, and their sums of the rows that they have."""
    is_first, first = known.is_first, known.first
    if len(first) == len(is_first):
        return first[:0], values[:0]
    # Most ids stand there once: only the others are looked at.
    (again,) = (~is_first).nonzero()
    heads = again[is_first[again - 1]] - 1
    here = np.concatenate([heads, again])
    here.sort(kind="stable")
    places = known.order[here]
    if which is not None:
        places = which[places]
    return first.searchsorted(heads), _sum_runs(values, places, here.searchsorted(heads))


def _sum_runs(values: NDArray[Any], order: Ids, starts: Ids) -> NDArray[Any]:
    """Return the sum of each run of rows: of those that `order` names, from each start on."""
    product = _sparse_product() if values.dtype.kind == "f" else None
    if product is None or len(order) < _MIN_IDS_FOR_SPARSE_PRODUCT:
        return np.add.reduceat(values.take(order, axis=0), starts, axis=0)
    flat = values.reshape(len(values), -1)
    sums = product(flat, order, np.append(starts, len(order)))
    return sums.reshape(len(starts), *values.shape[1:])


_MIN_IDS_FOR_SPARSE_PRODUCT = 1024
"""So few rows are summed before SciPy has made its matrix."""


@cache
def _sparse_product() -> Callable[[NDArray[Any], Ids, Ids], NDArray[Any]] | None:
    """Return what sums rows by a sparse matrix of ones, in a third of the time; None: no SciPy."""
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
    """Ids in their order. Its arrays are shared: nobody writes to them, or hands them out.

    Attributes:
        ids: As they came.
        ordered: Rising.
        order: Where each of `ordered` stood; of equal ones the first comes first.
        is_first: Whether each of `ordered` is the first of its id.
        first: Where each id begins in `ordered`.
        sorted_positions: Where each id stood first.
    """

    ids: Ids
    ordered: Ids
    order: Ids
    is_first: NDArray[np.bool_]
    first: Ids
    sorted_positions: Ids

    def unique(self) -> Ids:
        """Return each id once, as an array of the caller's own."""
        return self.ordered.take(self.first)

    def inverse(self) -> Ids:
        """Return where each of `ids` is among those, as an array of the caller's own."""
        inverse = np.empty(len(self.order), np.int64)
        inverse[self.order] = np.cumsum(self.is_first) - 1
        return inverse


class _SortCache:
    """What was put in order of late; replaced whole, so that threads do no harm to each other."""

    batches: tuple[_SortedIds, ...] = ()


_sort_cache = _SortCache()

_MAX_CACHED_BATCHES = 8
_MAX_CACHED_IDS = 1 << 18
"""Ids that are remembered, all batches together: 41 bytes each."""


def _sort_ids_cached(ids: Ids) -> _SortedIds:
    """Return ids in their order.

    What a step reads it mostly pushes too, so a few batches are remembered: to compare ids takes a
    thirtieth of the time of a sort.
    """
    count = len(ids)
    if not 0 < count <= _MAX_CACHED_IDS:
        return _sort_ids(ids)
    batches = _sort_cache.batches
    for known in batches:
        if len(known.ids) == count and known.ids[0] == ids[0] and (known.ids == ids).all():
            return known
    made = _sort_ids(ids.copy())
    kept, room = [made], _MAX_CACHED_IDS - count
    for known in batches[: _MAX_CACHED_BATCHES - 1]:
        room -= len(known.ids)
        if room >= 0:
            kept.append(known)
    _sort_cache.batches = tuple(kept)
    return made


def _sort_ids(ids: Ids) -> _SortedIds:
    ordered, order = _stable_sort(ids)
    is_first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    (first,) = is_first.nonzero()
    return _SortedIds(ids, ordered, order, is_first, first, order.take(first))


def _stable_sort(ids: Ids) -> tuple[Ids, Ids]:
    """Return the ids in order, and where each stood; of equal ones the first comes first."""
    if len(ids) == 0:
        return ids.astype(np.int64), np.zeros(0, np.int64)
    lowest, highest = int(ids.min()), int(ids.max())
    # By digits of 16 bits, which NumPy counts: wider numbers it compares, several times as slowly.
    # The difference is right although it may be more than an int64 holds: it wraps around.
    with np.errstate(over="ignore"):
        left = (ids - np.int64(lowest)).view(np.uint64)
    order = left.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, (highest - lowest).bit_length(), 16):
        digit = (left >> np.uint64(shift)).astype(np.uint16)
        order = order.take(digit.take(order).argsort(kind="stable"))
    return ids.take(order), order


def check_ids(ids: NDArray[Any], whose: str) -> Ids:
    """Return ids of a table as int64, of any shape.

    Raises:
        TypeError: They are no integers.
        InvalidArgumentError: One is too large.
    """
    if not ids.size:
        return ids.astype(np.int64)
    if are_large_integers(ids):
        raise InvalidArgumentError(
            f"ids of {whose} must fit in 64 bits, but one is {max(ids.flat, key=abs)}; hash them "
            "to int64 first"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"ids of {whose} must be integers, but have dtype {ids.dtype}; hash strings to int64 "
            "first"
        )
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        raise InvalidArgumentError(
            f"ids of {whose} are int64, but one is {ids.max()}; of hashes, take "
            "hashes.view(np.int64)"
        )
    return ids.astype(np.int64, copy=False)


def split_by_rows(rows: Ids, ranges: Sequence[range]) -> list[slice]:
    """Return which of `rows`, rising, fall to each range of rows, as slices."""
    edges = rows.searchsorted([part.stop for part in ranges]).tolist()
    return [slice(first, last) for first, last in zip([0, *edges], edges, strict=False)]


def assign_shards(ids: Ids, shards: int) -> NDArray[np.int64]:
    """Return the shard of a table that each id falls to: by a hash, so that strides do no harm."""
    high = (ids.view(np.uint64) * _HASH_MULTIPLIER) >> np.uint64(32)
    return ((high * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)


_HASH_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)


def split_by_hash(ids: Ids, shards: int) -> list[Ids]:
    """Return the positions of the ids that fall to each shard, in order."""
    if shards == 1:
        return [np.arange(len(ids))]
    owner = assign_shards(ids, shards)
    return [np.flatnonzero(owner == shard) for shard in range(shards)]
