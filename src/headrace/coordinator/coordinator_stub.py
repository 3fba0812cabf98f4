"""A coordinator as it arrives on workers, with the objects that hold it."""

from __future__ import annotations

from typing import Any, NoReturn

from headrace.errors import FailedPreconditionError

__all__ = ["CoordinatorStub"]


class CoordinatorStub:
    """Stands for a `ClusterCoordinator` that was pickled; any use raises an error.

    Methods of a class that holds its coordinator can be scheduled, since the object travels.

    Args:
        strategy: The strategy of the coordinator, if it travels; else None.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy, as this worker has it."""
        if self._strategy is None:
            self._refuse("strategy")
        return self._strategy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols, such as that of copies
            raise AttributeError(name)
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise FailedPreconditionError(
            f"`{name}` of a ClusterCoordinator works in the coordinator's process alone, and this "
            "one is a copy that was pickled: functions that are scheduled may not schedule others. "
            "The number of a worker is hr.coordinator.get_current_worker_index()"
        )

    def __repr__(self) -> str:
        return "<a ClusterCoordinator of another process>"
