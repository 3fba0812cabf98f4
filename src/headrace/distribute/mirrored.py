"""Strategies of one process: a single device, and several that hold copies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.distribute.strategy import Strategy

__all__ = ["MirroredStrategy", "OneDeviceStrategy"]

_DEVICE = re.compile(r"(?:.*/)?(?:device:)?([a-z]+):([0-9]+)")
_FRAMEWORKS = ("numpy", "jax", "torch")


class OneDeviceStrategy(Strategy):
    """One replica: elements and results are plain values.

    >>> import headrace as hr
    >>> strategy = hr.distribute.OneDeviceStrategy()
    >>> strategy.run(lambda x: x + 1, args=(2,))
    3

    Args:
        device: Such as "cpu:0"; None: that.
        framework: "numpy"; None: that.
    """

    def __init__(self, device: str | None = None, framework: str | None = None) -> None:
        super().__init__(_devices([device] if device is not None else [], framework))

    def _wraps_single_values(self) -> bool:
        return False


class MirroredStrategy(Strategy):
    """Replicas in one process, one to a device; each batch is shared among them.

    >>> import headrace as hr
    >>> strategy = hr.distribute.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    >>> strategy.num_replicas_in_sync
    4

    Args:
        devices: Such as "cpu:0", "cpu:1": any number of logical CPUs; None or none: "cpu:0".
        framework: "numpy": values are NumPy arrays; None: that.
    """

    def __init__(self, devices: Sequence[str] | None = None, framework: str | None = None) -> None:
        super().__init__(_devices(devices, framework))


def _devices(devices: Any, framework: Any) -> list[str]:
    """Return the checked names of devices.

    Raises:
        TypeError: They are no strings.
        ValueError: One stands there twice, or is no device that the framework has here.
        NotImplementedError: The framework is not there yet.
    """
    if framework is not None and framework not in _FRAMEWORKS:
        raise ValueError(
            f"`framework` must be one of {', '.join(map(repr, _FRAMEWORKS))}, but got {framework!r}"
        )
    if framework not in (None, "numpy"):
        raise NotImplementedError(
            f"framework={framework!r} is not supported by strategies yet; with the default, "
            'framework="numpy", replicas get NumPy arrays, of which a step may make arrays of any '
            "framework"
        )
    if isinstance(devices, str) or not isinstance(devices, Sequence | None):
        raise TypeError(
            f'`devices` must be a list of names, such as ["cpu:0", "cpu:1"], but got {devices!r}'
        )
    named = [_canonical(device) for device in devices or ["cpu:0"]]
    twice = sorted({device for device in named if named.count(device) > 1})
    if twice:
        raise ValueError(
            f"No duplicates allowed in `devices` argument, but {', '.join(twice)} stands there "
            "several times; logical CPUs have numbers of their own: cpu:0, cpu:1, ..."
        )
    return named


def _canonical(device: Any) -> str:
    if not isinstance(device, str):
        raise TypeError(f'a device must be a name, such as "cpu:0", but got {device!r}')
    found = _DEVICE.fullmatch(device.lower())
    if found is None:
        raise ValueError(f'a device must be named as "cpu:0" or "gpu:1" are, but got {device!r}')
    kind, number = found.groups()
    if kind != "cpu":
        raise ValueError(
            f'device {device!r} cannot hold NumPy arrays: with framework="numpy" devices are '
            "cpu:0, cpu:1, ..."
        )
    return f"{kind}:{int(number)}"
