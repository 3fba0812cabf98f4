"""Functions that apply events about assigned, returned and missing splits.

Part of `apply`. Splits of a task are numbered in assignment order (`ranges`), and its `returned`,
`delivered` and `partially_delivered` are sets of these numbers; splits of an iteration are indices
in its stream.
"""

from __future__ import annotations

from headrace.service.dispatcher import events
from headrace.service.dispatcher.event import require
from headrace.service.dispatcher.state import (
    MAX_REMEMBERED_LOSSES,
    DispatcherState,
    DispatcherTask,
    JobIteration,
    MissingSplits,
    TaskPhase,
)
from headrace.service.element_sets import ALL_ORDINALS
from headrace.service.ranges import (
    Ranges,
    drop_below,
    drop_first,
    intersect,
    subtract,
    total_length,
    union,
)

__all__ = [
    "contains",
    "departed_client_reported",
    "drop_done_splits",
    "is_held",
    "mark_delivered",
    "mark_partially_delivered",
    "mark_prefix_partially_delivered",
    "mark_unavailable",
    "remove_ordinals",
    "return_unacknowledged",
    "running_task",
    "splits_abandoned",
    "splits_assigned",
    "splits_reassigned",
    "splits_returned",
    "tasks_forgotten",
]


def running_task(state: DispatcherState, task_id: int) -> DispatcherTask:
    """Return a running task; any other task contradicts the event."""
    task = state.tasks[task_id]
    require(task.phase is TaskPhase.RUNNING, "the task is not running")
    return task


def splits_assigned(state: DispatcherState, event: events.SplitsAssigned) -> None:
    """Move splits from the stream, or from the returned ones, to a task."""
    task = running_task(state, event.task_id)
    assigned = task.assigned
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(
        event.assignment_number == assigned.num_assignments, "assignment_number is not the next one"
    )
    require(event.start < event.stop, "the range is empty")
    assigned_range = ((event.start, event.stop),)
    ordinals = pool.partial_splits.pop(event.start, ())
    if ordinals:
        require(event.stop == event.start + 1, "a partial split must be assigned alone")
    elif event.start < pool.next_split:
        remaining = subtract(pool.returned, assigned_range)
        num_returned = total_length(pool.returned) - total_length(remaining)
        require(num_returned == event.stop - event.start, "the splits are already assigned")
        pool.returned = remaining
    else:
        require(event.start == pool.next_split, "unassigned splits are skipped")
        pool.next_split = event.stop
    pool.num_held -= assigned.num_held
    assigned.num_assignments, assigned.last_assignment, assigned.last_ordinals = (
        event.assignment_number + 1,
        (event.start, event.stop),
        ordinals,
    )
    drop_done_splits(task, event.num_done)
    if ordinals:
        assigned.remaining_ordinals[assigned.num_assigned] = ordinals
    if assigned.runs and assigned.runs[-1][1] == event.start:
        assigned.runs[-1] = (assigned.runs[-1][0], event.stop)
    else:
        assigned.runs.append((event.start, event.stop))
    assigned.num_assigned += event.stop - event.start
    pool.num_held += assigned.num_held


def drop_done_splits(task: DispatcherTask, num_done: int) -> None:
    """Forget the splits of a task before a number: they are done."""
    assigned = task.assigned
    if num_done > assigned.num_done:
        drop_first(assigned.runs, num_done - assigned.num_done)
        assigned.num_done = num_done
        assigned.returned = drop_below(assigned.returned, num_done)
        assigned.delivered = drop_below(assigned.delivered, num_done)
        assigned.partially_delivered = drop_below(assigned.partially_delivered, num_done)
        for split in [split for split in assigned.remaining_ordinals if split < num_done]:
            del assigned.remaining_ordinals[split]


