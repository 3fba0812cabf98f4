"""What a compute framework owes to strategies: devices by name, and arrays on them.

Rule 1. A device has a name of a kind and a number, such as "cpu:0". How many there are of a kind is
        the framework's to say.
Rule 2. An array that is `put` belongs to the framework from then on: its giver neither reads nor
        writes it again, so that it need not be copied. One that is `copy_to_device` is copied where
        anybody else could write into it.
Rule 3. Values that become one are on the device of the first.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from headrace.errors import FailedPreconditionError

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
"""What the framework itself calls a device."""

Exchange: TypeAlias = Callable[[dict[str, str]], list[dict[str, str]]]
"""Given what this worker has to say, returns what all have to say, by rank."""

FrameworkName: TypeAlias = Literal["numpy", "jax", "torch"]
FRAMEWORK_NAMES: tuple[str, ...] = get_args(FrameworkName)

_DEVICE = re.compile(r"(?:.*/)?(?:device:)?([a-z]+)(?::([0-9]+))?")


class Framework(ABC):
    """Devices, arrays on them, and the little arithmetic by which replicas' values become one.

    Attributes:
        name: As users say it.
        uses_host_memory: Whether the host's arrays are the framework's own.
    """

    name: str
    uses_host_memory = False

    # --- devices ------------------------------------------------------------------------------

    @abstractmethod
    def default_devices(self) -> list[str]:
        """Return the names of all accelerators here, or of one CPU if there are none."""

    @abstractmethod
    def device(self, name: str) -> Device:
        """Return the device of a canonical name.

        Raises:
            ValueError: There is none; the message names those that there are.
        """

    def thread_settings(self) -> Any:
        """Return what holds for the calling thread alone, and is to hold on the replicas too."""
        return None

    def replica_context(self, device: Device, settings: Any) -> AbstractContextManager[Any] | None:
        """Return in what a replica's code is to run; None: in nothing.

        Args:
            device: Where arrays that are made without a device are to be.
            settings: What `thread_settings` returned on the thread that called `run`.
        """
        return None

    def check_not_sharded(self, values: Any) -> None:  # noqa: B027 -- others split none
        """Refuse arrays that are split over devices, where each replica has a value of its own.

        Raises:
            InvalidArgumentError: `values`, a structure, holds one.
        """

    # --- arrays -------------------------------------------------------------------------------

    def replica_programs(self) -> Any:
        """Return the room that makes one program for all replicas (`jax_program`).

        Raises:
            ValueError: The framework has no such programs.
        """
        raise ValueError(
            "one program, or one array, for all replicas takes a strategy of JAX, and this one has "
            f'framework={self.name!r}: make it with framework="jax"'
        )

    @abstractmethod
    def put(self, values: Sequence[Any], devices: Sequence[Device]) -> list[Array]:
        """Return arrays and scalars of NumPy on devices; they are given away (rule 2).

        Strings have no place on a device, and are returned as they are.
        """

    @abstractmethod
    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the NumPy dtype of what `put` makes of an array of this one."""

    @abstractmethod
    def as_array(self, value: Any, dtype: Any = None) -> Array:
        """Return a number, or an array of any kind, as an array; not copied if it is one.

        Raises:
            InvalidArgumentError: It is nothing that numbers can be made of.
        """

    @abstractmethod
    def copy_to_device(self, value: Any, device: Device) -> Array:
        """Return an array on a device that nobody else writes into (rule 2)."""

    @abstractmethod
    def move_to_device(self, array: Array, device: Device) -> Array:
        """Return an array on a device, which it may be on already."""

    @abstractmethod
    def replicate(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Return an array for each device; what is written into one is not seen in others."""

    @abstractmethod
    def to_numpy(self, array: Array) -> Any:
        """Return an array as one of NumPy, in the same memory where that is possible."""

    @abstractmethod
    def dtype_kind(self, dtype: Any) -> str:
        """Return a dtype's kind as NumPy says it: b, i, u, f or c."""

    @abstractmethod
    def can_cast(self, dtype: Any, to: Any) -> bool:
        """Say whether a cast keeps the kind of number ("same_kind")."""

    def as_dtype(self, dtype: Any) -> Any:
        """Return the framework's own dtype for one that a user names in any way."""
        return np.dtype(dtype)

    def to_user_value(self, array: Array) -> Any:
        """Return what users see of an array."""
        return array

    def from_numpy(self, value: Any) -> Any:
        """Return a number or an array of NumPy as an array; others as they are.

        What the user's operators then do is the framework's own.
        """
        return self.as_array(value) if isinstance(value, np.ndarray | np.generic) else value

    # --- gradients ----------------------------------------------------------------------------

    def traced_indices(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the indices of the values whose gradients are recorded.

        Raises:
            FailedPreconditionError: A value is traced where replicas cannot meet.
        """
        return ()

    def with_gradient(
        self,
        forward: Callable[[Sequence[Any]], list[Array]],
        backward: Callable[[Sequence[Array]], list[Array]],
        values: Sequence[Any],
        traced: Sequence[int],
    ) -> list[Array]:
        """Return `forward(values)`, with a gradient of its own.

        Args:
            forward: Called with values that are not traced; returns as many arrays.
            backward: Called with the upstream gradients of the results at `traced_indices`; returns
                those of the values there. It may be differentiated itself.
            values: Arrays and numbers.
            traced: What `traced_indices` returned for them.
        """
        raise NotImplementedError

    # --- values that become one ---------------------------------------------------------------

    @abstractmethod
    def as_summable(self, value: Any) -> Array:
        """Return a value as an array that can be added up: of no bool, which would stay one.

        Raises:
            InvalidArgumentError: It is nothing that can be added up.
        """

    @abstractmethod
    def sum_arrays(self, arrays: Sequence[Array]) -> Array:
        """Return the sum of arrays of one shape, in fresh memory."""

    @abstractmethod
    def sum_axes(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Return the sum over axes, in the dtype of the array."""

    @abstractmethod
    def divide(self, array: Array, count: int) -> Array:
        """Return the true quotient; by 0 it is nan or infinite."""

    def join_workers(
        self, rank: int, size: int, host: str | None, timeout: float, exchange: Exchange
    ) -> bool:
        """Make this process one with those of the other workers, where the framework has that.

        All workers call it, before they ask for devices. See `worker_all_reduce` for the arguments.

        Returns:
            Whether the framework's own ways between workers may be used: by what was agreed with
            the others, or, where nothing has to be, because no keys are wanted (`host` is given).
        """
        return host is not None

    def worker_all_reduce(
        self, rank: int, size: int, host: str, timeout: float, exchange: Exchange, device: Device
    ) -> Any:
        """Return what adds up large arrays of several workers; None: the framework has nothing.

        It has `adds(array)` and `sums(arrays, look)`; see `torch_workers`, also for the arguments.

        Args:
            rank: Of this worker.
            size: How many there are.
            host: The number of this machine's interface at which it listens.
            timeout: Seconds that an operation may take.
            exchange: Given what this worker has to say, returns what all have to say, by rank. All
                workers call it equally often.
            device: Where this worker's arrays are.
        """
        return None

    @abstractmethod
    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return arrays one after another along an axis, in fresh memory."""


def find_framework(name: Any) -> Framework:
    """Return a framework by its name; None is NumPy.

    Raises:
        ValueError: There is none of that name.
        FailedPreconditionError: It is not installed.
    """
    if name is not None and name not in FRAMEWORK_NAMES:
        raise ValueError(
            f"`framework` must be one of {', '.join(map(repr, FRAMEWORK_NAMES))}, but got {name!r}"
        )
    wanted = name or "numpy"
    try:
        module = importlib.import_module(f"headrace.frameworks.{wanted}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headrace"):
            raise
        raise FailedPreconditionError(
            f"framework={wanted!r} needs the package {error.name}, which is not installed here; "
            f"pip install 'headrace[{wanted}]'"
        ) from error
    found: Framework = module.FRAMEWORK
    return found


def device_names(devices: Any, framework: Framework) -> list[str]:
    """Return the names of devices as "kind:number"; without any, those that the framework takes.

    Raises:
        TypeError: They are no strings.
        ValueError: One stands there twice, or is no device that the framework has here.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence | None):
        raise TypeError(
            f'`devices` must be a list of names, such as ["cpu:0", "cpu:1"], but got {devices!r}'
        )
    names = [_canonical_name(device) for device in devices or framework.default_devices()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"No duplicates allowed in `devices` argument, but {', '.join(twice)} stands there "
            "several times; logical CPUs have numbers of their own: cpu:0, cpu:1, ..."
        )
    for name in names:
        framework.device(name)
    return names


def _canonical_name(device: Any) -> str:
    if not isinstance(device, str):
        raise TypeError(f'a device must be a name, such as "cpu:0", but got {device!r}')
    found = _DEVICE.fullmatch(device.lower())
    if found is None:
        raise ValueError(f'a device must be named as "cpu:0" or "gpu:1" are, but got {device!r}')
    kind, number = found.groups()
    return f"{kind}:{int(number or 0)}"
