"""Reading a variable on parameter servers: all of it, rows, slices, or as an array among others."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from headrace.distribute.casting import kind_of
from headrace.distribute.pooling import check_combiner, pool_rows
from headrace.distribute.row_numbers import rows_of
from headrace.parameter_server.arrays import as_array, is_foreign, refuse_while_tracing
from headrace.parameter_server.creation import Sharded
from headrace.parameter_server.gradients import Batch
from headrace.parameter_server.read_cache import cached_reads
from headrace.parameter_server.specs import adding_dtype

__all__ = ["ShardedReading"]


class ShardedReading(NDArrayOperatorsMixin):
    """What can be asked of a variable without changing it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _sharded: Sharded

    @property
    def sharded(self) -> Sharded:
        """Its shards, and the servers that have them."""
        return self._sharded

    def read(self) -> Any:
        """Return the value, as an array of NumPy that belongs to the caller.

        Each shard is of one moment; different shards may be of different ones.

        Raises:
            FailedPreconditionError: JAX traces the code that reads.
            UnavailableError: A server cannot be reached.
        """
        refuse_while_tracing(f"Variable {self.name!r}")
        cache = cached_reads()
        if cache is None:
            return self._sharded.read()[()]
        return cache.value_of(self._sharded).copy()[()]

    numpy = value = read_value = read

    def gather(self, ids: Any, combiner: str | None = None) -> NDArray[Any]:
        """Return the rows of these ids, in their order; or one row for each bag of them.

        Args:
            ids: Integers of any shape, from 0 to the number of rows - 1; a doubled one is sent
                once.
            combiner: Each bag, along the last axis of `ids`, becomes one row: "sum", "mean", or
                "sqrtn", the sum by the square root of how many there are. None: nothing does.

        Raises:
            InvalidArgumentError: One is out of range; it is named.
            ValueError: There is no such combiner, or not for such numbers.
        """
        refuse_while_tracing(f"Variable {self.name!r}")
        rows = self._checked_rows(ids)
        if combiner is not None:
            whose = f"Variable {self.name!r}"
            check_combiner(combiner, rows, whose, kind=kind_of(self.dtype))
        cache = cached_reads()
        if cache is None or not cache.has(self._sharded):
            return self._sharded.rows(Batch(rows), combiner)
        value = cache.value_of(self._sharded)
        if combiner is None:
            return value.take(rows, axis=0)
        return pool_rows(value, rows, combiner, adding_dtype(self.dtype))

    sparse_read = gather

    def _checked_rows(self, ids: Any) -> NDArray[np.int64]:
        plain = ids if isinstance(ids, list | tuple) else as_array(ids)
        return rows_of(self, plain)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.read())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ShardedReading) for each in kwargs.get("out", ())):
            raise TypeError(
                "a Variable is not written by operators; use assign, assign_add or assign_sub"
            )
        plain = [each.read() if isinstance(each, ShardedReading) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Return a part, as NumPy would of the whole; only the rows that it needs are sent."""
        keys = key if isinstance(key, tuple) else (key,)
        for each in keys:
            _refuse_foreign(each)
        first, rest = (keys[0], keys[1:]) if keys else (Ellipsis, ())
        if self.shape and isinstance(first, slice):
            rows = range(self.shape[0])[first]
            if len(rows) < self.shape[0]:
                named = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
                return self.gather(named)[(slice(None), *rest)]
        elif self.shape and isinstance(first, int | np.integer) and not isinstance(first, bool):
            return self.gather([self._row(operator.index(first))])[(0, *rest)]
        return np.asarray(self.read())[key]

    def _row(self, index: int) -> int:
        count = self.shape[0]
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of bounds for axis 0 with size {count}")
        return index % count

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            "a Variable is not written by its parts; use scatter_update(ids, values), or assign"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable that is one number")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec) if spec else str(self)


def _refuse_foreign(key: Any) -> None:
    parts = (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
    if any(is_foreign(each) for each in parts):
        raise TypeError(
            "arrays of a framework are not allowed as indices of a Variable; use integers, slices, "
            "or arrays of NumPy, and gather(ids) for rows"
        )
