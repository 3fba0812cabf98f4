"""Values of several replicas made one: sums, means, and one array after another.

These are the NumPy ones. A replica's value is anything that NumPy takes for an array.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_int
from headrace.errors import InvalidArgumentError

__all__ = ["Axis", "ReduceOp", "concatenated", "reduced", "reduced_within"]

Axis: TypeAlias = int | Sequence[int] | None


class ReduceOp(enum.Enum):
    """How values of several replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: Any) -> ReduceOp:
        """Return the operation that is meant by one, or by its name in any case.

        Raises:
            TypeError: It is neither.
            ValueError: There is none of that name.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise TypeError(
                f"Expected reduce_op to be a ReduceOp, or its name, not: {value!r}; use "
                'ReduceOp.SUM ("SUM") or ReduceOp.MEAN ("MEAN")'
            )
        if value.upper() not in cls.__members__:
            raise ValueError(f"{value!r} is not a valid ReduceOp; there are SUM and MEAN")
        return cls[value.upper()]


def reduced(op: ReduceOp, values: Sequence[Any]) -> Any:
    """Return the sum or mean of arrays of one shape, element by element, in fresh memory.

    Raises:
        InvalidArgumentError: Their shapes differ.
    """
    total = _sum([_countable(np.asarray(value)) for value in values])
    if op is ReduceOp.MEAN:
        total = np.true_divide(total, len(values))
    return total[()]


def reduced_within(op: ReduceOp, values: Sequence[Any], axis: int | Sequence[int]) -> Any:
    """Return the sum or mean over axes of each array, and over the arrays.

    A mean is over all rows of all replicas: those that have more of them count for more.

    Raises:
        ValueError: An array has no such axis.
        TypeError: `axis` is no integer, tuple or list.
    """
    arrays = [_countable(np.asarray(value)) for value in values]
    axes = _axes(axis)
    for array in arrays:
        for each in axes:
            if not -array.ndim <= each < array.ndim:
                raise ValueError(
                    f"axis = {each} out of range for value with rank {array.ndim}; "
                    f"use axis=None to reduce over the replicas alone"
                )
    total = _sum([np.asarray(array.sum(axis=axes, dtype=array.dtype)) for array in arrays])
    if op is ReduceOp.MEAN:
        count = sum(int(np.prod([array.shape[each] for each in axes])) for array in arrays)
        with np.errstate(invalid="ignore"):  # of no rows at all the mean is nan, as NumPy has it
            total = np.true_divide(total, count)
    return total[()]


def concatenated(values: Sequence[Any], axis: Any) -> NDArray[Any]:
    """Return arrays one after another along an axis, in fresh memory.

    Raises:
        ValueError: They have no axes, or not this one.
        InvalidArgumentError: Their other axes, or their numbers of axes, differ.
    """
    axis = check_int("axis", axis, minimum=0)
    arrays = [np.asarray(value) for value in values]
    for array in arrays:
        if axis >= array.ndim:
            raise ValueError(
                f"cannot gather values of rank {array.ndim} along axis {axis}; the axis must be "
                "from 0 to rank - 1, so scalars have none: add one with value[None]"
            )
    if len({(*array.shape[:axis], -1, *array.shape[axis + 1 :]) for array in arrays}) > 1:
        raise InvalidArgumentError(
            f"Shape mismatch: {_shapes(arrays)} cannot be gathered along axis {axis}; all axes "
            "but that one must be alike"
        )
    return np.concatenate(arrays, axis=axis)


def _sum(arrays: Sequence[NDArray[Any]]) -> Any:
    if len({array.shape for array in arrays}) > 1:
        raise InvalidArgumentError(
            f"values of {_shapes(arrays)} cannot be reduced element by element; to reduce each "
            "replica's rows first, say which axis they are: axis=0"
        )
    total = arrays[0].copy()
    for array in arrays[1:]:
        if np.can_cast(array.dtype, total.dtype, "safe") and total.ndim:
            total += array
        else:
            total = np.asarray(total + array)
    return total


def _countable(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "b":  # else True + True were True
        return array.astype(np.int64)
    if array.dtype.kind not in "iufcV":
        raise InvalidArgumentError(
            f"values of dtype {array.dtype} cannot be added up; take them with local_results"
        )
    return array


def _axes(axis: Any) -> tuple[int, ...]:
    members = axis if isinstance(axis, tuple | list) else (axis,)
    if any(isinstance(each, bool) or not isinstance(each, int | np.integer) for each in members):
        raise TypeError(f"`axis` must be None, an integer or a tuple of them, but got {axis!r}")
    return tuple(map(int, members))


def _shapes(arrays: Sequence[NDArray[Any]]) -> str:
    return "shapes " + ", ".join(str(array.shape) for array in arrays)
