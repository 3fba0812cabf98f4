"""Tasks of an iteration as clients receive them: all running ones, or the changes of their set.

An iteration with n clients and n tasks sends n² addresses if each change of a task sends the whole
list to each client. So clients receive only what changed since the version that they know; the
whole list is sent to new clients, to those too far behind, and to earlier releases. Everything is
computed once per change of a task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from headrace.service import messages
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
)

__all__ = ["TaskAddresses", "TaskChanges", "TaskSnapshot"]

_MAX_REMEMBERED_STEPS = 256
"""Changes per iteration that are remembered."""

_Addresses: TypeAlias = dict[int, messages.TaskAddress]


class TaskChanges(NamedTuple):
    """Difference between the running tasks of two versions of an iteration."""

    started: tuple[messages.TaskAddress, ...]
    ended: tuple[int, ...]


class _Step(NamedTuple):
    """Changes from one list to the next that was built."""

    first_version: int
    last_version: int
    """Versions with the earlier list."""
    changes: TaskChanges


@dataclass
class TaskSnapshot:
    """Tasks of an iteration since the last change of a task.

    Attributes:
        phases: Identifies the phases of all tasks; see `_identify_phases`.
        first_version: First version that is known to have them.
        last_version: Last such version.
        addresses: Addresses of the running tasks, by task id.
        listed: The same as a tuple.
        ended: Tasks that do not run.
        steps: Changes up to this list, oldest first.
        changes: Version -> all changes since.
        outdated_version: Clients that know no later version need the whole list.
        is_kept: False if tasks have the state of a mode, which may change at any time.
    """

    phases: tuple[int, ...] = ()
    first_version: int = -1
    last_version: int = -1
    addresses: _Addresses = field(default_factory=dict)
    listed: tuple[messages.TaskAddress, ...] = ()
    ended: tuple[DispatcherTask, ...] = ()
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_MAX_REMEMBERED_STEPS))
    changes: dict[int, TaskChanges | None] = field(default_factory=dict)
    outdated_version: int = -1
    is_kept: bool = True

    def changes_since(self, version: int) -> TaskChanges | None:
        """Return the changes since an earlier version; None if they are unknown."""
        if not self.is_kept or version <= self.outdated_version:
            return None
        if self.first_version <= version <= self.last_version:
            return TaskChanges((), ())
        if version not in self.changes:
            self.changes[version] = _changes_since(self.steps, version)
        return self.changes[version]


class TaskAddresses:
    """Builds lists of tasks, and keeps the last one of each iteration."""

    def __init__(self) -> None:
        self._snapshots: dict[int, TaskSnapshot] = {}

    def of(self, state: DispatcherState, iteration: JobIteration) -> TaskSnapshot:
        """Return the tasks of an iteration."""
        known = self._snapshots.get(iteration.iteration_id)
        phases = _identify_phases(iteration)
        if known is not None and known.phases == phases:
            known.last_version = iteration.version
            return known
        tasks = state.tasks_of(iteration)
        running = [task for task in tasks if task.phase is TaskPhase.RUNNING]
        # The state of a mode may change without a new version.
        is_kept = all(task.mode_state is None for task in running)
        before = known if known is not None and is_kept else TaskSnapshot()
        addresses = {
            task.task_id: before.addresses.get(task.task_id) or _build_address(state, task)
            for task in running
        }
        if before.phases:
            changes = _difference(before.addresses, addresses)
            before.steps.append(_Step(before.first_version, before.last_version, changes))
        snapshot = TaskSnapshot(
            phases=phases,
            first_version=iteration.version,
            last_version=iteration.version,
            outdated_version=before.outdated_version,
            addresses=addresses,
            listed=tuple(addresses.values()),
            ended=tuple(task for task in tasks if task.phase is not TaskPhase.RUNNING),
            steps=before.steps,
            is_kept=is_kept,
        )
        if is_kept:
            self._snapshots[iteration.iteration_id] = snapshot
        return snapshot

    def forget(self, iteration_id: int) -> None:
        """Forget an iteration that was removed, or some of whose tasks were."""
        self._snapshots.pop(iteration_id, None)

    def tags_changed(self) -> None:
        """Build all addresses anew: tags of a worker changed, which does not change versions."""
        for iteration_id, known in self._snapshots.items():
            self._snapshots[iteration_id] = TaskSnapshot(outdated_version=known.last_version)


def _identify_phases(iteration: JobIteration) -> tuple[int, ...]:
    """Return numbers that change if a task starts, ends or is forgotten."""
    return (
        max(iteration.tasks[-1:], default=0),
        len(iteration.tasks),
        iteration.num_active_tasks + iteration.num_draining_tasks,
    )


def _build_address(state: DispatcherState, task: DispatcherTask) -> messages.TaskAddress:
    address = messages.TaskAddress(
        task_id=task.task_id,
        worker_id=task.worker_id,
        worker_address=task.address,
        task_token=task.task_token,
        attempt=task.attempt,
        tags=state.workers[task.worker_id].tags,
    )
    return address if task.mode_state is None else task.mode_state.extend_address(address)


def _difference(before: _Addresses, after: _Addresses) -> TaskChanges:
    return TaskChanges(
        started=tuple(after[task_id] for task_id in after if task_id not in before),
        ended=tuple(task_id for task_id in before if task_id not in after),
    )


def _changes_since(steps: Iterable[_Step], version: int) -> TaskChanges | None:
    """Combine the changes since a version; None if it is not remembered."""
    started: _Addresses = {}
    ended: list[int] = []
    is_known = False
    for step in steps:
        is_known = is_known or step.first_version <= version <= step.last_version
        if is_known:
            started.update((address.task_id, address) for address in step.changes.started)
            # A task that started and ended since is unknown to the client.
            ended += [each for each in step.changes.ended if started.pop(each, None) is None]
    return TaskChanges(tuple(started.values()), tuple(ended)) if is_known else None
