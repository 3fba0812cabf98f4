"""What a compute framework owes to strategies: devices by name, and arrays on them.

Rule 1. A device has a name of a kind and a number, such as "cpu:0". How many there are of a kind is
        the framework's to say.
Rule 2. An array that is `put` belongs to the framework from then on: its giver neither reads nor
        writes it again, so that it need not be copied. One that is `kept` is copied where anybody
        else could write into it.
Rule 3. Values that become one are on the device of the first.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

from headrace.errors import FailedPreconditionError

__all__ = [
    "NAMES",
    "Array",
    "Device",
    "Exchange",
    "Framework",
    "device_names",
    "framework_named",
]

Array = Any
"""An array of the framework."""

Device = Any
"""What the framework itself calls a device."""

Exchange: TypeAlias = Callable[[dict[str, str]], list[dict[str, str]]]
"""Given what this worker has to say, returns what all have to say, by rank."""

NAMES = ("numpy", "jax", "torch")

_DEVICE = re.compile(r"(?:.*/)?(?:device:)?([a-z]+)(?::([0-9]+))?")


class Framework(ABC):
    """Devices, arrays on them, and the little arithmetic by which replicas' values become one.

    Attributes:
        name: As users say it.
        shares_host: Whether the host's arrays are the framework's own.
    """

    name: str
    shares_host = False

    # --- devices ------------------------------------------------------------------------------

    @abstractmethod
    def defaults(self) -> list[str]:
        """Return the names of all accelerators here, or of one CPU if there are none."""

    @abstractmethod
    def device(self, name: str) -> Device:
        """Return the device of a canonical name.

        Raises:
            ValueError: There is none; the message names those that there are.
        """

    def settings(self) -> Any:
        """Return what holds for the calling thread alone, and is to hold on the replicas too."""
        return None

    def on_replica(self, device: Device, settings: Any) -> AbstractContextManager[Any] | None:
        """Return in what a replica's code is to run; None: in nothing.

        Args:
            device: Where arrays that are made without a device are to be.
            settings: What `settings` returned on the thread that called `run`.
        """
        return None

    def check_not_split(self, values: Any) -> None:  # noqa: B027 -- others split none
        """Refuse arrays that are split over devices, where each replica has a value of its own.

        Raises:
            InvalidArgumentError: `values`, a structure, holds one.
        """

    # --- arrays -------------------------------------------------------------------------------

    def program(self) -> Any:
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
    def dtype_put(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the NumPy dtype of what `put` makes of an array of this one."""

    @abstractmethod
    def array(self, value: Any, dtype: Any = None) -> Array:
        """Return a number, or an array of any kind, as an array; not copied if it is one.

        Raises:
            InvalidArgumentError: It is nothing that numbers can be made of.
        """

    @abstractmethod
    def kept(self, value: Any, device: Device) -> Array:
        """Return an array on a device that nobody else writes into (rule 2)."""

    @abstractmethod
    def moved(self, array: Array, device: Device) -> Array:
        """Return an array on a device, which it may be on already."""

    @abstractmethod
    def copies(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Return an array for each device; what is written into one is not seen in others."""

    @abstractmethod
    def numpy(self, array: Array) -> Any:
        """Return an array as one of NumPy, in the same memory where that is possible."""

    @abstractmethod
    def kind(self, dtype: Any) -> str:
        """Return a dtype's kind as NumPy says it: b, i, u, f or c."""

    @abstractmethod
    def can_cast(self, dtype: Any, to: Any) -> bool:
        """Say whether a cast keeps the kind of number ("same_kind")."""

    def dtype(self, dtype: Any) -> Any:
        """Return the framework's own dtype for one that a user names in any way."""
        return np.dtype(dtype)

    def plain(self, array: Array) -> Any:
        """Return what users see of an array."""
        return array

    def own(self, value: Any) -> Any:
        """Return a number or an array of NumPy as an array; others as they are.

        What the user's operators then do is the framework's own.
        """
        return self.array(value) if isinstance(value, np.ndarray | np.generic) else value

    # --- gradients ----------------------------------------------------------------------------

    def traced(self, values: Sequence[Any]) -> tuple[int, ...]:
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
            backward: Called with the upstream gradients of the results at `traced`; returns those
                of the values there. It may be differentiated itself.
            values: Arrays and numbers.
            traced: What `traced` returned for them.
        """
        raise NotImplementedError

    # --- values that become one ---------------------------------------------------------------

    @abstractmethod
    def countable(self, value: Any) -> Array:
        """Return a value as an array that can be added up: of no bool, which would stay one.

        Raises:
            InvalidArgumentError: It is nothing that can be added up.
        """

    @abstractmethod
    def total(self, arrays: Sequence[Array]) -> Array:
        """Return the sum of arrays of one shape, in fresh memory."""

    @abstractmethod
    def within(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Return the sum over axes, in the dtype of the array."""

    @abstractmethod
    def divided(self, array: Array, count: int) -> Array:
        """Return the true quotient; by 0 it is nan or infinite."""

    def join_workers(
        self, rank: int, size: int, host: str | None, timeout: float, exchange: Exchange
    ) -> bool:
        """Make this process one with those of the other workers, where the framework has that.

        All workers call it, before they ask for devices. See `sums_of_workers` for the arguments.

        Returns:
            Whether the framework's own ways between workers may be used: by what was agreed with
            the others, or, where nothing has to be, because no keys are wanted (`host` is given).
        """
        return host is not None

    def sums_of_workers(
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
    def joined(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return arrays one after another along an axis, in fresh memory."""


def framework_named(name: Any) -> Framework:
    """Return a framework by its name; None is NumPy.

    Raises:
        ValueError: There is none of that name.
        FailedPreconditionError: It is not installed.
    """
    if name is not None and name not in NAMES:
        raise ValueError(
            f"`framework` must be one of {', '.join(map(repr, NAMES))}, but got {name!r}"
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
    names = [_canonical(device) for device in devices or framework.defaults()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"No duplicates allowed in `devices` argument, but {', '.join(twice)} stands there "
            "several times; logical CPUs have numbers of their own: cpu:0, cpu:1, ..."
        )
    for name in names:
        framework.device(name)
    return names


def _canonical(device: Any) -> str:
    if not isinstance(device, str):
        raise TypeError(f'a device must be a name, such as "cpu:0", but got {device!r}')
    found = _DEVICE.fullmatch(device.lower())
    if found is None:
        raise ValueError(f'a device must be named as "cpu:0" or "gpu:1" are, but got {device!r}')
    kind, number = found.groups()
    return f"{kind}:{int(number or 0)}"
