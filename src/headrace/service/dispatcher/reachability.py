"""Reports of clients that cannot reach tasks, kept in memory.

A client repeats its report after each failed attempt, every few seconds. If it does not, it reaches
the worker again, or gave up.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Reachability"]

_REPORT_LIFETIME_SECONDS = 30.0


class Reachability:
    """Reports of clients that cannot reach the worker of a task."""

    def __init__(self) -> None:
        #: Task -> client -> times of its first and last report.
        self._reports: dict[int, dict[str, tuple[float, float]]] = {}

    def report(self, task_id: int, client_id: str, now: float) -> None:
        """Record that a client's attempt failed."""
        reports = self._reports.setdefault(task_id, {})
        first, last = reports.get(client_id, (now, now))
        reports[client_id] = (first if now - last <= _REPORT_LIFETIME_SECONDS else now, now)

    def reported_tasks(self) -> list[int]:
        """Return the tasks that were reported."""
        return [*self._reports]

    def is_unreachable_for_all(
        self, task_id: int, clients: Iterable[str], seconds: float, now: float
    ) -> bool:
        """Return whether all these clients (at least one) have reported the task for `seconds`."""
        reports = self._reports.get(task_id, {})
        times = [reports.get(client_id) for client_id in clients]
        return bool(times) and all(
            first_and_last is not None
            and now - first_and_last[0] > seconds
            and now - first_and_last[1] <= _REPORT_LIFETIME_SECONDS
            for first_and_last in times
        )

    def unreachable_tasks(self, client_id: str, seconds: float, now: float) -> set[int]:
        """Return the tasks that this client has reported for some seconds."""
        return {
            task_id
            for task_id in self._reports
            if self.is_unreachable_for_all(task_id, (client_id,), seconds, now)
        }

    def forget_old(self, now: float) -> None:
        """Forget reports that were not repeated for a while."""
        for task_id, reports in [*self._reports.items()]:
            for client_id, (_, last) in [*reports.items()]:
                if now - last > _REPORT_LIFETIME_SECONDS:
                    del reports[client_id]
            if not reports:
                del self._reports[task_id]

    def exclude_pause(self, pause: float, now: float) -> None:
        """Exclude `pause` seconds in which this process received nothing."""
        for reports in self._reports.values():
            for client_id, (first, last) in reports.items():
                reports[client_id] = min(now, first + pause), min(now, last + pause)
