"""Strategies of one process: a single device, and several that hold copies."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.distribute.strategy import Strategy
from headrace.frameworks.framework import device_names, framework_named

__all__ = ["MirroredStrategy", "OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """One replica: elements and results are plain values.

    >>> import headrace as hr
    >>> strategy = hr.distribute.OneDeviceStrategy()
    >>> strategy.run(lambda x: x + 1, args=(2,))
    3

    Args:
        device: Such as "cpu:0" or "gpu:1"; None: the framework's first.
        framework: "numpy" (None), "jax" or "torch".
    """

    def __init__(self, device: str | None = None, framework: str | None = None) -> None:
        found = framework_named(framework)
        wanted = [device] if device is not None else found.defaults()[:1]
        super().__init__(device_names(wanted, found), found)

    def _wraps_single_values(self) -> bool:
        return False


class MirroredStrategy(Strategy):
    """Replicas in one process, one to a device; each batch is shared among them.

    >>> import headrace as hr
    >>> strategy = hr.distribute.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    >>> strategy.num_replicas_in_sync
    4

    Args:
        devices: Such as "cpu:0", "cpu:1" or "gpu:0". NumPy and PyTorch have any number of logical
            CPUs, JAX those that it was started with. None or none: all accelerators that the
            framework has here, else "cpu:0".
        framework: "numpy": values are NumPy arrays; None: that. "jax" and "torch": arrays of
            theirs, on each replica's device.
    """

    def __init__(self, devices: Sequence[str] | None = None, framework: str | None = None) -> None:
        found = framework_named(framework)
        super().__init__(device_names(devices, found), found)
