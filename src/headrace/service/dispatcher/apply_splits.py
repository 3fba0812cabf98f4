"""Functions that apply events about splits: assigned, returned and missing ones.

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
    require(task.phase is TaskPhase.RUNNING, "the task does not run")
    return task


def splits_assigned(state: DispatcherState, event: events.SplitsAssigned) -> None:
    """Move splits from the stream, or from the returned ones, to a task."""
    task = running_task(state, event.task_id)
    splits = task.assigned
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(event.assignment_number == splits.num_assignments, "it is not the task's next grant")
    require(event.start < event.stop, "it deals nothing")
    given = ((event.start, event.stop),)
    rows = pool.partial_splits.pop(event.start, ())
    if rows:
        require(event.stop == event.start + 1, "a unit in part is dealt alone")
    elif event.start < pool.next_split:
        left = subtract(pool.returned, given)
        returned = total_length(pool.returned) - total_length(left)
        require(returned == event.stop - event.start, "the units were dealt already")
        pool.returned = left
    else:
        require(event.start == pool.next_split, "it leaves units out")
        pool.next_split = event.stop
    pool.num_held -= splits.num_held
    splits.num_assignments, splits.last_assignment, splits.last_ordinals = (
        event.assignment_number + 1,
        (event.start, event.stop),
        rows,
    )
    drop_done_splits(task, event.num_done)
    if rows:
        splits.remaining_ordinals[splits.num_assigned] = rows
    if splits.runs and splits.runs[-1][1] == event.start:
        splits.runs[-1] = (splits.runs[-1][0], event.stop)
    else:
        splits.runs.append((event.start, event.stop))
    splits.num_assigned += event.stop - event.start
    pool.num_held += splits.num_held


def drop_done_splits(task: DispatcherTask, num_done: int) -> None:
    """Forget the splits of a task before a number: they are done."""
    splits = task.assigned
    if num_done > splits.num_done:
        drop_first(splits.runs, num_done - splits.num_done)
        splits.num_done = num_done
        splits.returned = drop_below(splits.returned, num_done)
        splits.delivered = drop_below(splits.delivered, num_done)
        splits.partially_delivered = drop_below(splits.partially_delivered, num_done)
        for unit in [unit for unit in splits.remaining_ordinals if unit < num_done]:
            del splits.remaining_ordinals[unit]


def splits_returned(state: DispatcherState, event: events.SplitsReturned) -> None:
    """Return splits of a task to the pool, to be assigned first."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(bool(event.splits), "it returns nothing")
    _require_held(task, event.splits)
    back = task.assigned.to_split_indices(event.splits)
    if task.phase is TaskPhase.RUNNING:
        pool.num_held -= total_length(event.splits)
    else:
        require(
            task.is_unavailable and not task.awaiting_reports, "somebody may have something of them"
        )
        require(pool.exactly_once or not iteration.finished, "the iteration is finished")
        left = iteration.recoverable_splits(task)
        require(not subtract(event.splits, left), "somebody has something of them")
        if pool.exactly_once:
            _clear_poison_candidates(
                iteration, task, intersect(event.splits, task.assigned.partially_delivered)
            )
        if iteration.may_be_poison(task):
            _record_recovery(iteration, back, task.address)
        # A client that has not received everything is behind the others: it can now get the rest.
        iteration.finished, iteration.failure_reason = False, ""
    _return_to_pool(iteration, task, event.splits)


