"""Reading and changing rows of a variable by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.bag_combiner import check_combiner, combine_array_bags, row_indices
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks.framework import Framework

__all__ = [
    "RowAccess",
    "RowSlices",
    "cast_exactly",
    "check_combinable",
    "check_range",
    "combine_contributions",
    "dtype_kind",
    "group_contributions",
    "is_floating",
    "row_slices",
    "scatter_rows",
]


def _divide(array: NDArray[Any], ids: NDArray[np.int64], values: NDArray[Any]) -> None:
    quotient = np.floor_divide if array.dtype.kind in "iu" else np.true_divide
    quotient.at(array, ids, values)


def _update(array: NDArray[Any], ids: NDArray[np.int64], values: NDArray[Any]) -> None:
    array[ids] = values


_UPDATES: dict[str, Callable[[NDArray[Any], NDArray[np.int64], NDArray[Any]], None]] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": _divide,
    "min": np.minimum.at,
    "max": np.maximum.at,
    "update": _update,
}


def scatter_rows(
    operation: str, array: NDArray[Any], ids: NDArray[np.int64], values: NDArray[Any]
) -> NDArray[Any]:
    """Return a copy of an array with some rows changed, one value after another.

    >>> scatter_rows("add", np.zeros(3), np.array([1, 1]), np.array([2.0, 3.0])).tolist()
    [0.0, 5.0, 0.0]
    """
    changed = array.copy()
    _UPDATES[operation](changed, ids, values)
    return changed


class RowSlices(NamedTuple):
    """Rows of a variable, and a value for each."""

    ids: NDArray[np.int64]
    values: NDArray[Any]


def row_slices(ids: Any, values: Any, variable: Any) -> RowSlices:
    """Return the addressed rows of a variable, and a value for each.

    Args:
        ids: Integers; or an object with `indices` and `values`.
        values: One value for each id, or one for all.
        variable: Variable that has the rows.

    Raises:
        TypeError: If the ids are not integers, or the variable's dtype would lose information.
        ValueError: If the variable has no such rows, or the values do not match them.
    """
    if hasattr(ids, "indices"):
        ids, values = ids.indices, ids.values
    framework, shape, owner = variable.framework, variable.shape, f"Variable {variable.name!r}"
    rows = row_indices(variable, ids)
    if rows.ndim != 1:
        raise ValueError(
            f"`ids` of a scatter into {owner} must be 1-D, but have shape {rows.shape}"
        )
    check_range(values, variable.dtype, framework, owner)
    array = framework.as_array(values)
    if not framework.can_cast(array.dtype, variable.dtype):
        raise TypeError(
            f"values of dtype {array.dtype} cannot be cast to dtype {variable.dtype} of {owner} "
            "without loss; convert them with astype"
        )
    expected = (len(rows), *shape[1:])
    converted = np.asarray(framework.to_numpy(framework.as_array(array, variable.dtype)))
    if converted.ndim < len(expected):
        converted = np.broadcast_to(converted, expected)
    if converted.shape != expected:
        raise ValueError(
            f"values for these rows of {owner} must have shape {expected}, but have shape "
            f"{converted.shape}"
        )
    return RowSlices(rows, converted)


def check_combinable(operation: str, aggregation: str, name: str) -> None:
    """Raise unless replicas' changes of rows can be combined as `aggregation` says.

    Raises:
        NotImplementedError: If they cannot.
    """
    if operation in ("min", "max", "update") and aggregation in ("SUM", "MEAN"):
        raise NotImplementedError(
            f"scatter_{operation} on the replicas of Variable {name!r} is not supported with "
            f"aggregation {aggregation}: use NONE or ONLY_FIRST_REPLICA, or call it outside of "
            "the replicas"
        )


def group_contributions(contributions: Sequence[tuple[Any, str, Any]]) -> list[Any]:
    """Return the replicas' contributions to one joint write.

    Args:
        contributions: By replica: the variable, the method, and the values.

    Raises:
        FailedPreconditionError: If they write different variables, or use different methods.
    """
    (variable, method, _), *others = contributions
    if any(each is not variable or other != method for each, other, _ in others):
        raise FailedPreconditionError(
            "all replicas must call the same method of the same variable, but they called: "
            + ", ".join(f"{other} of {each.name!r}" for each, other, _ in contributions)
        )
    return [value for _, _, value in contributions]


def combine_contributions(
    contributions: Sequence[RowSlices], aggregation: str, strategy: Any
) -> RowSlices:
    """Combine the row changes of the replicas of all workers into one change."""
    if aggregation == "ONLY_FIRST_REPLICA":
        return RowSlices(
            *(strategy.broadcast_first(each, "rows of a Variable") for each in contributions[0])
        )
    ids, values = (
        np.asarray(strategy.framework.to_numpy(strategy.gather_replicas(parts, 0)))
        for parts in zip(*contributions, strict=True)
    )
    if aggregation == "MEAN":
        values = values / np.asarray(strategy.num_replicas_in_sync, values.dtype)
    return RowSlices(ids.astype(np.int64), values)


class RowAccess(ABC):
    """Base class of variables with access to rows by index."""

    @abstractmethod
    def read(self) -> Any:
        """Return the array."""

    def gather(self, ids: Any, combiner: str | None = None) -> Any:
        """Return the rows with the given ids, in their order; with a combiner, one row per bag.

        Args:
            ids: Integers of any shape, from 0 to the number of rows - 1.
            combiner: Combines each bag (the ids along the last axis) into one row: "sum", "mean",
                or "sqrtn", the sum divided by the square root of the bag size. None returns all
                rows.

        Raises:
            InvalidArgumentError: If an id is out of range; the message names it.
            ValueError: If the combiner is unknown, or not supported for this dtype.
        """
        rows, value = row_indices(self, ids), self.read()
        if combiner is None:
            return value[rows]
        variable: Any = self
        kind = variable.framework.dtype_kind(variable.dtype)
        check_combiner(combiner, rows, f"Variable {variable.name!r}", owner_kind=kind)
        return combine_array_bags(value, rows, combiner, variable.framework)

    sparse_read = gather

    @abstractmethod
    def _scatter(self, operation: str, ids: Any, values: Any) -> Any:
        """Change rows as `operation` says, and return the new value."""

    def scatter_add(self, ids: Any, values: Any = None) -> Any:
        """Add a value to each addressed row, and return the variable's new value.

        An id that occurs twice changes its row twice. In replica context all replicas must call it:
        their changes are combined as `aggregation` says, and applied once. With MEAN, each
        replica's values are divided by the number of replicas.

        Args:
            ids: Integers, 1-D; or an `IndexedSlices`, without `values`.
            values: One value for each id, or one for all.
        """
        return self._scatter("add", ids, values)

    def scatter_sub(self, ids: Any, values: Any = None) -> Any:
        """Subtract a value from each addressed row; see `scatter_add`."""
        return self._scatter("sub", ids, values)

    def scatter_mul(self, ids: Any, values: Any = None) -> Any:
        """Multiply each addressed row by a value; see `scatter_add`."""
        return self._scatter("mul", ids, values)

    def scatter_div(self, ids: Any, values: Any = None) -> Any:
        """Divide each addressed row by a value; see `scatter_add`."""
        return self._scatter("div", ids, values)

    def scatter_min(self, ids: Any, values: Any = None) -> Any:
        """Set each addressed row to its elementwise minimum with a value; see `scatter_add`."""
        return self._scatter("min", ids, values)

    def scatter_max(self, ids: Any, values: Any = None) -> Any:
        """Set each addressed row to its elementwise maximum with a value; see `scatter_add`."""
        return self._scatter("max", ids, values)

    def scatter_update(self, ids: Any, values: Any = None) -> Any:
        """Replace each addressed row; the last value of a repeated id wins. See `scatter_add`."""
        return self._scatter("update", ids, values)


# --- Casts to the dtype of a variable, without numbers out of its range ---------------------------


def check_range(value: Any, dtype: Any, framework: Framework, owner: str) -> None:
    """Check that Python or NumPy numbers are in the range of a variable's dtype.

    Arrays of other frameworks are not checked: they may be on a device.

    Args:
        value: Value to cast.
        dtype: A dtype of the framework.
        framework: Framework of the variable.
        owner: Name of the target, for the error.

    Raises:
        InvalidArgumentError: If a number is out of range.
    """
    if isinstance(value, int | float | complex | list | tuple):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            return  # `Framework.as_array` says why
    if isinstance(value, np.ndarray | np.generic) and dtype_kind(value.dtype) in "iufc":
        target = framework.to_numpy(framework.as_array(np.zeros(0, np.bool_), dtype)).dtype
        if dtype_kind(target) == "c" or dtype_kind(value.dtype) != "c":
            cast_exactly(np.asarray(value), target, owner)


def cast_exactly(array: NDArray[Any], dtype: np.dtype[Any], owner: str) -> NDArray[Any]:
    """Return an array in another dtype; integers must keep their value, floats may be rounded.

    Args:
        array: Array to cast.
        dtype: Target dtype.
        owner: Name of the target, for the error.

    Raises:
        InvalidArgumentError: If a number is too large for the dtype.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if array.dtype.isbuiltin == 1 and np.can_cast(array.dtype, dtype, "safe"):
        return cast
    if dtype_kind(array.dtype) in "iu" and dtype_kind(dtype) in "iu":
        invalid = (cast != array) | ((cast < 0) != (array < 0))
    elif dtype_kind(dtype) in "fc" and dtype_kind(array.dtype) in "iufc":
        invalid = ~np.isfinite(cast)
        if invalid.any():
            invalid &= np.isfinite(array)
    else:
        return cast
    if invalid.any():
        raise InvalidArgumentError(
            f"{owner} has dtype {dtype.name}, but got the value {array[invalid].flat[0]} of "
            f"dtype {array.dtype}, which is out of its range"
        )
    return cast


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a floating-point type, so that optimizers can change values."""
    return dtype.kind == "f" or (dtype.isbuiltin == 2 and "float" in dtype.name)


def dtype_kind(dtype: np.dtype[Any]) -> str:
    """Return a dtype's NumPy kind (b, i, u, f or c), also for dtypes of other packages."""
    if is_floating(dtype):
        return "f"
    if dtype.isbuiltin == 2:
        return "u" if dtype.name.startswith("u") else "i"
    return dtype.kind
