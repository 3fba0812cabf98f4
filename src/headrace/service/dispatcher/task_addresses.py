"""Addresses of the running tasks of an iteration, as clients receive them.

Each client of an iteration with n tasks receives n addresses, so that many clients of many workers
are quadratic work. The addresses are therefore built once per version of the iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.service import messages
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
    Worker,
)

__all__ = ["TaskAddresses"]


class TaskAddresses:
    """Builds addresses of tasks, and keeps those of the current version of each iteration.

    A change of the tags of a worker does not change the version: call `clear`.
    """

    def __init__(self) -> None:
        #: Iteration -> version, and the addresses in it.
        self._built: dict[int, tuple[int, tuple[messages.TaskAddress, ...]]] = {}

    def of(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[messages.TaskAddress, ...]:
        """Return the addresses of the running tasks of an iteration."""
        version, addresses = self._built.get(iteration.iteration_id, (-1, ()))
        if version == iteration.version:
            return addresses
        tasks = state.tasks_of(iteration)
        addresses = _build_addresses(tasks, state.workers)
        # The state of a mode may change without a new version.
        if all(task.mode_state is None for task in tasks):
            self._built[iteration.iteration_id] = iteration.version, addresses
        return addresses

    def forget(self, iteration_id: int) -> None:
        """Forget an iteration that was removed."""
        self._built.pop(iteration_id, None)

    def clear(self) -> None:
        """Forget all addresses."""
        self._built.clear()


def _build_addresses(
    tasks: Iterable[DispatcherTask], workers: Mapping[str, Worker]
) -> tuple[messages.TaskAddress, ...]:
    addresses = []
    for task in tasks:
        if task.phase is TaskPhase.RUNNING:
            address = messages.TaskAddress(
                task_id=task.task_id,
                worker_id=task.worker_id,
                worker_address=task.address,
                task_token=task.task_token,
                attempt=task.attempt,
                tags=workers[task.worker_id].tags,
            )
            addresses.append(
                address if task.mode_state is None else task.mode_state.extend_address(address)
            )
    return tuple(addresses)