def splits_returned(state: DispatcherState, event: events.SplitsReturned) -> None:
    """Return splits of a task to the pool, to be assigned first."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(bool(event.splits), "splits is empty")
    _require_held(task, event.splits)
    split_indices = task.assigned.to_split_indices(event.splits)
    if task.phase is TaskPhase.RUNNING:
        pool.num_held -= total_length(event.splits)
    else:
        require(
            task.is_unavailable and not task.awaiting_reports,
            "clients may still report elements of these splits",
        )
        require(pool.exactly_once or not iteration.finished, "the iteration is finished")
        recoverable = iteration.recoverable_splits(task)
        require(
            not subtract(event.splits, recoverable), "clients received elements of these splits"
        )
        if pool.exactly_once:
            _clear_poison_candidates(
                iteration, task, intersect(event.splits, task.assigned.partially_delivered)
            )
        if iteration.may_be_poison(task):
            _record_recovery(iteration, split_indices, task.address)
        # A client that still reads the iteration can now receive the returned splits.
        iteration.finished, iteration.failure_reason = False, ""
    _return_to_pool(iteration, task, event.splits)


def splits_reassigned(state: DispatcherState, event: events.SplitsReassigned) -> None:
    """Return the splits of a slow task to the pool, to be assigned first."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    require(bool(event.splits), "splits is empty")
    require(task.phase is TaskPhase.RUNNING, "the task is not running")
    require(
        iteration.pool.exactly_once, "duplicates cannot be dropped without exactly-once delivery"
    )
    _require_held(task, event.splits)
    iteration.pool.num_held -= total_length(event.splits)
    _return_to_pool(iteration, task, event.splits)


def _return_to_pool(iteration: JobIteration, task: DispatcherTask, splits: Ranges) -> None:
    """Take splits from a task: what it had not yet delivered of them is assigned again."""
    assigned = task.assigned
    pool = iteration.pool
    complete = splits
    for split in [split for split in assigned.remaining_ordinals if contains(split, splits)]:
        _return_ordinals(
            iteration, _split_index(task, split), assigned.remaining_ordinals.pop(split)
        )
        complete = subtract(complete, ((split, split + 1),))
    assigned.returned = union((*assigned.returned, *splits))
    split_indices = assigned.to_split_indices(complete)
    for split_index in [
        split_index for split_index in pool.partial_splits if contains(split_index, split_indices)
    ]:
        _return_ordinals(iteration, split_index, ALL_ORDINALS)
        split_indices = subtract(split_indices, ((split_index, split_index + 1),))
    pool.returned = union((*pool.returned, *split_indices))


def _split_index(task: DispatcherTask, split: int) -> int:
    """Return the split index in the stream of a number in assignment order."""
    ((split_index, _),) = task.assigned.to_split_indices(((split, split + 1),))
    return split_index


def _return_ordinals(iteration: JobIteration, split: int, ordinals: Ranges) -> None:
    """Mark ordinals of a split of the stream to be assigned again."""
    pool = iteration.pool
    known = pool.partial_splits.get(split, ())
    require(not intersect(known, ordinals), "some ordinals are already unassigned")
    require(not contains(split, pool.returned), "the whole split is already unassigned")
    pool.partial_splits[split] = union((*known, *ordinals))


def contains(split: int, ranges: Ranges) -> bool:
    """Return whether a split is in one of the ranges."""
    return any(start <= split < stop for start, stop in ranges)


def _clear_poison_candidates(iteration: JobIteration, task: DispatcherTask, splits: Ranges) -> None:
    """Remove splits from the poison candidates: their lost worker delivered elements of them."""
    pool = iteration.pool
    if splits:
        split_indices = task.assigned.to_split_indices(splits)
        pool.recovered = subtract(pool.recovered, split_indices)
        pool.poison_candidates = subtract(pool.poison_candidates, split_indices)
        _forget_died_workers(iteration, split_indices)


def _forget_died_workers(iteration: JobIteration, split_indices: Ranges) -> None:
    for split_index in [
        split_index
        for split_index in iteration.pool.died_workers
        if contains(split_index, split_indices)
    ]:
        del iteration.pool.died_workers[split_index]


def _require_held(task: DispatcherTask, splits: Ranges) -> None:
    assigned = task.assigned
    require(splits == union(splits), "the ranges overlap or are not sorted")
    require(
        not splits or splits[0][0] >= assigned.num_done, "splits that are done cannot be returned"
    )
    require(
        not subtract(splits, ((0, assigned.num_assigned),)),
        "the splits were not assigned to the task",
    )
    require(splits == subtract(splits, assigned.returned), "the splits were already returned")


