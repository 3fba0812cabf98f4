"""Values of several replicas made one: sums, means, and one array after another.

A replica's value is anything that the framework takes for an array; without one it is NumPy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from headrace.arguments import check_int
from headrace.errors import InvalidArgumentError
from headrace.frameworks.framework import Framework
from headrace.frameworks.numpy import FRAMEWORK as NUMPY

__all__ = [
    "Axis",
    "ReduceOp",
    "VariableAggregation",
    "VariableSynchronization",
    "concatenated",
    "finished",
    "member_named",
    "reduced",
    "total_and_count",
]

Axis: TypeAlias = int | Sequence[int] | None


class ReduceOp(enum.Enum):
    """How values of several replicas become one.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> value = hr.distribute.PerReplica([1.0, 3.0])
    >>> float(strategy.reduce(hr.distribute.ReduceOp.MEAN, value))
    2.0
    """

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


def reduced(
    op: ReduceOp, values: Sequence[Any], axis: Axis = None, framework: Framework = NUMPY
) -> Any:
    """Return the sum or mean of arrays, in fresh memory.

    Args:
        op: Which of them.
        values: One for each replica.
        axis: None: they have one shape, and are added element by element. Else an axis, or several,
            over which each is reduced, too; a mean is then over all rows of all replicas: those
            that have more of them count for more.
        framework: Whose arrays they are.

    Raises:
        InvalidArgumentError: Their shapes differ.
        ValueError: An array has no such axis.
        TypeError: `axis` is no integer, tuple or list.
    """
    return finished(op, *total_and_count(values, axis, framework), framework)


def total_and_count(
    values: Sequence[Any], axis: Axis = None, framework: Framework = NUMPY
) -> tuple[Any, int]:
    """Return the sum of which `finished` makes the sum or mean, and over how many rows it is.

    Raises:
        ValueError, TypeError, InvalidArgumentError: As of `reduced`.
    """
    arrays = [framework.countable(_dense(value)) for value in values]
    if axis is None:
        return _sum(arrays, framework), len(values)
    axes = _axes(axis)
    for array in arrays:
        for each in axes:
            if not -array.ndim <= each < array.ndim:
                raise ValueError(
                    f"axis = {each} out of range for value with rank {array.ndim}; "
                    f"use axis=None to reduce over the replicas alone"
                )
    total = _sum([framework.within(array, axes) for array in arrays], framework)
    return total, sum(math.prod(array.shape[each] for each in axes) for array in arrays)


def finished(op: ReduceOp, total: Any, count: int, framework: Framework = NUMPY) -> Any:
    """Return a sum over so many rows, or the mean of them; of no rows at all it is nan."""
    if op is ReduceOp.MEAN:
        total = framework.divided(total, count)
    return framework.plain(total)


def concatenated(values: Sequence[Any], axis: Any, framework: Framework = NUMPY) -> Any:
    """Return arrays one after another along an axis, in fresh memory.

    Raises:
        ValueError: They have no axes, or not this one.
        InvalidArgumentError: Their other axes, or their numbers of axes, differ.
    """
    axis = check_int("axis", axis, minimum=0)
    arrays = [framework.array(_dense(value)) for value in values]
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
    return framework.joined(arrays, axis)


def _dense(value: Any) -> Any:
    if hasattr(value, "dense_shape"):
        raise InvalidArgumentError(
            f"{value!r:.80} are rows by index, which variables and tables of parameter servers add "
            "up; on replicas all_gather the indices, and the values"
        )
    return value


def _sum(arrays: Sequence[Any], framework: Framework) -> Any:
    if len({array.shape for array in arrays}) > 1:
        raise InvalidArgumentError(
            f"values of {_shapes(arrays)} cannot be reduced element by element; to reduce each "
            "replica's rows first, say which axis they are: axis=0"
        )
    return framework.total(arrays)


def _axes(axis: Any) -> tuple[int, ...]:
    members = axis if isinstance(axis, tuple | list) else (axis,)
    if any(isinstance(each, bool) or not isinstance(each, int | np.integer) for each in members):
        raise TypeError(f"`axis` must be None, an integer or a tuple of them, but got {axis!r}")
    return tuple(map(int, members))


def _shapes(arrays: Sequence[Any]) -> str:
    return "shapes " + ", ".join(str(tuple(array.shape)) for array in arrays)


# --- How copies of a variable become one value, and when: by what users say of it -----------------

E = TypeVar("E", bound=enum.Enum)


class VariableAggregation(enum.Enum):
    """How values that replicas have for one variable become one.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     total = hr.Variable(0.0, aggregation=hr.distribute.VariableAggregation.SUM)
    >>> values = hr.distribute.PerReplica([1.0, 2.0])
    >>> _ = strategy.run(lambda x: total.assign_add(x), args=(values,))
    >>> float(total.read())
    3.0
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(enum.Enum):
    """When they do.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     count = hr.Variable(
    ...         0.0,
    ...         synchronization=hr.distribute.VariableSynchronization.ON_READ,
    ...         aggregation=hr.distribute.VariableAggregation.SUM,
    ...     )
    >>> _ = strategy.run(lambda: count.assign_add(1.0))
    >>> float(count.read())
    2.0
    """

    AUTO = "AUTO"
    """ON_WRITE."""
    NONE = "NONE"
    """Not supported."""
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


def member_named(argument: str, kind: type[E], value: Any) -> E:
    """Return which member of an enumeration is meant.

    Args:
        argument: What the user passed it as.
        kind: The enumeration.
        value: A member, or its name in letters of any case; or a member of that name of another
            library's enumeration.

    Raises:
        ValueError: There is no such member.
    """
    if isinstance(value, kind):
        return value
    name = str(getattr(value, "name", value)).upper()
    if value is not None and name in kind.__members__:
        return kind[name]
    raise ValueError(
        f"`{argument}` must be one of {', '.join(each.name for each in kind)}, but got {value!r}"
    )
