"""Speculative execution in ordered reading: splits of a straggler are assigned a second time.

In ordered reading, one slow worker delays all elements after its split.

Rule 1. If the task with the oldest unfinished split has finished none for longer than one second
    and than three times the usual duration of its splits, an idle task receives the splits that it
    holds: the splits are reassigned (`SplitsReassigned`) and assigned again.
Rule 2. The slow task is not informed. The first result of either task counts, because ordered
    readers drop duplicates. Only the second task is expected to deliver these splits: if one of the
    two is lost, they are not assigned to a third for the slow task's sake.
Rule 3. Each split is assigned a second time at most once. If all tasks are slow, not all of them
    need to try.
Rule 4. If a client waits for a split (`ClientHeartbeat.wanted_split`), the splits of its task are
    reassigned even while other splits remain, and go to the next task that asks. Usually no task
    would ask: the client has buffered later elements up to its limit, and tasks wait for room. So
    the reply names the tasks to send requests to nevertheless, until the split arrives
    (`urgent_tasks`). Before any split is done, its usual duration is unknown, and nothing is
    reassigned for a client.

The progress of tasks since their last assignment is not journaled: after a restart, the measurement
of each task starts again.
"""

from __future__ import annotations

from headrace.service.dispatcher.activity import count_done_splits
from headrace.service.dispatcher.decision import DecisionContext
from headrace.service.dispatcher.events import SplitsReassigned
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.ranges import Ranges, drop_below, subtract, total_length

__all__ = ["find_other_holders", "reassign_awaited_split", "reassign_straggler", "urgent_tasks"]

_MIN_SECONDS = 1.0
_SLOWDOWN_FACTOR = 3.0


def find_other_holders(
    state: DispatcherState, iteration: JobIteration, task: DispatcherTask, context: DecisionContext
) -> list[tuple[DispatcherTask, Ranges]]:
    """Return other tasks that hold splits, with those in assignment order, as far as known."""
    found = [
        (other, _held_splits(other, context.soft_state.reported_done.get(other.task_id, 0)))
        for other in state.running_tasks(iteration)
        if other is not task
    ]
    return [each for each in found if each[1]]


def reassign_straggler(
    state: DispatcherState,
    iteration: JobIteration,
    task: DispatcherTask,
    done: int,
    context: DecisionContext,
) -> SplitsReassigned | None:
    """Return the reassignment of a straggler's splits to an idle task, if one is due.

    Args:
        state: State of the dispatcher.
        iteration: Iteration of the splits.
        task: The idle task; no unassigned split is left for it.
        done: Number of its finished splits.
        context: Time and soft state.
    """
    if _held_splits(task, done):
        return None
    candidates = {
        other.task_id: (other.assigned.to_split_indices(held)[0][0], held)
        for other, held in find_other_holders(state, iteration, task, context)
    }
    if not candidates:
        return None
    straggler = min(candidates, key=lambda task_id: candidates[task_id][0])
    oldest, held = candidates[straggler]
    reassigned = context.soft_state.reassigned_splits.get(iteration.iteration_id, ())
    if not _is_slow(state, iteration, straggler, held, context) or _contains(reassigned, oldest):
        return None
    return SplitsReassigned(task_id=straggler, splits=held)


def reassign_awaited_split(
    state: DispatcherState, iteration: JobIteration, split: int, context: DecisionContext
) -> SplitsReassigned | None:
    """Return the reassignment of an awaited split and those with it, if that is due.

    Args:
        state: State of the dispatcher.
        iteration: Iteration of the split.
        split: Split that a client waits for; -1 for none.
        context: Time and soft state.
    """
    if split < 0:
        return None
    running = state.running_tasks(iteration)
    reassigned = context.soft_state.reassigned_splits.get(iteration.iteration_id, ())
    if (
        len(running) == 1
        or _contains(reassigned, split)
        or _count_done(state, iteration, context) <= 0
    ):
        return None
    for task in running:
        held = _held_splits(task, context.soft_state.reported_done.get(task.task_id, 0))
        if held and _contains(task.assigned.to_split_indices(held), split):
            if not _is_slow(state, iteration, task.task_id, held, context):
                return None
            return SplitsReassigned(task_id=task.task_id, splits=held)
    return None


def urgent_tasks(
    state: DispatcherState, iteration: JobIteration, split: int, context: DecisionContext
) -> tuple[int, ...]:
    """Return the tasks that a client may ask for a split, however much it has buffered.

    Args:
        state: State of the dispatcher.
        iteration: Iteration of the split.
        split: Split that the client waits for; -1 for none.
        context: Time and soft state.
    """
    if split < 0:
        return ()
    holders: list[int] = []
    assignable: list[int] = []
    for task in state.running_tasks(iteration):
        splits = task.assigned
        assigned = splits.to_split_indices(((splits.num_done, splits.num_assigned),))
        if not _contains(assigned, split):
            if _can_be_assigned(state, task, context):
                assignable.append(task.task_id)
        elif _contains(splits.to_split_indices(_held_splits(task, splits.num_done)), split):
            holders.append(task.task_id)
    if holders or not (
        _contains(iteration.pool.returned, split) or split in iteration.pool.partial_splits
    ):
        return tuple(holders)
    # Returned splits are assigned first, so one task suffices: the one with the latest progress.
    last_progress = context.soft_state.last_progress
    assignable.sort(key=lambda task_id: last_progress.get(task_id, 0.0))
    return tuple(assignable[-1:])


def _can_be_assigned(
    state: DispatcherState, task: DispatcherTask, context: DecisionContext
) -> bool:
    has_no_work = task.task_id in context.soft_state.tasks_without_work
    return not (has_no_work or state.workers[task.worker_id].draining)


def _is_slow(
    state: DispatcherState,
    iteration: JobIteration,
    task_id: int,
    held: Ranges,
    context: DecisionContext,
) -> bool:
    waited = context.now - context.soft_state.last_progress.get(task_id, context.now)
    expected = total_length(held) * _typical_split_seconds(state, iteration, context)
    return waited > max(_MIN_SECONDS, _SLOWDOWN_FACTOR * expected)


def _contains(splits: Ranges, split: int) -> bool:
    return not subtract(((split, split + 1),), splits)


def _held_splits(task: DispatcherTask, done: int) -> Ranges:
    splits = task.assigned
    done = max(done, splits.num_done)
    return (
        subtract(((done, splits.num_assigned),), drop_below(splits.returned, done))
        if splits.num_held
        else ()
    )


def _typical_split_seconds(
    state: DispatcherState, iteration: JobIteration, context: DecisionContext
) -> float:
    """Return the average seconds per split and task, until the latest progress."""
    activity = context.soft_state.activity.iterations[iteration.iteration_id]
    last_progress = context.soft_state.last_progress
    until = max(last_progress.get(task_id, activity.started_at) for task_id in iteration.tasks)
    num_done = max(1, _count_done(state, iteration, context))
    return iteration.num_active_tasks * max(0.0, until - activity.started_at) / num_done


def _count_done(state: DispatcherState, iteration: JobIteration, context: DecisionContext) -> int:
    """Return the number of splits done since this dispatcher process started, as far as known."""
    activity = context.soft_state.activity.iterations[iteration.iteration_id]
    return count_done_splits(state, iteration) - activity.initially_done
