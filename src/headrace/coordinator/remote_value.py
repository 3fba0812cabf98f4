"""Future of a scheduled function, which `schedule` returns."""

from __future__ import annotations

import copy
import time
from typing import Any

from headrace.arguments import check_seconds
from headrace.coordinator.closure import Closure, RemoteValueStatus, copy_error
from headrace.coordinator.coordinator_runner import CoordinatorRunner
from headrace.coordinator.packing import add_input, get_input, unpack
from headrace.errors import CancelledError, FailedPreconditionError

__all__ = ["RemoteValue", "fetch_structure"]

_ABORTED = "The corresponding function is aborted. Please reschedule the function."
_UNSET = object()


class RemoteValue:
    """Value of a scheduled function; `ClusterCoordinator.schedule` returns it.

    A `RemoteValue` may be an argument of another scheduled function: that function waits for the
    value, receives it, and fails with its error.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         first = coordinator.schedule(lambda: 20)
    ...         second = coordinator.schedule(lambda x: x + 1, args=(first,))
    ...         second.fetch()
    ...     strategy.close()
    21
    """

    __slots__ = ("_closure", "_result", "_runner", "_value")

    def __init__(self, closure: Closure, runner: CoordinatorRunner) -> None:
        self._closure = closure
        self._result = closure.result
        self._runner = runner
        self._value: Any = _UNSET

    @property
    def status(self) -> RemoteValueStatus:
        """NOT_READY; READY with a value or error; ABORTED if the worker that held it was lost."""
        return self._result.status

    @property
    def is_ready(self) -> bool:
        """Whether the value, or an error in its place, is available."""
        return self._result.is_ready

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the function's result and return it; the same object each time.

        Args:
            timeout: Seconds to wait; None waits forever.

        Raises:
            DeadlineExceededError: If it is not available in that time.
            CancelledError: If it was cancelled, by `cancel` or after an error of another function.
            UserFunctionError: If the function raised an error.
            HeadraceError: Any other error.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        result = self._result
        if not result.is_ready:
            self._runner.wait_for_result(result, self._closure.name, timeout)
        if result.status is RemoteValueStatus.ABORTED:
            raise CancelledError(_ABORTED)
        if result.error is not None:
            raise copy_error(result.error)
        if self._closure.pinned_worker is not None:
            raise FailedPreconditionError(
                f"the value of {self._closure.name} stays on worker "
                f"{self._closure.pinned_worker} and cannot be fetched: use it in a scheduled "
                "function, and return the needed values from that function"
            )
        if self._value is _UNSET:
            assert result.payload is not None
            self._value = unpack(result.payload)
        return self._value

    get = fetch

    def cancel(self) -> bool:
        """Cancel the function; return whether it had not ended.

        `fetch` raises CancelledError at once. A running function is not stopped, but its further
        writes are rejected, and its result is dropped.
        """
        return self._runner.cancel(self._closure)

    def __reduce__(self) -> tuple[Any, ...]:
        return get_input, (add_input(self._result),)

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._closure.name}: {self.status.name}>"


def fetch_structure(structure: Any, deadline: float | None) -> Any:
    """Return a structure with all `RemoteValue`s in it replaced by their values, by a deadline."""
    kind = type(structure)
    if isinstance(structure, RemoteValue):
        remaining = None if deadline is None else max(1e-6, deadline - time.monotonic())
        return structure.fetch(remaining)
    if kind is list:
        return [fetch_structure(each, deadline) for each in structure]
    if isinstance(structure, tuple):
        values = [fetch_structure(each, deadline) for each in structure]
        return kind(*values) if hasattr(structure, "_fields") else tuple(values)
    if isinstance(structure, dict):
        items = {key: fetch_structure(each, deadline) for key, each in structure.items()}
        if kind is dict:
            return items
        copied = copy.copy(structure)  # keeps the type and its attributes, such as a defaultdict's
        copied.update(items)
        return copied
    return structure
