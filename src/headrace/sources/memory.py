"""Sources of data in memory or computed data.

They are ranges, slices of arrays, single elements, random numbers, and the elements of a window.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from headrace.arguments import check_int
from headrace.element.chunk import Chunk
from headrace.element.memory import allocate_array, copy_array, copy_rows
from headrace.element.normalize import NORMAL_KINDS, normalize
from headrace.element.ownership import copy_element
from headrace.element.spec import ArraySpec, Spec, spec_of, unbatch_spec
from headrace.element.structure import Element, Structure, describe_component, flatten, unflatten
from headrace.errors import FailedPreconditionError
from headrace.plan.combined_sources import RandomizedSource
from headrace.plan.random_words import RandomKey, derive_key, random_words
from headrace.plan.source import (
    INDEX_SPEC,
    INFINITE,
    IndexedSource,
    Position,
    Reader,
    Source,
    check_limit,
    check_range,
)

__all__ = ["ElementListSource", "RandomSource", "RangeSource", "SlicesSource", "TensorsSource"]


@dataclass(frozen=True)
class RangeSource(IndexedSource):
    """The numbers from `start` to `stop` (exclusive) in steps of `step`.

    Args:
        start: First number.
        stop: End, exclusive; None is infinite.
        step: Difference between consecutive numbers; negative counts down.
        dtype: Integer or float dtype that can represent all of the numbers.
    """

    start: int
    stop: int | None
    step: int = 1
    dtype: npt.DTypeLike = np.int64
    _size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (
            self.dtype is np.int64
            and type(self.start) is type(self.stop) is type(self.step) is int
            and 0 <= self.start < _HALF_RANGE
            and 0 <= self.stop < _HALF_RANGE
            and self.step > 0
        ):  # the usual case, which nested datasets repeat often
            fields = self.__dict__
            fields["dtype"] = _INT64
            fields["_size"] = len(range(self.start, self.stop, self.step))
            return
        for name in ("start", "stop", "step"):
            value = getattr(self, name)
            if type(value) is int or (name == "stop" and value is None):
                continue
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"{name} must be an int, got {value!r}") from None
        if self.step == 0:
            raise ValueError("step must not be 0")
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "iuf":
            raise ValueError(f"dtype must be one of integers or floats, got {dtype}")
        object.__setattr__(self, "dtype", dtype)
        size = INFINITE
        if self.stop is not None:
            size = len(range(self.start, self.stop, self.step))
        object.__setattr__(self, "_size", size)
        last = self.start + max(size - 1, 0) * self.step
        lowest, highest = _integer_range(dtype)
        for value in (self.start, last):
            if size and not lowest <= value <= highest:
                raise ValueError(f"the range holds {value}, which dtype {dtype} does not")

    @property
    def size(self) -> int:
        return self._size

    @property
    def element_spec(self) -> Spec | None:
        return _scalar_spec(np.dtype(self.dtype))

    @property
    def is_small(self) -> bool:
        return 0 <= self._size <= _SMALL_SIZE

    def gather(self, indices: NDArray[np.int64]) -> Any:
        # The sum is a new array, so `indices` itself is never returned.
        indices = np.asarray(indices, np.int64)
        result = (indices if self.step == 1 else indices * self.step) + self.start
        return result.astype(self.dtype, copy=False)

    def gather_run(self, start: int, stop: int) -> Any:
        first, end = self.start + start * self.step, self.start + stop * self.step
        if abs(end) >= 1 << 63:
            return self.gather(np.arange(start, stop))
        return np.arange(first, end, self.step, dtype=np.int64).astype(self.dtype, copy=False)

    def gather_run_borrowed(self, start: int, stop: int) -> Any:
        return self.gather_run(start, stop)  # nothing is stored


_INT64 = np.dtype(np.int64)
_SMALL_SIZE, _SMALL_BYTES = 512, 4096
_HALF_RANGE = 1 << 62


@lru_cache(maxsize=64)
def _integer_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and the largest integer that a range of this dtype may contain."""
    limits = np.iinfo(dtype if dtype.kind in "iu" else np.int64)
    return max(int(limits.min), -(1 << 63)), min(int(limits.max), (1 << 63) - 1)


@lru_cache(maxsize=64)
def _scalar_spec(dtype: np.dtype[Any]) -> ArraySpec:
    return ArraySpec((), dtype)


