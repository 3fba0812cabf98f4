"""Dealing: the units of one stream go to whoever asks (`ShardingPolicy.DYNAMIC`).

Each worker has one task of each unfinished iteration, one that joins later too. Where units came
back from a leaving worker and nobody runs who could be dealt them, every worker that stays gets
another task.

An iteration is over when no task runs and somebody reached the end, or nothing is left to deal. A
task that runs and holds nothing does not keep it open once nothing can be dealt any more: its
worker may be one that no client reaches. Where several clients read, the end waits until each of
them was heard since the last task ended, or counts as gone: what one was sent that has died is left
to the others. Where all tasks were lost before that, or only leaving workers ended while units are
left, it goes on when a worker joins: until then its clients wait, as they do where there was no
worker at all.

Units of a task that is lost or failed are dealt again, once all its clients have said what they
received: those of which none received anything. An iteration is not over before that. A unit that
came back so twice because a worker process ended is suspected to kill its workers. It is dealt
with few others, in the end alone; it is given up after three deaths there. A worker that was only
silent proves nothing about its units: they are dealt again as often as that happens.
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
    at_least,
    common,
    count,
    subtracted,
    united,
)

__all__ = ["DynamicSharding", "ExactlyOnceSharding", "choose_splits", "holds_poison_candidates"]


_SUPERSEDED = "it was slow, and another worker gave what it held"

_MAX_DEATHS = 3
"""Of a unit that was dealt alone: then it is given up."""


class DynamicSharding(IterationPolicy):
    """Units are dealt to tasks, first come, first served (`shares`)."""

    assigns_splits = True
    #: Whether who reads is told of units that are whole, without elements (`must_flush`).
    reports_complete_splits = True

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Refuse a dataset without units.

        Raises:
            FailedPreconditionError: It has none.
        """
        if dataset.num_splits is not None:
            return
        raise FailedPreconditionError(
            f"dataset {dataset.dataset_id} cannot be read with ShardingPolicy.DYNAMIC: it has no "
            "positions that could be dealt, because it reads another service or has a source that "
            "cannot be split. Use ShardingPolicy.OFF, or a source with indices: files, arrays, a "
            "range, Dataset.from_source"
        )

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return a task for each worker without one; for all if no other can take the rest."""
        tasks = [task for task in state.tasks_of(iteration) if task.phase is not TaskPhase.LOST]
        running = {task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING}
        if _has_unassigned(iteration) and not running & set(eligible_workers(state, iteration)):
            without = _capable_workers(state, iteration)
        else:
            served = {task.worker_id for task in tasks}
            without = [each for each in eligible_workers(state, iteration) if each not in served]
        return [TaskAssignment(worker_id=each) for each in without]

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return what becomes of units of a task that is gone, or the end of an idle task."""
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
            # It is still at what another one gave (`backups`): nobody waits for it.
            return events.TaskLost(task_id=idle.task_id, reason=_SUPERSEDED)
        return events.TaskFinished(task_id=idle.task_id)

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Whether no task runs and nothing can be dealt, now or later."""
        phases = {task.phase for task in state.tasks_of(iteration)}
        if not phases or TaskPhase.RUNNING in phases or state.may_return_splits(iteration):
            return False
        if phases == {TaskPhase.LOST}:
            return iteration.pool.num_unassigned == 0
        # Where every worker that could go on has failed at it, what is left would wait for ever.
        given_up = TaskPhase.FAILED in phases and not _capable_workers(state, iteration)
        return not _has_unassigned(iteration) or given_up

    def awaited_clients(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        is_unheard: Callable[[str, int], bool],
    ) -> list[str]:
        """Return silent clients where others read too: what they did not use is dealt again."""
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
        """Return the task's share, first come, first served."""
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
        """Whether it holds suspects: it is dealt nothing more before they are done.

        Not where a step works on the whole stream: to begin it again would change what comes.
        """
        if not (self.reports_complete_splits and _processes_splits_separately(state, iteration)):
            return False
        return holds_poison_candidates(iteration, task, request.num_done)

    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return the units that are missing."""
        return lost_splits(iteration, state.tasks_of(iteration))

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Whether units are with it which it has delivered, as far as its worker knows."""
        return (
            task.phase is TaskPhase.FINISHED
            and not task.is_unavailable
            and bool(task.assigned.num_held)
        )


