"""No sharding: each worker reads a copy of the whole dataset (`ShardingPolicy.OFF`).

Each worker that is available or joins while an iteration runs gets a copy, whatever happened to
other copies. A worker gets no second copy, and none is started at the address of a copy that ended
without a loss. If all copies were lost, the available and joining workers start another attempt,
and clients warn that elements are duplicated.

A function that kills its process would be restarted forever. So copies are no longer started after
three deaths for each worker that had a copy at first, all within a minute of a copy's start and
after the last copy that ran for longer. The iteration then ends with the running copies, and fails
if all were lost. A worker that leaves has not died.
"""

from __future__ import annotations

import hashlib

from headrace.service.dispatcher.losses import lost_copies
from headrace.service.dispatcher.policy import IterationPolicy, TaskAssignment, eligible_workers
from headrace.service.dispatcher.state import (
    WORKER_LEFT,
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
)
from headrace.service.messages import LostSplits

__all__ = ["NoSharding"]

_MAX_ATTEMPTS = 3


class NoSharding(IterationPolicy):
    """Assigns no splits: each task reads a whole copy."""

    assigns_splits = False

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return a copy for each worker that may start one."""
        tasks = state.tasks_of(iteration)
        if _keeps_killing_workers(tasks):
            return []
        attempt = max((task.attempt for task in tasks), default=-1)
        workers = eligible_workers(state, iteration)
        if _all_lost(tasks):
            attempt += 1
        else:
            workers_with_copy = {task.worker_id for task in tasks}
            # After a copy has ended, a restarted worker would read a second one.
            addresses_with_copy = {task.address for task in tasks if not _is_cut_short(task)}
            workers = [
                each
                for each in workers
                if each not in workers_with_copy
                and state.workers[each].address not in addresses_with_copy
            ]
        num_replaced = sum(task.is_replacement for task in tasks)
        num_to_replace = sum(map(_is_cut_short, tasks)) - num_replaced
        return [
            TaskAssignment(worker_id=each, attempt=attempt, is_replacement=number < num_to_replace)
            for number, each in enumerate(workers)
        ]

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether every copy ended; if all were lost, whether workers died repeatedly."""
        tasks = state.tasks_of(iteration)
        if not tasks or any(task.phase is TaskPhase.RUNNING for task in tasks):
            return False
        return not _all_lost(tasks) or _keeps_killing_workers(tasks)

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return an error if all copies were lost; otherwise empty."""
        tasks = state.tasks_of(iteration)
        if not _all_lost(tasks):
            return ""
        return (
            f"all {len(tasks)} workers with a copy of the dataset were lost, the last "
            f"{len(_early_deaths(tasks))} within a minute of their start, most recently worker "
            f"{tasks[-1].address} ({tasks[-1].reason}). A function of the dataset may terminate or "
            "block its process; see the workers' logs"
        )

    def seed(self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask) -> int:
        """Return a different seed for each worker, so that copies are shuffled differently."""
        digest = hashlib.sha256(f"{iteration.seed} {task.worker_id}".encode()).digest()
        return int.from_bytes(digest[:8]) >> 12

    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return the copies that ended early."""
        return lost_copies(iteration, state.tasks_of(iteration))

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Return whether the task ended on its worker, which can redeliver its last batches."""
        return task.phase in (TaskPhase.FINISHED, TaskPhase.FAILED)


def _all_lost(tasks: list[DispatcherTask]) -> bool:
    return all(task.phase is TaskPhase.LOST for task in tasks)


def _is_cut_short(task: DispatcherTask) -> bool:
    return task.phase is TaskPhase.LOST or task.cut_short


def _keeps_killing_workers(tasks: list[DispatcherTask]) -> bool:
    """Return whether the early deaths amount to three for each worker."""
    workers = sum(not task.is_replacement for task in tasks)
    return len(_early_deaths(tasks)) >= _MAX_ATTEMPTS * max(1, workers)


def _early_deaths(tasks: list[DispatcherTask]) -> list[DispatcherTask]:
    """Return the lost copies that are not stable and started after the last stable one."""
    num_excluded = max(
        (number for number, task in enumerate(tasks, 1) if task.is_stable), default=0
    )
    return [
        task
        for task in tasks[num_excluded:]
        if task.phase is TaskPhase.LOST and task.reason != WORKER_LEFT
    ]
