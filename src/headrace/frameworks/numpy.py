"""The NumPy framework: any number of logical CPUs, whose arrays are in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.frameworks.framework import Device, Framework

__all__ = ["FRAMEWORK", "NumpyFramework"]


class NumpyFramework(Framework):
    """Arrays in host memory; see `Framework`."""

    name = "numpy"
    uses_host_memory = True

    def default_devices(self) -> list[str]:
        """Return one CPU."""
        return ["cpu:0"]

    def device(self, name: str) -> Device:
        """Return the name; a CPU of any number exists."""
        if not name.startswith("cpu:"):
            raise ValueError(
                f'device {name!r} cannot hold NumPy arrays: with framework="numpy" devices are '
                'cpu:0, cpu:1, ...; for accelerators use framework="jax" or "torch"'
            )
        return name

    def put(self, values: Sequence[Any], devices: Sequence[Device]) -> list[Any]:
        """Return the values; they are in host memory already."""
        return list(values)

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype unchanged."""
        return dtype

    def as_array(self, value: Any, dtype: Any = None) -> NDArray[Any]:
        """Convert with `np.asarray`."""
        return np.asarray(value, dtype)

    def copy_to_device(self, value: Any, device: Device) -> NDArray[Any]:
        """Return a read-only array; a writeable one is copied."""
        if not isinstance(value, np.ndarray) or value.flags.writeable:
            value = np.array(value)
            value.flags.writeable = False
        result: NDArray[Any] = value
        return result

    def move_to_device(self, array: Any, device: Device) -> Any:
        """Return the array; all devices share the host's memory."""
        return array

    def replicate(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Copy arrays for all devices but the first; scalars are immutable and not copied."""
        is_array = isinstance(value, np.ndarray)
        return [value, *(value.copy() if is_array else value for _ in devices[1:])]

    def to_numpy(self, array: Any) -> Any:
        """Return the array."""
        return array

    def dtype_kind(self, dtype: Any) -> str:
        """Return NumPy's kind code; for extension dtypes derive it from the name."""
        found = np.dtype(dtype)
        kind: str = found.kind
        if kind != "V":
            return kind
        return {"i": "i", "u": "u"}.get(found.name[0], "f")

    def can_cast(self, dtype: Any, to: Any) -> bool:
        """Apply NumPy's rule."""
        return np.can_cast(dtype, to, "same_kind")

    def to_user_value(self, array: Any) -> Any:
        """Return an array without axes as a scalar."""
        return array[()]

    def from_numpy(self, value: Any) -> Any:
        """Return the value unchanged."""
        return value

    def as_summable(self, value: Any) -> NDArray[Any]:
        """Convert numbers; True counts as 1."""
        array = np.asarray(value)
        if array.dtype.kind == "b":  # True + True would be True
            return array.astype(np.int64)
        if array.dtype.kind not in "iufcV":
            raise InvalidArgumentError(
                f"values of dtype {array.dtype} cannot be summed; read them with local_results"
            )
        return array

    def sum_arrays(self, arrays: Sequence[NDArray[Any]]) -> Any:
        """Sum one after another, in a copy of the first array if its dtype can hold the others."""
        total: Any = arrays[0].copy()
        for array in arrays[1:]:
            if total.ndim and np.can_cast(array.dtype, total.dtype, "safe"):
                total += array
            else:
                total = np.asarray(total + array)
        return total

    def sum_axes(self, array: NDArray[Any], axes: tuple[int, ...]) -> Any:
        """Sum with NumPy."""
        return np.asarray(array.sum(axis=axes, dtype=array.dtype))

    def divide(self, array: NDArray[Any], count: int) -> Any:
        """Divide with NumPy."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.true_divide(array, count)

    def concatenate(self, arrays: Sequence[NDArray[Any]], axis: int) -> Any:
        """Concatenate with NumPy."""
        return np.concatenate(arrays, axis=axis)


FRAMEWORK = NumpyFramework()
