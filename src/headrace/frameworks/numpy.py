"""NumPy: any number of logical CPUs, whose arrays are the host's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.frameworks.framework import Device, Framework

__all__ = ["FRAMEWORK", "NumpyFramework"]


class NumpyFramework(Framework):
    """Arrays on the host (`Framework`)."""

    name = "numpy"
    uses_host_memory = True

    def default_devices(self) -> list[str]:
        """One CPU."""
        return ["cpu:0"]

    def device(self, name: str) -> Device:
        """Every CPU there may be is there."""
        if not name.startswith("cpu:"):
            raise ValueError(
                f'device {name!r} cannot hold NumPy arrays: with framework="numpy" devices are '
                'cpu:0, cpu:1, ...; accelerators are those of framework="jax" or "torch"'
            )
        return name

    def put(self, values: Sequence[Any], devices: Sequence[Device]) -> list[Any]:
        """They are there already."""
        return list(values)

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """It stays."""
        return dtype

    def as_array(self, value: Any, dtype: Any = None) -> NDArray[Any]:
        """Whatever NumPy takes for an array."""
        return np.asarray(value, dtype)

    def copy_to_device(self, value: Any, device: Device) -> NDArray[Any]:
        """One that nobody can write into."""
        if not isinstance(value, np.ndarray) or value.flags.writeable:
            value = np.array(value)
            value.flags.writeable = False
        kept: NDArray[Any] = value
        return kept

    def move_to_device(self, array: Any, device: Device) -> Any:
        """It is there already."""
        return array

    def replicate(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Copies of arrays; scalars do not change, and the first may have it as it is."""
        is_array = isinstance(value, np.ndarray)
        return [value, *(value.copy() if is_array else value for _ in devices[1:])]

    def to_numpy(self, array: Any) -> Any:
        """It is one."""
        return array

    def dtype_kind(self, dtype: Any) -> str:
        """NumPy's own; of what other packages add, that of its name."""
        found = np.dtype(dtype)
        kind: str = found.kind
        if kind != "V":
            return kind
        return {"i": "i", "u": "u"}.get(found.name[0], "f")

    def can_cast(self, dtype: Any, to: Any) -> bool:
        """NumPy's own rule."""
        return np.can_cast(dtype, to, "same_kind")

    def to_user_value(self, array: Any) -> Any:
        """A scalar of what has no axes."""
        return array[()]

    def from_numpy(self, value: Any) -> Any:
        """As it is: NumPy takes anything."""
        return value

    def as_summable(self, value: Any) -> NDArray[Any]:
        """Numbers; True counts as 1."""
        array = np.asarray(value)
        if array.dtype.kind == "b":  # else True + True were True
            return array.astype(np.int64)
        if array.dtype.kind not in "iufcV":
            raise InvalidArgumentError(
                f"values of dtype {array.dtype} cannot be added up; take them with local_results"
            )
        return array

    def sum_arrays(self, arrays: Sequence[NDArray[Any]]) -> Any:
        """One after another, in the first one's copy where it holds the others."""
        total: Any = arrays[0].copy()
        for array in arrays[1:]:
            if total.ndim and np.can_cast(array.dtype, total.dtype, "safe"):
                total += array
            else:
                total = np.asarray(total + array)
        return total

    def sum_axes(self, array: NDArray[Any], axes: tuple[int, ...]) -> Any:
        """NumPy's sum."""
        return np.asarray(array.sum(axis=axes, dtype=array.dtype))

    def divide(self, array: NDArray[Any], count: int) -> Any:
        """NumPy's quotient."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.true_divide(array, count)

    def concatenate(self, arrays: Sequence[NDArray[Any]], axis: int) -> Any:
        """NumPy's concatenation."""
        return np.concatenate(arrays, axis=axis)


FRAMEWORK = NumpyFramework()