def splits_reassigned(state: DispatcherState, event: events.SplitsReassigned) -> None:
    """Return the splits of a slow task to the pool, to be assigned first."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    require(bool(event.splits), "it takes nothing over")
    require(task.phase is TaskPhase.RUNNING, "it does not run")
    require(iteration.pool.exactly_once, "what comes twice would count twice")
    _require_held(task, event.splits)
    iteration.pool.num_held -= total_length(event.splits)
    _return_to_pool(iteration, task, event.splits)


def _return_to_pool(iteration: JobIteration, task: DispatcherTask, units: Ranges) -> None:
    """Take splits from a task: what it had not yet delivered of them is assigned again."""
    splits = task.assigned
    pool = iteration.pool
    whole = units
    for unit in [unit for unit in splits.remaining_ordinals if contains(unit, units)]:
        _return_ordinals(iteration, _split_index(task, unit), splits.remaining_ordinals.pop(unit))
        whole = subtract(whole, ((unit, unit + 1),))
    splits.returned = union((*splits.returned, *units))
    back = splits.to_split_indices(whole)
    for place in [place for place in pool.partial_splits if contains(place, back)]:
        _return_ordinals(iteration, place, ALL_ORDINALS)
        back = subtract(back, ((place, place + 1),))
    pool.returned = union((*pool.returned, *back))


def _split_index(task: DispatcherTask, unit: int) -> int:
    """Return the split index in the stream of a number in assignment order."""
    ((place, _),) = task.assigned.to_split_indices(((unit, unit + 1),))
    return place


def _return_ordinals(iteration: JobIteration, split: int, ordinals: Ranges) -> None:
    """Mark ordinals of a split of the stream to be assigned again."""
    pool = iteration.pool
    known = pool.partial_splits.get(split, ())
    require(not intersect(known, ordinals), "ordinals come back that are to be dealt already")
    require(not contains(split, pool.returned), "the whole unit is to be dealt already")
    pool.partial_splits[split] = union((*known, *ordinals))


def contains(split: int, ranges: Ranges) -> bool:
    """Return whether a split is in one of the ranges."""
    return any(start <= split < stop for start, stop in ranges)


def _clear_poison_candidates(iteration: JobIteration, task: DispatcherTask, units: Ranges) -> None:
    """Clear the suspicion of splits that a lost worker delivered elements of."""
    pool = iteration.pool
    if units:
        places = task.assigned.to_split_indices(units)
        pool.recovered = subtract(pool.recovered, places)
        pool.poison_candidates = subtract(pool.poison_candidates, places)
        _forget_died_workers(iteration, places)


def _forget_died_workers(iteration: JobIteration, places: Ranges) -> None:
    for place in [place for place in iteration.pool.died_workers if contains(place, places)]:
        del iteration.pool.died_workers[place]


def _require_held(task: DispatcherTask, units: Ranges) -> None:
    splits = task.assigned
    require(units == union(units), "the ranges overlap")
    require(not units or units[0][0] >= splits.num_done, "units that are done cannot come back")
    require(not subtract(units, ((0, splits.num_assigned),)), "they were never dealt to the task")
    require(units == subtract(units, splits.returned), "they were returned already")


def _record_recovery(iteration: JobIteration, units: Ranges, address: str) -> None:
    """Record that splits were returned by a task whose worker died.

    Splits that were returned so twice become poison candidates.
    """
    pool = iteration.pool
    again = intersect(units, pool.poison_candidates)
    suspects = subtract(intersect(units, pool.recovered), again)
    if pool.exactly_once and pool.max_candidates_per_task == 1:
        for place in (each for start, stop in again for each in range(start, stop)):
            pool.died_workers[place] = (*pool.died_workers.get(place, ()), address)
    if again:
        # One of these splits killed the worker: smaller groups find it.
        pool.max_candidates_per_task = _group_size(pool.max_candidates_per_task)
    if suspects:
        pool.max_candidates_per_task = max(
            pool.max_candidates_per_task, _group_size(total_length(suspects))
        )
    pool.poison_candidates = union((*pool.poison_candidates, *suspects))
    pool.recovered = union((*pool.recovered, *units))


def _group_size(number: int) -> int:
    return max(1, number // 16)


def splits_abandoned(state: DispatcherState, event: events.SplitsAbandoned) -> None:
    """Stop assigning splits that repeatedly killed workers."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(not subtract(event.splits, iteration.recoverable_splits(task)), "somebody has them")
    units = task.assigned.to_split_indices(event.splits)
    mark_partially_delivered(task, event.splits)
    pool.abandoned = union((*pool.abandoned, *units))
    for place in (each for start, stop in units for each in range(start, stop)):
        pool.died_workers[place] = (*pool.died_workers.get(place, ()), task.address)
    for place in [place for place in pool.partial_splits if contains(place, units)]:
        del pool.partial_splits[place]
    pool.recovered = subtract(pool.recovered, units)
    pool.poison_candidates = subtract(pool.poison_candidates, units)
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
    units, parts = task.assigned.unacknowledged.pop(client_id, ((), ()))
    if iteration.finished and not iteration.clients:
        return
    found = [
        (place, ALL_ORDINALS)
        for start, stop in task.assigned.to_split_indices(units)
        for place in range(start, stop)
    ]
    found += [(_split_index(task, unit), rows) for unit, rows in parts]
    for place, rows in found:
        if contains(place, pool.abandoned):
            continue
        iteration.finished, iteration.failure_reason = False, ""
        if rows == ALL_ORDINALS:
            pool.returned = union((*pool.returned, (place, place + 1)))
        else:
            _return_ordinals(iteration, place, rows)