class ExactlyOnceSharding(DynamicSharding):
    """The same, and each element comes once: what nobody has of a unit is dealt again in part."""

    exactly_once = True

    def must_reopen(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Whether a worker was lost with what one of the clients has not got.

        A slow client keeps the others from nothing: an iteration is over though its last elements
        are still on their way to it.
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
        """Whether it holds suspects, or waits for what a death brings, which it might outlive.

        Where workers die again and again, that nothing can come back any more may never be.
        """
        if iteration.pool.num_unassigned == 0:
            return state.may_return_splits(iteration)
        return super().must_flush(state, iteration, task, request)

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Refuse a dataset whose elements cannot be told apart.

        Raises:
            FailedPreconditionError: It says why.
        """
        super().check_dataset(state, dataset, request)
        if not (dataset.has_element_ids or request.options.partition_mode):
            raise FailedPreconditionError(
                f"dataset {dataset.dataset_id} cannot be visited exactly once: a step works on the "
                "whole stream, so that its elements are of no one unit. Put that step after "
                '`distribute`, or use visitation="at_most_once"'
            )


def _recovery_event(iteration: JobIteration, task: DispatcherTask) -> AnyEvent:
    """Return what becomes of units of a task that is gone."""
    splits = task.assigned
    pool = iteration.pool
    left = iteration.recoverable_splits(task)
    if (
        pool.poison_candidates
        and pool.max_candidates_per_task == 1
        and iteration.may_be_poison(task)
    ):
        held = splits.to_split_indices(left)
        deadly = splits.to_assignment_order(common(held, pool.poison_candidates))
        deadly = common(deadly, left)
        if pool.exactly_once:
            # A worker that got on with a unit did not die of it; and others may have had a hand in
            # what happens once.
            deadly = subtracted(deadly, splits.partially_delivered)
            often = (
                (unit, unit + 1)
                for unit, addresses in pool.died_workers.items()
                if len(addresses) + 1 >= _MAX_DEATHS
            )
            deadly = common(deadly, splits.to_assignment_order(united(often)))
        if deadly:
            return events.SplitsAbandoned(task_id=task.task_id, splits=deadly)
    return events.SplitsReturned(task_id=task.task_id, splits=left)


def _processes_splits_separately(state: DispatcherState, iteration: JobIteration) -> bool:
    """Whether what workers run of the plan works on units, one by one or some together."""
    job = state.jobs[iteration.job_id]
    return bool(job.options.partition_mode) or state.datasets[job.dataset_id].has_element_ids


def _idle_task(state: DispatcherState, iteration: JobIteration) -> DispatcherTask | None:
    """Return a running task of an iteration of which every unit is done, or lost for good."""
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


# --- shares: which units a task is dealt next, where whoever asks first is served first -----------

# Rule 1. A grant is half of an even share of what can still be dealt, at most what is wanted: large
#         at first, small near the end, so that few requests deal much and all workers end together.
# Rule 2. A task holds at most an even share of what is not done, so that no worker drinks the
#         stream into a buffer. One that has its share waits; if nobody was dealt anything for a
#         while, the others do not want it, and it gets more all the same.
# Rule 3. Units that came back are dealt first; one that came back in part, by itself.
# Rule 4. Units that are suspected to kill workers are dealt in small groups, each to a task that
#         holds nothing and gets nothing else until they are done; what others hold does not die
#         with them. As with rule 2, a task that gets nothing done meanwhile is dealt more all the
#         same.
# Rule 5. A task that waits because of rule 4 gives all that its steps hold
#         (`holds_poison_candidates`): above a shuffle of values its units would else be done only
#         with many others, which it does not get. So does one that waits for what others may lose,
#         where nothing is left to deal.

_MAX_REQUESTED = 1 << 32

_INFINITE_SHARE = 1 << 16
"""Units of a stream without end that a task may hold in any case."""


def choose_splits(
    iteration: JobIteration,
    task: DispatcherTask,
    max_splits: int,
    num_done: int,
    *,
    is_stalled: bool,
) -> tuple[int, int] | None:
    """Return a range of units for a task; None: nothing for this task now.

    Args:
        iteration: What is dealt, some of which is left.
        task: Who asks.
        max_splits: How many units it would like.
        num_done: How many of its units, in dealt order, are done.
        is_stalled: Nobody was dealt anything for a while.
    """
    number = _choose_size(iteration, task, min(max_splits, _MAX_REQUESTED), num_done, is_stalled)
    units = _choose_range(iteration, task, num_done, is_stalled) if number else None
    return None if units is None else (units[0], min(units[1], units[0] + number))


def _choose_size(
    iteration: JobIteration, task: DispatcherTask, max_splits: int, num_done: int, is_stalled: bool
) -> int:
    """Return how many units to deal; 0: the task has its share."""
    splits = task.assigned
    pool = iteration.pool
    held = splits.num_assigned - num_done - count(at_least(splits.returned, num_done))
    if pool.num_unassigned is None:
        share = max(4 * max_splits, _INFINITE_SHARE)
        return max_splits if is_stalled or held + max_splits <= share else 0
    left = pool.num_unassigned + pool.num_held - splits.num_held + held
    room = -(-left // iteration.num_active_tasks) - held
    if room <= 0 and not is_stalled:
        return 0
    portion = min(max_splits, -(-pool.num_unassigned // (2 * iteration.num_active_tasks)))
    return portion if is_stalled else min(portion, room)


def _choose_range(
    iteration: JobIteration, task: DispatcherTask, num_done: int, is_stalled: bool
) -> tuple[int, int] | None:
    """Return a range of units to deal from; None: nothing for this task now."""
    pool = iteration.pool
    back = pool.returned
    if pool.partial_splits:
        back = united((*back, *((unit, unit + 1) for unit in pool.partial_splits)))
    suspects = common(back, pool.poison_candidates)
    others = subtracted(back, suspects)
    group: tuple[int, int] | None = None
    if suspects:
        start, stop = suspects[0]
        group = _exclude_partial(iteration, start, min(stop, start + pool.max_candidates_per_task))
    if group is not None and not _unfinished_splits(task, num_done):
        return group
    if not is_stalled and holds_poison_candidates(iteration, task, num_done):
        return None
    if others:
        return _exclude_partial(iteration, *others[0])
    if pool.num_splits != pool.next_split:
        end = pool.num_splits or 0
        return pool.next_split, end if end > 0 else pool.next_split + _MAX_REQUESTED
    return group if is_stalled else None


def holds_poison_candidates(iteration: JobIteration, task: DispatcherTask, num_done: int) -> bool:
    """Whether units of a task that are not done are suspected to kill workers."""
    if not iteration.pool.poison_candidates:
        return False
    return bool(
        common(
            task.assigned.to_split_indices(_unfinished_splits(task, num_done)),
            iteration.pool.poison_candidates,
        )
    )


def _unfinished_splits(task: DispatcherTask, num_done: int) -> Ranges:
    """Return the units of a task, in dealt order, that are not done."""
    return subtracted(
        ((num_done, task.assigned.num_assigned),), at_least(task.assigned.returned, num_done)
    )


def _exclude_partial(iteration: JobIteration, start: int, stop: int) -> tuple[int, int]:
    """Return the first of these units: one in part by itself, or those before one."""
    pool = iteration.pool
    if not pool.partial_splits:
        return start, stop
    if start in pool.partial_splits:
        return start, start + 1
    return start, min((unit for unit in pool.partial_splits if start < unit < stop), default=stop)
