"""Dynamic sharding: the splits of one stream are assigned on request (`ShardingPolicy.DYNAMIC`).

Each worker has one task of each unfinished iteration, also if it joins later. If a draining worker
returned splits and no running task can take them, every worker that stays gets another task.

An iteration is complete when no task runs and one reached the end, or nothing is left to assign. A
running task that holds nothing does not keep it open once nothing more can be assigned: clients may
be unable to reach its worker. With several clients, the end waits until each has sent a heartbeat
since the last task ended, or expired: the elements sent to a client that died are assigned to the
others. If all tasks were lost before the end, or only draining workers ended while splits are left,
the iteration continues when a worker joins; until then its clients wait, as if there had been no
worker.

Splits of a lost or failed task are assigned again if no client received any of their elements, once
all its clients have reported what they received. The iteration does not finish before. A split that
was returned twice because a worker process ended is a poison candidate. It is assigned with few
others, in the end alone; after three deaths it is abandoned. A worker that was only silent proves
nothing about its splits: they are assigned again without limit.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.losses import lost_splits
from headrace.service.dispatcher.policy import IterationPolicy, TaskAssignment, eligible_workers
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    RegisteredDataset,
    TaskPhase,
)
from headrace.service.messages import GetSplit, LostSplits, OpenIteration
from headrace.service.ranges import (
    Ranges,
    drop_below,
    intersect,
    subtract,
    total_length,
    union,
)

__all__ = ["DynamicSharding", "ExactlyOnceSharding", "choose_splits", "holds_poison_candidates"]


_SUPERSEDED = "it was slow, and another worker delivered its splits"

_MAX_DEATHS = 3
"""Number of deaths after which a split that was assigned alone is abandoned."""


class DynamicSharding(IterationPolicy):
    """Assigns splits to tasks in order of their requests (`choose_splits`)."""

    assigns_splits = True
    #: Whether clients learn of complete splits that have no elements (`must_flush`).
    reports_complete_splits = True

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Reject a dataset without splits.

        Raises:
            FailedPreconditionError: If the dataset has no splits.
        """
        if dataset.num_splits is not None:
            return
        raise FailedPreconditionError(
            f"dataset {dataset.dataset_id} cannot be read with ShardingPolicy.DYNAMIC: it has no "
            "splits, because it reads from a data service or has a source that cannot be split. "
            "Use ShardingPolicy.OFF, or a source with indices: files, arrays, a range, "
            "Dataset.from_source"
        )

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return a task for each worker without one, or for all if no other can take the rest."""
        tasks = [task for task in state.tasks_of(iteration) if task.phase is not TaskPhase.LOST]
        running = {task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING}
        if _has_unassigned(iteration) and not running & set(eligible_workers(state, iteration)):
            workers = _capable_workers(state, iteration)
        else:
            workers_with_task = {task.worker_id for task in tasks}
            workers = [
                each for each in eligible_workers(state, iteration) if each not in workers_with_task
            ]
        return [TaskAssignment(worker_id=each) for each in workers]

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the event that recovers splits of an unavailable task, or ends an idle task."""
        for task in state.tasks_of(iteration):
            if (
                task.is_unavailable
                and not task.awaiting_reports
                and iteration.recoverable_splits(task)
            ):
                return _recovery_event(iteration, task)
        idle = _idle_task(state, iteration)
        if idle is None:
            return None
        if idle.assigned.returned and not state.workers[idle.worker_id].draining:
            # It still computes splits that another task has delivered (speculative execution).
            return events.TaskLost(task_id=idle.task_id, reason=_SUPERSEDED)
        return events.TaskFinished(task_id=idle.task_id)

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether no task runs and nothing can be assigned, now or later."""
        phases = {task.phase for task in state.tasks_of(iteration)}
        if not phases or TaskPhase.RUNNING in phases or state.may_return_splits(iteration):
            return False
        if phases == {TaskPhase.LOST}:
            return iteration.pool.num_unassigned == 0
        # If every worker that could continue has failed, the rest would wait forever.
        cannot_continue = TaskPhase.FAILED in phases and not _capable_workers(state, iteration)
        return not _has_unassigned(iteration) or cannot_continue

    def awaited_clients(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        is_unheard: Callable[[str, int], bool],
    ) -> list[str]:
        """Return the silent clients if there are several.

        What they did not consume is assigned again if they expire.
        """
        if len(iteration.clients) < 2:
            return []
        return sorted(
            each for each in iteration.clients if is_unheard(each, iteration.iteration_id)
        )

    def choose_splits(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
        *,
        is_stalled: bool,
    ) -> tuple[int, int] | None:
        """Return the next splits of a task, in order of requests."""
        return choose_splits(
            iteration, task, request.max_splits, request.num_done, is_stalled=is_stalled
        )

    def must_flush(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
    ) -> bool:
        """Return whether the task holds poison candidates: it gets no other splits before.

        Never for steps on the whole stream: restarting them would change the result.
        """
        if not (self.reports_complete_splits and _processes_splits_separately(state, iteration)):
            return False
        return holds_poison_candidates(iteration, task, request.num_done)

    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return the missing splits."""
        return lost_splits(iteration, state.tasks_of(iteration))

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Return whether the task finished while splits that it delivered are not acknowledged."""
        return (
            task.phase is TaskPhase.FINISHED
            and not task.is_unavailable
            and bool(task.assigned.num_held)
        )


class ExactlyOnceSharding(DynamicSharding):
    """Dynamic sharding that delivers each element once.

    Undelivered parts of splits are assigned again.
    """

    exactly_once = True

    def must_reopen(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether a worker was lost with elements that one of the clients has not received.

        A slow client does not delay the others: an iteration is finished even if its last elements
        are still in flight to that client.
        """
        return (
            bool(iteration.clients)
            and not iteration.failure_reason
            and any(
                task.is_unavailable
                and not task.awaiting_reports
                and iteration.recoverable_splits(task)
                for task in state.tasks_of(iteration)
            )
        )

    def must_flush(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
    ) -> bool:
        """Return whether the task holds poison candidates, or splits may yet be returned.

        If workers die repeatedly, the state in which nothing can be returned may never be reached.
        """
        if iteration.pool.num_unassigned == 0:
            return state.may_return_splits(iteration)
        return super().must_flush(state, iteration, task, request)

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Reject a dataset whose elements have no ids.

        Raises:
            FailedPreconditionError: If a step of the dataset works on the whole stream.
        """
        super().check_dataset(state, dataset, request)
        if not (dataset.has_element_ids or request.options.partition_mode):
            raise FailedPreconditionError(
                f"dataset {dataset.dataset_id} cannot be visited exactly once: a step works on the "
                "whole stream, so its elements belong to no single split. Move that step after "
                '`distribute`, or use visitation="at_most_once"'
            )


def _recovery_event(iteration: JobIteration, task: DispatcherTask) -> AnyEvent:
    """Return the event that recovers or abandons splits of an unavailable task."""
    splits = task.assigned
    pool = iteration.pool
    recoverable = iteration.recoverable_splits(task)
    if (
        pool.poison_candidates
        and pool.max_candidates_per_task == 1
        and iteration.may_be_poison(task)
    ):
        held_splits = splits.to_split_indices(recoverable)
        fatal = splits.to_assignment_order(intersect(held_splits, pool.poison_candidates))
        fatal = intersect(fatal, recoverable)
        if pool.exactly_once:
            # A worker that delivered elements of a split was not killed by it; and a single death
            # may have another cause.
            fatal = subtract(fatal, splits.partially_delivered)
            repeatedly_fatal = (
                (split, split + 1)
                for split, addresses in pool.died_workers.items()
                if len(addresses) + 1 >= _MAX_DEATHS
            )
            fatal = intersect(fatal, splits.to_assignment_order(union(repeatedly_fatal)))
        if fatal:
            return events.SplitsAbandoned(task_id=task.task_id, splits=fatal)
    return events.SplitsReturned(task_id=task.task_id, splits=recoverable)


def _processes_splits_separately(state: DispatcherState, iteration: JobIteration) -> bool:
    """Return whether the worker stage processes splits separately, one by one or in groups."""
    job = state.jobs[iteration.job_id]
    return bool(job.options.partition_mode) or state.datasets[job.dataset_id].has_element_ids


def _idle_task(state: DispatcherState, iteration: JobIteration) -> DispatcherTask | None:
    """Return a running task if all its splits are done and none can be returned."""
    if iteration.pool.num_unassigned != 0 or state.may_return_splits(iteration):
        return None
    running = state.running_tasks(iteration)
    return None if any(task.assigned.num_held for task in running) else next(iter(running), None)


def _has_unassigned(iteration: JobIteration) -> bool:
    pool = iteration.pool
    return bool(pool.returned or pool.partial_splits) or (
        not iteration.reached_end and pool.num_unassigned != 0
    )


def _capable_workers(state: DispatcherState, iteration: JobIteration) -> list[str]:
    tasks = state.tasks_of(iteration)
    failed = {task.worker_id for task in tasks if task.phase is TaskPhase.FAILED}
    return [
        worker_id for worker_id in eligible_workers(state, iteration) if worker_id not in failed
    ]


# --- choice of the splits that a task gets next ---------------------------------------------------

# Rule 1. An assignment is half of an even part of the remaining splits, at most the number
#         requested: large at first, small near the end, so that few requests are needed and all
#         workers end together.
# Rule 2. A task holds at most an even part of the unfinished splits, so that no worker can hoard
#         them. A task that holds its part waits; if no task was assigned anything for a while, the
#         others need nothing, and it gets more.
# Rule 3. Returned splits are assigned first; a split that was returned in part, alone.
# Rule 4. Poison candidates are assigned in small groups, each to a task that holds nothing and gets
#         nothing else until they are done, so that no other splits die with them. As with rule 2,
#         the task gets more if it makes no progress for a while.
# Rule 5. A task that waits because of rule 4 flushes its steps (`holds_poison_candidates`): above a
#         shuffle of values its splits would otherwise be done only together with many others,
#         which it does not get. So does a task that waits for splits that others may lose, when
#         nothing is left to assign.

_MAX_REQUESTED = 1 << 32

_INFINITE_LIMIT = 1 << 16
"""Splits of an infinite stream that a task may hold in any case."""


def choose_splits(
    iteration: JobIteration,
    task: DispatcherTask,
    max_splits: int,
    num_done: int,
    *,
    is_stalled: bool,
) -> tuple[int, int] | None:
    """Return a range of splits for a task, or None if it must wait.

    Args:
        iteration: Iteration that has splits left.
        task: Task that requests splits.
        max_splits: Maximum number of splits.
        num_done: Number of the task's splits, in assignment order, that are done.
        is_stalled: True if no task of the iteration was assigned anything for a while.
    """
    size = _choose_size(iteration, task, min(max_splits, _MAX_REQUESTED), num_done, is_stalled)
    split_range = _choose_range(iteration, task, num_done, is_stalled) if size else None
    return (
        None
        if split_range is None
        else (split_range[0], min(split_range[1], split_range[0] + size))
    )


def _choose_size(
    iteration: JobIteration, task: DispatcherTask, max_splits: int, num_done: int, is_stalled: bool
) -> int:
    """Return the number of splits to assign; 0 if the task holds its part."""
    splits = task.assigned
    pool = iteration.pool
    held = splits.num_assigned - num_done - total_length(drop_below(splits.returned, num_done))
    if pool.num_unassigned is None:
        max_held = max(4 * max_splits, _INFINITE_LIMIT)
        return max_splits if is_stalled or held + max_splits <= max_held else 0
    unfinished = pool.num_unassigned + pool.num_held - splits.num_held + held
    room = -(-unfinished // iteration.num_active_tasks) - held
    if room <= 0 and not is_stalled:
        return 0
    size = min(max_splits, -(-pool.num_unassigned // (2 * iteration.num_active_tasks)))
    return size if is_stalled else min(size, room)


def _choose_range(
    iteration: JobIteration, task: DispatcherTask, num_done: int, is_stalled: bool
) -> tuple[int, int] | None:
    """Return a range of splits to assign from, or None if the task must wait."""
    pool = iteration.pool
    returned = pool.returned
    if pool.partial_splits:
        returned = union((*returned, *((split, split + 1) for split in pool.partial_splits)))
    candidates = intersect(returned, pool.poison_candidates)
    other_splits = subtract(returned, candidates)
    group: tuple[int, int] | None = None
    if candidates:
        start, stop = candidates[0]
        group = _exclude_partial(iteration, start, min(stop, start + pool.max_candidates_per_task))
    if group is not None and not _unfinished_splits(task, num_done):
        return group
    if not is_stalled and holds_poison_candidates(iteration, task, num_done):
        return None
    if other_splits:
        return _exclude_partial(iteration, *other_splits[0])
    if pool.num_splits != pool.next_split:
        end = pool.num_splits or 0
        return pool.next_split, end if end > 0 else pool.next_split + _MAX_REQUESTED
    return group if is_stalled else None


def holds_poison_candidates(iteration: JobIteration, task: DispatcherTask, num_done: int) -> bool:
    """Return whether unfinished splits of a task are poison candidates."""
    if not iteration.pool.poison_candidates:
        return False
    return bool(
        intersect(
            task.assigned.to_split_indices(_unfinished_splits(task, num_done)),
            iteration.pool.poison_candidates,
        )
    )


def _unfinished_splits(task: DispatcherTask, num_done: int) -> Ranges:
    """Return the unfinished splits of a task, in assignment order."""
    return subtract(
        ((num_done, task.assigned.num_assigned),), drop_below(task.assigned.returned, num_done)
    )


def _exclude_partial(iteration: JobIteration, start: int, stop: int) -> tuple[int, int]:
    """Shorten a range so that it is one partial split, or ends before the next one."""
    pool = iteration.pool
    if not pool.partial_splits:
        return start, stop
    if start in pool.partial_splits:
        return start, start + 1
    return start, min(
        (split for split in pool.partial_splits if start < split < stop), default=stop
    )
