"""What `schedule` returns at once: a value that is on its way."""

from __future__ import annotations

import copy
import time
from typing import Any

from headrace.arguments import check_seconds
from headrace.coordinator.closure import Closure, RemoteValueStatus, fresh
from headrace.coordinator.packing import input_value, name_input, unpack
from headrace.coordinator.shell import Shell
from headrace.errors import CancelledError, FailedPreconditionError

__all__ = ["RemoteValue", "fetched"]

_ABORTED = "The corresponding function is aborted. Please reschedule the function."
_UNSET = object()


class RemoteValue:
    """The value of a function that was scheduled.

    As an argument of another function that is scheduled it stands for its value: that function
    waits for it, and fails with its error.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         first = coordinator.schedule(lambda: 20)
    ...         second = coordinator.schedule(lambda x: x + 1, args=(first,))
    ...         second.fetch()
    ...     strategy.close()
    21
    """

    __slots__ = ("_closure", "_result", "_shell", "_value")

    def __init__(self, closure: Closure, shell: Shell) -> None:
        self._closure = closure
        self._result = closure.result
        self._shell = shell
        self._value: Any = _UNSET

    @property
    def status(self) -> RemoteValueStatus:
        """NOT_READY, or READY: value or error are here. ABORTED: a worker kept it, and is lost."""
        return self._result.status

    @property
    def is_ready(self) -> bool:
        """Whether the value, or an error in its place, is here."""
        return self._result.is_ready

    def fetch(self, timeout: float | None = None) -> Any:
        """Return what the function returned, once it is here; the same object each time.

        Args:
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            DeadlineExceededError: It is not here in that time.
            CancelledError: It was called off, with others after an error or by `cancel`.
            UserFunctionError: The function raised.
            HeadraceError: What else went wrong.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        result = self._result
        if not result.is_ready:
            self._shell.wait_for(result, self._closure.name, timeout)
        if result.status is RemoteValueStatus.ABORTED:
            raise CancelledError(_ABORTED)
        if result.error is not None:
            raise fresh(result.error)
        if self._closure.home is not None:
            raise FailedPreconditionError(
                f"what {self._closure.name} made is kept by worker {self._closure.home}: use it in "
                "a function that is scheduled, and return from there what is wanted here"
            )
        if self._value is _UNSET:
            assert result.payload is not None
            self._value = unpack(result.payload)
        return self._value

    get = fetch

    def cancel(self) -> bool:
        """Call the function off; return whether it had not ended yet.

        `fetch` raises CancelledError at once. A function that runs is not stopped: what it writes
        from now on is refused, and what it returns is dropped.
        """
        return self._shell.cancel(self._closure)

    def __reduce__(self) -> tuple[Any, ...]:
        return input_value, (name_input(self._result),)

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._closure.name}: {self.status.name}>"


def fetched(structure: Any, until: float | None) -> Any:
    """Return a structure with the values of all `RemoteValue`s in it, by some time."""
    kind = type(structure)
    if isinstance(structure, RemoteValue):
        left = None if until is None else max(1e-6, until - time.monotonic())
        return structure.fetch(left)
    if kind is list:
        return [fetched(each, until) for each in structure]
    if isinstance(structure, tuple):
        values = [fetched(each, until) for each in structure]
        return kind(*values) if hasattr(structure, "_fields") else tuple(values)
    if isinstance(structure, dict):
        items = {key: fetched(each, until) for key, each in structure.items()}
        if kind is dict:
            return items
        made = copy.copy(structure)  # one of its kind, a defaultdict say, with what it knows
        made.update(items)
        return made
    return structure