def mark_delivered(task: DispatcherTask, delivered: Ranges) -> None:
    """Record that splits were delivered completely."""
    splits = task.assigned
    splits.delivered = union((*splits.delivered, *drop_below(delivered, splits.num_done)))
    for unit in [unit for unit in splits.remaining_ordinals if contains(unit, delivered)]:
        del splits.remaining_ordinals[unit]


def is_held(task: DispatcherTask, split: int) -> bool:
    """Return whether a task must still deliver elements of a split."""
    splits = task.assigned
    is_there = splits.num_done <= split < splits.num_assigned
    return is_there and not contains(split, (*splits.returned, *splits.delivered))


def remove_ordinals(task: DispatcherTask, split: int, ordinals: Ranges) -> None:
    """Remove elements of a split from those that a task must deliver."""
    left = subtract(task.assigned.remaining_ordinals.get(split, ALL_ORDINALS), ordinals)
    if left:
        task.assigned.remaining_ordinals[split] = left
    else:
        mark_delivered(task, ((split, split + 1),))
        mark_partially_delivered(task, ((split, split + 1),))


def mark_prefix_partially_delivered(
    iteration: JobIteration, task: DispatcherTask, num_splits: int
) -> None:
    """Mark the first `num_splits` splits of a task as partially delivered.

    The clients that may have received elements of them have departed.
    """
    splits = task.assigned
    if splits.num_held and splits.num_done < num_splits and not iteration.pool.exactly_once:
        mark_partially_delivered(task, ((splits.num_done, num_splits),))


def mark_partially_delivered(task: DispatcherTask, units: Ranges) -> None:
    """Record that elements of splits may have been delivered."""
    splits = task.assigned
    splits.partially_delivered = union(
        (*splits.partially_delivered, *drop_below(units, splits.num_done))
    )


def departed_client_reported(state: DispatcherState, event: events.DepartedClientReported) -> None:
    """Take back what a departed client had not acknowledged, and record its losses."""
    task = state.tasks[event.task_id]
    splits = task.assigned
    iteration = state.iterations[task.iteration_id]
    del task.unconfirmed_clients[event.client_id]
    units = union((*event.returned, *event.lost))
    require(
        total_length(units) == total_length(event.returned) + total_length(event.lost),
        "the ranges overlap",
    )
    _require_held(task, units)
    require(not (event.returned and iteration.finished), "the iteration is finished")
    if task.phase is TaskPhase.RUNNING:
        iteration.pool.num_held -= total_length(units)
    splits.returned = union((*splits.returned, *event.lost))
    _return_to_pool(iteration, task, event.returned)
    for unit, rows in event.partially_consumed:
        if is_held(task, unit):
            remove_ordinals(task, unit, rows)
    for unit, rows in event.partially_returned:
        require(is_held(task, unit), "the task does not hold the unit")
        left = splits.remaining_ordinals.get(unit, ALL_ORDINALS)
        require(not subtract(rows, left), "the ordinals are not the task's to give")
        remove_ordinals(task, unit, rows)
        if not iteration.finished:
            _return_ordinals(iteration, _split_index(task, unit), rows)
    if event.lost:
        _record_missing(iteration, task, event.client_id, splits.to_split_indices(event.lost))
    iteration.version += 1


def tasks_forgotten(state: DispatcherState, event: events.TasksForgotten) -> None:
    """Remove lost tasks; the iteration remembers the splits lost with them."""
    iteration = state.iterations[event.iteration_id]
    for task_id in event.task_ids:
        task = state.tasks.pop(task_id)
        require(task.phase is TaskPhase.LOST and not task.awaiting_reports, "it is not over")
        iteration.tasks.remove(task_id)
        lost = task.missing_splits
        if lost or not iteration.assigns_splits:
            units = task.assigned.to_split_indices(lost)
            _record_missing(iteration, task, "", units)


def _record_missing(
    iteration: JobIteration, task: DispatcherTask, client_id: str, units: Ranges
) -> None:
    iteration.missing_splits.append(
        MissingSplits(
            task_id=task.task_id,
            client_id=client_id,
            splits=units,
            address=task.address,
            reason=task.reason,
        )
    )
    for old in iteration.missing_splits[:-MAX_REMEMBERED_LOSSES]:
        iteration.num_older_missing += total_length(old.splits)
    del iteration.missing_splits[:-MAX_REMEMBERED_LOSSES]
