"""Combination of replicas' values: sums, means and concatenation.

A value is anything that the framework converts to an array; without a framework, NumPy does.
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
    "concatenate_values",
    "finish_reduction",
    "parse_enum",
    "reduce_values",
    "sum_and_count",
]

Axis: TypeAlias = int | Sequence[int] | None


class ReduceOp(enum.Enum):
    """Reduction of values of several replicas.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> value = hr.distribute.PerReplica([1.0, 3.0])
    >>> float(strategy.reduce(hr.distribute.ReduceOp.MEAN, value))
    2.0
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, value: Any) -> ReduceOp:
        """Return the operation, given itself or its name in any case.

        Raises:
            TypeError: If it is neither.
            ValueError: If there is no operation of that name.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise TypeError(
                f"Expected reduce_op to be a ReduceOp, or its name, not: {value!r}; use "
                'ReduceOp.SUM ("SUM") or ReduceOp.MEAN ("MEAN")'
            )
        if value.upper() not in cls.__members__:
            raise ValueError(f"{value!r} is not a valid ReduceOp; use SUM or MEAN")
        return cls[value.upper()]


def reduce_values(
    op: ReduceOp, values: Sequence[Any], axis: Axis = None, framework: Framework = NUMPY
) -> Any:
    """Return the sum or mean of arrays, in fresh memory.

    Args:
        op: Sum or mean.
        values: One array per replica.
        axis: None adds arrays of one shape elementwise. An axis, or several, also reduces each
            array over it; a mean is then over all rows of all replicas, so replicas with more
            rows have more weight.
        framework: Framework of the arrays.

    Raises:
        InvalidArgumentError: If the shapes differ.
        ValueError: If an array has no such axis.
        TypeError: If `axis` is not an integer, tuple or list.
    """
    return finish_reduction(op, *sum_and_count(values, axis, framework), framework)


def sum_and_count(
    values: Sequence[Any], axis: Axis = None, framework: Framework = NUMPY
) -> tuple[Any, int]:
    """Return the sum for `finish_reduction`, and the number of summed rows.

    Raises:
        ValueError, TypeError, InvalidArgumentError: As in `reduce_values`.
    """
    arrays = [framework.as_summable(_to_dense(value)) for value in values]
    if axis is None:
        return _sum(arrays, framework), len(values)
    axes = _axes(axis)
    for array in arrays:
        for each in axes:
            if not -array.ndim <= each < array.ndim:
                raise ValueError(
                    f"axis = {each} out of range for value with rank {array.ndim}; use axis=None "
                    "to reduce over the replicas only"
                )
    total = _sum([framework.sum_axes(array, axes) for array in arrays], framework)
    return total, sum(math.prod(array.shape[each] for each in axes) for array in arrays)


def finish_reduction(op: ReduceOp, total: Any, count: int, framework: Framework = NUMPY) -> Any:
    """Return a sum over `count` rows, or their mean, which is nan for no rows."""
    if op is ReduceOp.MEAN:
        total = framework.divide(total, count)
    return framework.to_user_value(total)


def concatenate_values(values: Sequence[Any], axis: Any, framework: Framework = NUMPY) -> Any:
    """Concatenate arrays along an axis, in fresh memory.

    Raises:
        ValueError: If they have no such axis.
        InvalidArgumentError: If their other axes, or their numbers of axes, differ.
    """
    axis = check_int("axis", axis, minimum=0)
    arrays = [framework.as_array(_to_dense(value)) for value in values]
    for array in arrays:
        if axis >= array.ndim:
            raise ValueError(
                f"cannot gather values of rank {array.ndim} along axis {axis}; the axis must be "
                "from 0 to rank - 1, so scalars have none: add one with value[None]"
            )
    if len({(*array.shape[:axis], -1, *array.shape[axis + 1 :]) for array in arrays}) > 1:
        raise InvalidArgumentError(
            f"Shape mismatch: {_shapes(arrays)} cannot be gathered along axis {axis}; all other "
            "axes must have the same lengths"
        )
    return framework.concatenate(arrays, axis)


def _to_dense(value: Any) -> Any:
    if hasattr(value, "dense_shape"):
        raise InvalidArgumentError(
            f"{value!r:.80} is a sparse value (IndexedSlices), which only variables and tables "
            "of parameter servers can reduce; on replicas, all_gather its indices and its values"
        )
    return value


def _sum(arrays: Sequence[Any], framework: Framework) -> Any:
    if len({array.shape for array in arrays}) > 1:
        raise InvalidArgumentError(
            f"values of {_shapes(arrays)} cannot be reduced elementwise; to reduce each "
            "replica's rows first, pass their axis, such as axis=0"
        )
    return framework.sum_arrays(arrays)


def _axes(axis: Any) -> tuple[int, ...]:
    members = axis if isinstance(axis, tuple | list) else (axis,)
    if any(isinstance(each, bool) or not isinstance(each, int | np.integer) for each in members):
        raise TypeError(f"`axis` must be None, an integer or a tuple of them, but got {axis!r}")
    return tuple(map(int, members))


def _shapes(arrays: Sequence[Any]) -> str:
    return "shapes " + ", ".join(str(tuple(array.shape)) for array in arrays)


# --- Aggregation and synchronization of a variable's copies, as users specify them ----------------

E = TypeVar("E", bound=enum.Enum)


class VariableAggregation(enum.Enum):
    """Aggregation of the values that replicas write to one variable.

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
    """Time at which the copies of a variable are aggregated.

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


def parse_enum(argument: str, kind: type[E], value: Any) -> E:
    """Return the member of an enumeration for a user's argument.

    Args:
        argument: Name of the argument.
        kind: Enumeration.
        value: A member, its name in any case, or a member of that name of another library's
            enumeration.

    Raises:
        ValueError: If there is no such member.
    """
    if isinstance(value, kind):
        return value
    name = str(getattr(value, "name", value)).upper()
    if value is not None and name in kind.__members__:
        return kind[name]
    raise ValueError(
        f"`{argument}` must be one of {', '.join(each.name for each in kind)}, but got {value!r}"
    )