@dataclass(frozen=True, eq=False)
class SlicesSource(IndexedSource):
    """The slices of arrays along their first axis.

    Args:
        components: A stacked element: nested arrays (lists are converted) whose first axes have the
            same length. The arrays are not copied; reading copies rows, unless the reader only
            borrows them (`gather_borrowed`).
    """

    components: Element
    _size: int = field(init=False, repr=False)
    _spec: Spec = field(init=False, repr=False)
    _leaves: list[Any] = field(init=False, repr=False)
    _structure: Structure = field(init=False, repr=False)

    def __post_init__(self) -> None:
        array = self.components
        if type(array) is np.ndarray and array.ndim and array.dtype.kind in NORMAL_KINDS:
            # A single array, as nested datasets often have.
            fields = self.__dict__
            fields["_size"], fields["_leaves"] = len(array), [array]
            fields["_structure"], fields["_spec"] = _LEAF, _row_spec(array.shape[1:], array.dtype)
            return
        components = normalize(self.components)
        leaves, structure = flatten(components)
        if not leaves:
            raise ValueError(
                f"there is no array to slice in {self.components!r:.80}; pass an array, or a dict "
                "or tuple of arrays"
            )
        sizes: dict[str, int] = {}
        for leaf, path in zip(leaves, structure.paths, strict=True):
            if not isinstance(leaf, np.ndarray) or leaf.ndim == 0:
                raise ValueError(
                    f"cannot slice {describe_component(path)}: it has no axis ({leaf!r}); give "
                    "it a first axis, or use from_tensors"
                )
            sizes[describe_component(path)] = len(leaf)
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise ValueError(
                f"all components must have the same length along their first axis, got {found}"
            )
        # Arrays are shared with the caller; dicts and other containers are copied.
        object.__setattr__(self, "components", unflatten(structure, leaves))
        object.__setattr__(self, "_size", len(leaves[0]))
        object.__setattr__(self, "_spec", unbatch_spec(spec_of(components)))
        object.__setattr__(self, "_leaves", leaves)
        object.__setattr__(self, "_structure", structure)

    @property
    def size(self) -> int:
        return self._size

    @property
    def element_spec(self) -> Spec | None:
        return self._spec

    @property
    def is_small(self) -> bool:
        return (
            self._size <= _SMALL_SIZE
            and sum([leaf.nbytes for leaf in self._leaves]) <= _SMALL_BYTES
        )

    def gather(self, indices: NDArray[np.int64]) -> Any:
        indices = np.asarray(indices)
        run = _as_slice(indices)
        if run is not None:
            rows = [
                copy_array(leaf[run]).reshape(*indices.shape, *leaf.shape[1:])
                for leaf in self._leaves
            ]
            return unflatten(self._structure, rows)
        return unflatten(self._structure, [copy_rows(leaf, indices) for leaf in self._leaves])

    def gather_run(self, start: int, stop: int) -> Any:
        return unflatten(self._structure, [copy_array(leaf[start:stop]) for leaf in self._leaves])

    @property
    def can_borrow_runs(self) -> bool:
        return bool(sum(leaf.nbytes for leaf in self._leaves) > _LARGE_COPY_BYTES)

    def gather_borrowed(self, indices: NDArray[np.int64]) -> Any:
        indices = np.asarray(indices)
        size = sum([leaf.nbytes for leaf in self._leaves]) // max(self._size, 1)
        run = _as_slice(indices, min(_MIN_RUN_LENGTH, 1 + _MIN_RUN_BYTES // max(size, 1)))
        if run is None or not indices.ndim:
            return self.gather(indices)
        rows = [
            leaf.reshape((*indices.shape, *leaf.shape[1:]))
            for leaf in flatten(self.gather_run_borrowed(run.start, run.stop))[0]
        ]
        return unflatten(self._structure, rows)

    def gather_run_borrowed(self, start: int, stop: int) -> Any:
        return unflatten(
            self._structure, [_read_only_view(leaf)[start:stop] for leaf in self._leaves]
        )


_LEAF = flatten(0)[1]


@lru_cache(maxsize=256)
def _row_spec(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArraySpec:
    return ArraySpec(shape, dtype)


_MIN_RUN_LENGTH = 1024
"""Smallest number of rows for which to check for a run: below it, the check costs more than copying
a slice saves."""
_LARGE_COPY_BYTES = 1 << 16
"""Number of bytes whose copy takes as long as handling another chunk."""
_MIN_RUN_BYTES = 32 << 10
"""Smallest number of bytes for which to check for a run if nothing is copied."""


def _as_slice(indices: NDArray[np.int64], min_length: int = _MIN_RUN_LENGTH) -> slice | None:
    """Return `indices` as a slice if there are at least `min_length` and they are consecutive."""
    count = indices.size
    if count < min_length:
        return None
    indices = indices.reshape(-1)
    if indices[-1] - indices[0] != count - 1:
        return None
    first = int(indices[0])
    if first < 0 or not np.array_equal(indices, np.arange(first, first + count)):
        return None
    return slice(first, first + count)


@dataclass(frozen=True, eq=False)
class TensorsSource(IndexedSource):
    """A single element; reading copies it, unless it is borrowed (`gather_borrowed`).

    Args:
        element: The element; lists become arrays, and numbers NumPy scalars. Its arrays are not
            copied.
    """

    element: Element
    _spec: Spec = field(init=False, repr=False)
    _leaves: list[Any] = field(init=False, repr=False)
    _structure: Structure = field(init=False, repr=False)

    def __post_init__(self) -> None:
        leaves, structure = flatten(normalize(self.element))
        object.__setattr__(self, "element", unflatten(structure, leaves))
        object.__setattr__(self, "_leaves", leaves)
        object.__setattr__(self, "_structure", structure)
        object.__setattr__(self, "_spec", spec_of(self.element))

    @property
    def size(self) -> int:
        return 1

    @property
    def element_spec(self) -> Spec | None:
        return self._spec

    def gather(self, indices: NDArray[np.int64]) -> Any:
        shape = np.shape(indices)
        return unflatten(self._structure, [_repeat_leaf(leaf, shape) for leaf in self._leaves])

    def gather_borrowed(self, indices: NDArray[np.int64]) -> Any:
        shape = np.shape(indices)
        return unflatten(self._structure, [_broadcast_view(leaf, shape) for leaf in self._leaves])


def _repeat_leaf(leaf: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a new array of this shape with `leaf` as each entry."""
    if isinstance(leaf, bytes | str):
        return np.full(shape, leaf, object)
    result = allocate_array((*shape, *leaf.shape), leaf.dtype)
    result[...] = leaf
    return result


def _read_only_view(leaf: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of an array."""
    view = leaf.view()
    view.flags.writeable = False
    return view


def _broadcast_view(leaf: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of this shape with `leaf` as each entry, as a view of an array leaf."""
    if not isinstance(leaf, np.ndarray):
        return _repeat_leaf(leaf, shape)
    if shape == (1,):
        return _read_only_view(leaf)[np.newaxis]  # ten times as fast as `broadcast_to`
    return np.broadcast_to(leaf, (*shape, *leaf.shape))


_MASK = (1 << 64) - 1
_UPPER_HALF = np.uint64(32)


@dataclass(frozen=True)
class RandomSource(RandomizedSource):
    """Random int64 numbers in [0, 2**32), each a function of the seed and its index.

    Args:
        seed: Seed of the sequence; None draws one for each iteration over a dataset.
        number: Number among the plan's random steps and sources; set by the canonical form.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("number",)

    seed: int | None = None
    number: int | None = None
    _key: RandomKey | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.seed is not None:
            seed = check_int("seed", self.seed, minimum=-(1 << 63))
            object.__setattr__(self, "seed", seed)
            object.__setattr__(self, "_key", derive_key([5, seed & _MASK]))

    @property
    def size(self) -> int:
        return INFINITE

    @property
    def element_spec(self) -> Spec | None:
        return INDEX_SPEC

    @property
    def has_fixed_seed(self) -> bool:
        return self._key is not None

    def with_number(self, number: int) -> RandomSource:
        return dataclasses.replace(self, number=number)

    def with_entropy(self, entropy: Sequence[int]) -> RandomSource:
        return dataclasses.replace(self, _key=derive_key(entropy))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        if self._key is None:
            raise FailedPreconditionError(
                "these random numbers have no seed: each iteration over a dataset draws one; "
                "set a seed, or read them through a dataset"
            )
        return (random_words(self._key, indices) >> _UPPER_HALF).astype(np.int64)


class ElementListSource(Source):
    """A list of elements in order. Each read returns copies.

    Args:
        rows: Normal elements.
    """

    def __init__(self, rows: Sequence[Element]) -> None:
        self._rows = rows

    @property
    def size(self) -> int:
        return 1

    @property
    def elements_per_index(self) -> int | None:
        return len(self._rows)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return _ElementListReader(self._rows if stop > start else (), position or 0)


class _ElementListReader:
    """Reader of a list of elements; its position is the number of the next one."""

    def __init__(self, rows: Sequence[Element], position: int) -> None:
        self._rows = rows
        self._next = position

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        rows = [copy_element(row) for row in self._rows[self._next : self._next + limit]]
        self._next += len(rows)
        return Chunk.of_rows(rows) if rows else None

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        self._rows = ()