def _record_recovery(iteration: JobIteration, split_indices: Ranges, address: str) -> None:
    """Record that splits were returned by a task whose worker died.

    Splits that were returned so twice become poison candidates.
    """
    pool = iteration.pool
    known_candidates = intersect(split_indices, pool.poison_candidates)
    new_candidates = subtract(intersect(split_indices, pool.recovered), known_candidates)
    if pool.exactly_once and pool.max_candidates_per_task == 1:
        for split_index in (
            each for start, stop in known_candidates for each in range(start, stop)
        ):
            pool.died_workers[split_index] = (*pool.died_workers.get(split_index, ()), address)
    if known_candidates:
        # One of these splits killed the worker: smaller groups find it.
        pool.max_candidates_per_task = _group_size(pool.max_candidates_per_task)
    if new_candidates:
        pool.max_candidates_per_task = max(
            pool.max_candidates_per_task, _group_size(total_length(new_candidates))
        )
    pool.poison_candidates = union((*pool.poison_candidates, *new_candidates))
    pool.recovered = union((*pool.recovered, *split_indices))


def _group_size(number: int) -> int:
    return max(1, number // 16)


def splits_abandoned(state: DispatcherState, event: events.SplitsAbandoned) -> None:
    """Stop assigning splits that repeatedly killed workers."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(
        not subtract(event.splits, iteration.recoverable_splits(task)),
        "clients received elements of these splits",
    )
    split_indices = task.assigned.to_split_indices(event.splits)
    mark_partially_delivered(task, event.splits)
    pool.abandoned = union((*pool.abandoned, *split_indices))
    for split_index in (each for start, stop in split_indices for each in range(start, stop)):
        pool.died_workers[split_index] = (*pool.died_workers.get(split_index, ()), task.address)
    for split_index in [
        split_index for split_index in pool.partial_splits if contains(split_index, split_indices)
    ]:
        del pool.partial_splits[split_index]
    pool.recovered = subtract(pool.recovered, split_indices)
    pool.poison_candidates = subtract(pool.poison_candidates, split_indices)
    # The poison splits were found; larger groups let the other candidates be assigned sooner.
    pool.max_candidates_per_task = _group_size(total_length(pool.poison_candidates))
    iteration.version += 1


def mark_unavailable(state: DispatcherState, task: DispatcherTask) -> None:
    """Mark a task as unavailable: it delivers nothing more, and its clients must report."""
    iteration = state.iterations[task.iteration_id]
    iteration.version += 1
    task.is_unavailable = True
    if task.assigned.num_held:
        task.awaiting_reports = set(iteration.clients)
    if task.mode_state is not None:
        task.mode_state.task_unavailable(iteration, task)
    if task.unconfirmed_clients:
        # Departed clients can no longer report what they received of it.
        mark_prefix_partially_delivered(iteration, task, max(task.unconfirmed_clients.values()))
        task.unconfirmed_clients = {}


def return_unacknowledged(iteration: JobIteration, task: DispatcherTask, client_id: str) -> None:
    """Assign again what a departed client had received of an unavailable task and not consumed."""
    pool = iteration.pool
    splits, partial_splits = task.assigned.unacknowledged.pop(client_id, ((), ()))
    if iteration.finished and not iteration.clients:
        return
    unacknowledged = [
        (split_index, ALL_ORDINALS)
        for start, stop in task.assigned.to_split_indices(splits)
        for split_index in range(start, stop)
    ]
    unacknowledged += [(_split_index(task, split), ordinals) for split, ordinals in partial_splits]
    for split_index, ordinals in unacknowledged:
        if contains(split_index, pool.abandoned):
            continue
        iteration.finished, iteration.failure_reason = False, ""
        if ordinals == ALL_ORDINALS:
            pool.returned = union((*pool.returned, (split_index, split_index + 1)))
        else:
            _return_ordinals(iteration, split_index, ordinals)


def mark_delivered(task: DispatcherTask, delivered: Ranges) -> None:
    """Record that splits were delivered completely."""
    assigned = task.assigned
    assigned.delivered = union((*assigned.delivered, *drop_below(delivered, assigned.num_done)))
    for split in [split for split in assigned.remaining_ordinals if contains(split, delivered)]:
        del assigned.remaining_ordinals[split]


def is_held(task: DispatcherTask, split: int) -> bool:
    """Return whether a task must still deliver elements of a split."""
    assigned = task.assigned
    is_assigned = assigned.num_done <= split < assigned.num_assigned
    return is_assigned and not contains(split, (*assigned.returned, *assigned.delivered))


def remove_ordinals(task: DispatcherTask, split: int, ordinals: Ranges) -> None:
    """Remove elements of a split from those that a task must deliver."""
    remaining = subtract(task.assigned.remaining_ordinals.get(split, ALL_ORDINALS), ordinals)
    if remaining:
        task.assigned.remaining_ordinals[split] = remaining
    else:
        mark_delivered(task, ((split, split + 1),))
        mark_partially_delivered(task, ((split, split + 1),))


def mark_prefix_partially_delivered(
    iteration: JobIteration, task: DispatcherTask, num_splits: int
) -> None:
    """Mark the first `num_splits` splits of a task as partially delivered.

    The clients that may have received elements of them have departed.
    """
    assigned = task.assigned
    if assigned.num_held and assigned.num_done < num_splits and not iteration.pool.exactly_once:
        mark_partially_delivered(task, ((assigned.num_done, num_splits),))


def mark_partially_delivered(task: DispatcherTask, splits: Ranges) -> None:
    """Record that elements of splits may have been delivered."""
    assigned = task.assigned
    assigned.partially_delivered = union(
        (*assigned.partially_delivered, *drop_below(splits, assigned.num_done))
    )


def departed_client_reported(state: DispatcherState, event: events.DepartedClientReported) -> None:
    """Take back what a departed client had not acknowledged, and record its losses."""
    task = state.tasks[event.task_id]
    assigned = task.assigned
    iteration = state.iterations[task.iteration_id]
    del task.unconfirmed_clients[event.client_id]
    splits = union((*event.returned, *event.lost))
    require(
        total_length(splits) == total_length(event.returned) + total_length(event.lost),
        "the ranges overlap",
    )
    _require_held(task, splits)
    require(not (event.returned and iteration.finished), "the iteration is finished")
    if task.phase is TaskPhase.RUNNING:
        iteration.pool.num_held -= total_length(splits)
    assigned.returned = union((*assigned.returned, *event.lost))
    _return_to_pool(iteration, task, event.returned)
    for split, ordinals in event.partially_consumed:
        if is_held(task, split):
            remove_ordinals(task, split, ordinals)
    for split, ordinals in event.partially_returned:
        require(is_held(task, split), "the task does not hold the split")
        remaining = assigned.remaining_ordinals.get(split, ALL_ORDINALS)
        require(not subtract(ordinals, remaining), "the task does not hold these ordinals")
        remove_ordinals(task, split, ordinals)
        if not iteration.finished:
            _return_ordinals(iteration, _split_index(task, split), ordinals)
    if event.lost:
        _record_missing(iteration, task, event.client_id, assigned.to_split_indices(event.lost))
    iteration.version += 1


def tasks_forgotten(state: DispatcherState, event: events.TasksForgotten) -> None:
    """Remove lost tasks; the iteration remembers the splits lost with them."""
    iteration = state.iterations[event.iteration_id]
    for task_id in event.task_ids:
        task = state.tasks.pop(task_id)
        require(
            task.phase is TaskPhase.LOST and not task.awaiting_reports,
            "the task is not lost, or reports of clients are pending",
        )
        iteration.tasks.remove(task_id)
        missing = task.missing_splits
        if missing or not iteration.assigns_splits:
            split_indices = task.assigned.to_split_indices(missing)
            _record_missing(iteration, task, "", split_indices)


def _record_missing(
    iteration: JobIteration, task: DispatcherTask, client_id: str, split_indices: Ranges
) -> None:
    iteration.missing_splits.append(
        MissingSplits(
            task_id=task.task_id,
            client_id=client_id,
            splits=split_indices,
            address=task.address,
            reason=task.reason,
        )
    )
    for dropped in iteration.missing_splits[:-MAX_REMEMBERED_LOSSES]:
        iteration.num_older_missing += total_length(dropped.splits)
    del iteration.missing_splits[:-MAX_REMEMBERED_LOSSES]
