"""The interface of compute frameworks: devices by name, arrays on them, and sums over replicas.

Rule 1. A device name consists of a kind and a number, such as "cpu:0". The framework determines
        which devices exist.
Rule 2. An array that is passed to `put` belongs to the framework: the caller neither reads nor
        writes it again, so it need not be copied. `copy_to_device` copies arrays that other code
        may write to.
Rule 3. The result of combining several arrays is on the device of the first.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from headrace.errors import MissingDependencyError

__all__ = [
    "FRAMEWORK_NAMES",
    "Array",
    "Device",
    "Exchange",
    "Framework",
    "device_names",
    "find_framework",
]

Array = Any
"""An array of the framework."""

Device = Any
"""The framework's own device object."""

Exchange: TypeAlias = Callable[[dict[str, str]], list[dict[str, str]]]
"""Sends this worker's key-value pairs to all workers and returns those of all, by rank."""

FrameworkName: TypeAlias = Literal["numpy", "jax", "torch"]
FRAMEWORK_NAMES: tuple[str, ...] = get_args(FrameworkName)

_DEVICE = re.compile(r"(?:.*/)?(?:device:)?([a-z]+)(?::([0-9]+))?")


class Framework(ABC):
    """Devices, arrays on them, and the arithmetic that combines values of replicas.

    Attributes:
        name: Name of the framework in the public API.
        uses_host_memory: Whether its arrays are NumPy arrays in host memory.
    """

    name: str
    uses_host_memory = False

    # --- devices ------------------------------------------------------------------------------

    @abstractmethod
    def default_devices(self) -> list[str]:
        """Return the names of all local accelerators, or of one CPU if there are none."""

    @abstractmethod
    def device(self, name: str) -> Device:
        """Return the device of a canonical name.

        Raises:
            ValueError: If it does not exist; the message lists the existing ones.
        """

    def thread_settings(self) -> Any:
        """Return the calling thread's framework settings, which replica threads inherit."""
        return None

    def replica_context(self, device: Device, settings: Any) -> AbstractContextManager[Any] | None:
        """Return the context manager in which a replica's code runs, or None if it needs none.

        Args:
            device: Default device for arrays that the code creates.
            settings: What `thread_settings` returned on the thread that called `run`.
        """
        return None

    def check_not_sharded(self, values: Any) -> None:  # noqa: B027 -- only JAX shards arrays
        """Reject arrays that are sharded over devices, where each replica needs its own value.

        Raises:
            InvalidArgumentError: If `values`, a nested structure, contains such an array.
        """

    # --- arrays -------------------------------------------------------------------------------

    def replica_programs(self) -> Any:
        """Return the module that compiles one program for all replicas (`jax_replica_program`).

        Raises:
            ValueError: If the framework has no such programs.
        """
        raise ValueError(
            "a compiled step or a global array for all replicas needs a strategy with "
            f'framework="jax", but this one has framework={self.name!r}'
        )

    @abstractmethod
    def put(self, values: Sequence[Any], devices: Sequence[Device]) -> list[Array]:
        """Put NumPy arrays and scalars on devices; they belong to the framework then (rule 2).

        Strings cannot be on a device and are returned unchanged.
        """

    @abstractmethod
    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype that an array of this NumPy dtype has after `put`."""

    @abstractmethod
    def as_array(self, value: Any, dtype: Any = None) -> Array:
        """Convert a number or an array of any kind to an array; an array is not copied.

        Raises:
            InvalidArgumentError: If the value cannot be converted to numbers.
        """

    @abstractmethod
    def copy_to_device(self, value: Any, device: Device) -> Array:
        """Return an array on a device, in memory that no other code writes to (rule 2)."""

    @abstractmethod
    def move_to_device(self, array: Array, device: Device) -> Array:
        """Return an array on a device; no copy if it is there already."""

    @abstractmethod
    def replicate(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Return one array for each device; writing to one does not change the others."""

    @abstractmethod
    def to_numpy(self, array: Array) -> Any:
        """Convert an array to NumPy, without a copy where possible."""

    @abstractmethod
    def dtype_kind(self, dtype: Any) -> str:
        """Return NumPy's kind code of a dtype: b, i, u, f or c."""

    @abstractmethod
    def can_cast(self, dtype: Any, to: Any) -> bool:
        """Return whether a cast keeps the kind of number ("same_kind")."""

    def as_dtype(self, dtype: Any) -> Any:
        """Convert a dtype in any notation to the framework's own."""
        return np.dtype(dtype)

    def to_user_value(self, array: Array) -> Any:
        """Convert an array to what the public API returns."""
        return array

    def from_numpy(self, value: Any) -> Any:
        """Convert NumPy numbers and arrays to arrays; return other values unchanged.

        Operators that users apply to the result are then the framework's own.
        """
        return self.as_array(value) if isinstance(value, np.ndarray | np.generic) else value

    # --- gradients ----------------------------------------------------------------------------

    def traced_indices(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the indices of the values whose gradients are recorded.

        Raises:
            FailedPreconditionError: If a value is traced in a way that replicas cannot combine.
        """
        return ()

    def with_gradient(
        self,
        forward: Callable[[Sequence[Any]], list[Array]],
        backward: Callable[[Sequence[Array]], list[Array]],
        values: Sequence[Any],
        traced: Sequence[int],
    ) -> list[Array]:
        """Return `forward(values)`, with `backward` as its gradient.

        Args:
            forward: Called with untraced values; returns one array for each.
            backward: Called with the upstream gradients of the results at `traced`; returns the
                gradients of the values there. It may itself be differentiated.
            values: Arrays and numbers.
            traced: What `traced_indices` returned for `values`.
        """
        raise NotImplementedError

    # --- combining values of replicas ---------------------------------------------------------

    @abstractmethod
    def as_summable(self, value: Any) -> Array:
        """Convert a value to an array that can be summed; bool becomes an integer dtype.

        Raises:
            InvalidArgumentError: If the value cannot be summed.
        """

    @abstractmethod
    def sum_arrays(self, arrays: Sequence[Array]) -> Array:
        """Return the sum of arrays of equal shape, in new memory."""

    @abstractmethod
    def sum_axes(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Return the sum over the given axes, in the dtype of the array."""

    @abstractmethod
    def divide(self, array: Array, count: int) -> Array:
        """Return the true quotient; division by 0 gives nan or infinity."""

    def join_workers(
        self, rank: int, size: int, host: str | None, timeout: float, exchange: Exchange
    ) -> bool:
        """Form one program from the processes of all workers, if the framework supports that.

        All workers call it before they request devices. See `worker_all_reduce` for the arguments;
        `host` is None if connections must be authenticated with keys.

        Returns:
            Whether the framework's own communication between workers may be used: what all workers
            agreed on, or, for frameworks without such a program, whether no keys are required.
        """
        return host is not None

    def worker_all_reduce(
        self, rank: int, size: int, host: str, timeout: float, exchange: Exchange, device: Device
    ) -> Any:
        """Return an object that sums large arrays over all workers; None if not supported.

        It has the methods `supports(array)` and `all_reduce(arrays, check_peers)`; see
        `torch_workers.GlooAllReduce`.

        Args:
            rank: Rank of this worker.
            size: Number of workers.
            host: IP address of the interface to listen on.
            timeout: Maximum seconds of an operation.
            exchange: Sends this worker's key-value pairs and returns those of all workers, by rank.
                All workers call it the same number of times.
            device: Device of this worker's arrays.
        """
        return None

    @abstractmethod
    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Concatenate arrays along an axis, in new memory."""


def find_framework(name: Any) -> Framework:
    """Return a framework by name; None stands for NumPy.

    Raises:
        ValueError: If the name is unknown.
        MissingDependencyError: If the framework is not installed.
    """
    if name is not None and name not in FRAMEWORK_NAMES:
        raise ValueError(
            f"`framework` must be one of {', '.join(map(repr, FRAMEWORK_NAMES))}, but got {name!r}"
        )
    package = name or "numpy"
    try:
        module = importlib.import_module(f"headrace.frameworks.{package}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headrace"):
            raise
        raise MissingDependencyError(
            f"framework={package!r} requires the package {error.name}, which is not installed: "
            f"pip install 'headrace[{package}]'"
        ) from error
    found: Framework = module.FRAMEWORK
    return found


def device_names(devices: Any, framework: Framework) -> list[str]:
    """Return canonical device names, "kind:number"; without any, the framework's default devices.

    Raises:
        TypeError: If `devices` is not a list of strings.
        ValueError: If a name occurs twice, or the framework has no such device.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence | None):
        raise TypeError(
            f'`devices` must be a list of names, such as ["cpu:0", "cpu:1"], but got {devices!r}'
        )
    names = [_canonical_name(device) for device in devices or framework.default_devices()]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"No duplicates allowed in `devices` argument, but {', '.join(duplicates)} occurs "
            "more than once; number logical CPUs as cpu:0, cpu:1, ..."
        )
    for name in names:
        framework.device(name)
    return names


def _canonical_name(device: Any) -> str:
    if not isinstance(device, str):
        raise TypeError(f'a device must be a name, such as "cpu:0", but got {device!r}')
    found = _DEVICE.fullmatch(device.lower())
    if found is None:
        raise ValueError(f'a device name must look like "cpu:0" or "gpu:1", but got {device!r}')
    kind, number = found.groups()
    return f"{kind}:{int(number or 0)}"
