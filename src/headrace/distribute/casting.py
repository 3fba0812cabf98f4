"""Casts of NumPy arrays to the dtype of a variable, without numbers that are out of its range."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.frameworks.framework import Framework

__all__ = ["cast_exactly", "check_range", "is_floating", "kind_of"]


def check_range(value: Any, dtype: Any, framework: Framework, whose: str) -> None:
    """Check that numbers of Python or NumPy are in the range of a variable's dtype.

    Arrays of other frameworks are not looked at: they may be on a device.

    Args:
        value: What is to be cast.
        dtype: A dtype of the framework.
        framework: Of the variable.
        whose: What it is for, for the error.

    Raises:
        InvalidArgumentError: A number is out of range.
    """
    if isinstance(value, int | float | complex | list | tuple):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            return  # `Framework.array` says why
    if isinstance(value, np.ndarray | np.generic) and kind_of(value.dtype) in "iufc":
        to = framework.numpy(framework.array(np.zeros(0, np.bool_), dtype)).dtype
        if kind_of(to) == "c" or kind_of(value.dtype) != "c":
            cast_exactly(np.asarray(value), to, whose)


def cast_exactly(array: NDArray[Any], dtype: np.dtype[Any], whose: str) -> NDArray[Any]:
    """Return an array in another dtype, in which whole numbers keep their value; floats may round.

    Args:
        array: What is cast.
        dtype: To what.
        whose: What it is for, for the error.

    Raises:
        InvalidArgumentError: A number is too large for the dtype.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if array.dtype.isbuiltin == 1 and np.can_cast(array.dtype, dtype, "safe"):
        return cast
    if kind_of(array.dtype) in "iu" and kind_of(dtype) in "iu":
        wrong = (cast != array) | ((cast < 0) != (array < 0))
    elif kind_of(dtype) in "fc" and kind_of(array.dtype) in "iufc":
        wrong = ~np.isfinite(cast)
        if wrong.any():
            wrong &= np.isfinite(array)
    else:
        return cast
    if wrong.any():
        raise InvalidArgumentError(
            f"{whose} has dtype {dtype.name}, but got the value {array[wrong].flat[0]} of "
            f"dtype {array.dtype}, which is out of its range"
        )
    return cast


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether an optimizer can change it."""
    return dtype.kind == "f" or (dtype.isbuiltin == 2 and "float" in dtype.name)


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return a dtype's kind as NumPy says it: b, i, u, f or c; of those of other packages, too."""
    if is_floating(dtype):
        return "f"
    if dtype.isbuiltin == 2:
        return "u" if dtype.name.startswith("u") else "i"
    return dtype.kind
