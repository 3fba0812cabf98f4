"""Applies facts about units: what was dealt to whom, what came back, what is missing.

A part of `apply`, which says how. Units of a task are numbered in dealt order (`ranges`), and its
`returned`, `received` and `touched` are sets of those numbers; an iteration's units are places in
its stream.
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
from headrace.service.ranges import (
    Ranges,
    at_least,
    common,
    count,
    drop_first,
    subtracted,
    united,
)
from headrace.service.rows import EVERYTHING

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
    """Return a task that runs; anything else contradicts the fact in hand."""
    task = state.tasks[task_id]
    require(task.phase is TaskPhase.RUNNING, "the task does not run")
    return task


def splits_assigned(state: DispatcherState, event: events.SplitsAssigned) -> None:
    """Move units from the stream, or from those that came back, to a task."""
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
        left = subtracted(pool.returned, given)
        returned = count(pool.returned) - count(left)
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
    """Forget units of a task before a number: they are done."""
    splits = task.assigned
    if num_done > splits.num_done:
        drop_first(splits.runs, num_done - splits.num_done)
        splits.num_done = num_done
        splits.returned = at_least(splits.returned, num_done)
        splits.delivered = at_least(splits.delivered, num_done)
        splits.partially_delivered = at_least(splits.partially_delivered, num_done)
        for unit in [unit for unit in splits.remaining_ordinals if unit < num_done]:
            del splits.remaining_ordinals[unit]


def splits_returned(state: DispatcherState, event: events.SplitsReturned) -> None:
    """Put units of a task back, to be dealt first."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(bool(event.splits), "it returns nothing")
    _require_held(task, event.splits)
    back = task.assigned.to_split_indices(event.splits)
    if task.phase is TaskPhase.RUNNING:
        pool.num_held -= count(event.splits)
    else:
        require(
            task.is_unavailable and not task.awaiting_reports, "somebody may have something of them"
        )
        require(pool.exactly_once or not iteration.finished, "the iteration is finished")
        left = iteration.recoverable_splits(task)
        require(not subtracted(event.splits, left), "somebody has something of them")
        if pool.exactly_once:
            _clear_poison_candidates(
                iteration, task, common(event.splits, task.assigned.partially_delivered)
            )
        if iteration.may_be_poison(task):
            _record_recovery(iteration, back, task.address)
        # One of its clients has not got all, though the others have gone on: now it may.
        iteration.finished, iteration.failure_reason = False, ""
    _return_to_pool(iteration, task, event.splits)


def splits_reassigned(state: DispatcherState, event: events.SplitsReassigned) -> None:
    """Put units that a slow task holds back, to be dealt first."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    require(bool(event.splits), "it takes nothing over")
    require(task.phase is TaskPhase.RUNNING, "it does not run")
    require(iteration.pool.exactly_once, "what comes twice would count twice")
    _require_held(task, event.splits)
    iteration.pool.num_held -= count(event.splits)
    _return_to_pool(iteration, task, event.splits)


def _return_to_pool(iteration: JobIteration, task: DispatcherTask, units: Ranges) -> None:
    """Take units from a task: what it was still to give of them is dealt again."""
    splits = task.assigned
    pool = iteration.pool
    whole = units
    for unit in [unit for unit in splits.remaining_ordinals if contains(unit, units)]:
        _return_ordinals(iteration, _split_index(task, unit), splits.remaining_ordinals.pop(unit))
        whole = subtracted(whole, ((unit, unit + 1),))
    splits.returned = united((*splits.returned, *units))
    back = splits.to_split_indices(whole)
    for place in [place for place in pool.partial_splits if contains(place, back)]:
        _return_ordinals(iteration, place, EVERYTHING)
        back = subtracted(back, ((place, place + 1),))
    pool.returned = united((*pool.returned, *back))


def _split_index(task: DispatcherTask, unit: int) -> int:
    """Return where in the stream a unit in dealt order is."""
    ((place, _),) = task.assigned.to_split_indices(((unit, unit + 1),))
    return place


def _return_ordinals(iteration: JobIteration, split: int, ordinals: Ranges) -> None:
    """Deal ordinals of a unit of the stream again."""
    pool = iteration.pool
    known = pool.partial_splits.get(split, ())
    require(not common(known, ordinals), "ordinals come back that are to be dealt already")
    require(not contains(split, pool.returned), "the whole unit is to be dealt already")
    pool.partial_splits[split] = united((*known, *ordinals))


def contains(split: int, ranges: Ranges) -> bool:
    """Whether a unit is in one of the ranges."""
    return any(start <= split < stop for start, stop in ranges)


def _clear_poison_candidates(iteration: JobIteration, task: DispatcherTask, units: Ranges) -> None:
    """Take note that a worker which was lost got on with units, so that it was not these."""
    pool = iteration.pool
    if units:
        places = task.assigned.to_split_indices(units)
        pool.recovered = subtracted(pool.recovered, places)
        pool.poison_candidates = subtracted(pool.poison_candidates, places)
        _forget_died_workers(iteration, places)


def _forget_died_workers(iteration: JobIteration, places: Ranges) -> None:
    for place in [place for place in iteration.pool.died_workers if contains(place, places)]:
        del iteration.pool.died_workers[place]


def _require_held(task: DispatcherTask, units: Ranges) -> None:
    splits = task.assigned
    require(units == united(units), "the ranges overlap")
    require(not units or units[0][0] >= splits.num_done, "units that are done cannot come back")
    require(not subtracted(units, ((0, splits.num_assigned),)), "they were never dealt to the task")
    require(units == subtracted(units, splits.returned), "they were returned already")


def _record_recovery(iteration: JobIteration, units: Ranges, address: str) -> None:
    """Take note that units outlived a task, as well as some of them did before."""
    pool = iteration.pool
    again = common(units, pool.poison_candidates)
    suspects = subtracted(common(units, pool.recovered), again)
    if pool.exactly_once and pool.max_candidates_per_task == 1:
        for place in (each for start, stop in again for each in range(start, stop)):
            pool.died_workers[place] = (*pool.died_workers.get(place, ()), address)
    if again:
        # One of these it was: in smaller groups it is found.
        pool.max_candidates_per_task = _group_size(pool.max_candidates_per_task)
    if suspects:
        pool.max_candidates_per_task = max(
            pool.max_candidates_per_task, _group_size(count(suspects))
        )
    pool.poison_candidates = united((*pool.poison_candidates, *suspects))
    pool.recovered = united((*pool.recovered, *units))


def _group_size(number: int) -> int:
    return max(1, number // 16)


def splits_abandoned(state: DispatcherState, event: events.SplitsAbandoned) -> None:
    """Deal units that workers died with no more."""
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    require(not subtracted(event.splits, iteration.recoverable_splits(task)), "somebody has them")
    units = task.assigned.to_split_indices(event.splits)
    mark_partially_delivered(task, event.splits)
    pool.abandoned = united((*pool.abandoned, *units))
    for place in (each for start, stop in units for each in range(start, stop)):
        pool.died_workers[place] = (*pool.died_workers.get(place, ()), task.address)
    for place in [place for place in pool.partial_splits if contains(place, units)]:
        del pool.partial_splits[place]
    pool.recovered = subtracted(pool.recovered, units)
    pool.poison_candidates = subtracted(pool.poison_candidates, units)
    # It was these; the others are dealt sooner if many go together.
    pool.max_candidates_per_task = _group_size(count(pool.poison_candidates))
    iteration.version += 1


def mark_unavailable(state: DispatcherState, task: DispatcherTask) -> None:
    """Mark a task of which nothing more will come; who read it must say what did."""
    iteration = state.iterations[task.iteration_id]
    iteration.version += 1
    task.is_unavailable = True
    if task.assigned.num_held:
        task.awaiting_reports = set(iteration.clients)
    if task.mode_state is not None:
        task.mode_state.task_unavailable(iteration, task)
    if task.unconfirmed_clients:
        # What they received of this, nobody will know.
        mark_prefix_partially_delivered(iteration, task, max(task.unconfirmed_clients.values()))
        task.unconfirmed_clients = {}


def return_unacknowledged(iteration: JobIteration, task: DispatcherTask, client_id: str) -> None:
    """Deal again what a client that is gone had of a task that is gone, and did not use."""
    pool = iteration.pool
    units, parts = task.assigned.unacknowledged.pop(client_id, ((), ()))
    if iteration.finished and not iteration.clients:
        return
    found = [
        (place, EVERYTHING)
        for start, stop in task.assigned.to_split_indices(units)
        for place in range(start, stop)
    ]
    found += [(_split_index(task, unit), rows) for unit, rows in parts]
    for place, rows in found:
        if contains(place, pool.abandoned):
            continue
        iteration.finished, iteration.failure_reason = False, ""
        if rows == EVERYTHING:
            pool.returned = united((*pool.returned, (place, place + 1)))
        else:
            _return_ordinals(iteration, place, rows)


def mark_delivered(task: DispatcherTask, delivered: Ranges) -> None:
    """Take note that units came whole to somebody."""
    splits = task.assigned
    splits.delivered = united((*splits.delivered, *at_least(delivered, splits.num_done)))
    for unit in [unit for unit in splits.remaining_ordinals if contains(unit, delivered)]:
        del splits.remaining_ordinals[unit]


def is_held(task: DispatcherTask, split: int) -> bool:
    """Whether a task is still to give something of a unit."""
    splits = task.assigned
    is_there = splits.num_done <= split < splits.num_assigned
    return is_there and not contains(split, (*splits.returned, *splits.delivered))


def remove_ordinals(task: DispatcherTask, split: int, ordinals: Ranges) -> None:
    """Take note that some elements of a unit are no longer the task's to give."""
    left = subtracted(task.assigned.remaining_ordinals.get(split, EVERYTHING), ordinals)
    if left:
        task.assigned.remaining_ordinals[split] = left
    else:
        mark_delivered(task, ((split, split + 1),))
        mark_partially_delivered(task, ((split, split + 1),))


def mark_prefix_partially_delivered(
    iteration: JobIteration, task: DispatcherTask, num_splits: int
) -> None:
    """Take the first units of a task, up to a number, for touched: who may have them is gone."""
    splits = task.assigned
    if splits.num_held and splits.num_done < num_splits and not iteration.pool.exactly_once:
        mark_partially_delivered(task, ((splits.num_done, num_splits),))


def mark_partially_delivered(task: DispatcherTask, units: Ranges) -> None:
    """Take note that somebody may have something of units."""
    splits = task.assigned
    splits.partially_delivered = united(
        (*splits.partially_delivered, *at_least(units, splits.num_done))
    )


def departed_client_reported(state: DispatcherState, event: events.DepartedClientReported) -> None:
    """Take back what a client that is gone had not acknowledged; note what is missing of it."""
    task = state.tasks[event.task_id]
    splits = task.assigned
    iteration = state.iterations[task.iteration_id]
    del task.unconfirmed_clients[event.client_id]
    units = united((*event.returned, *event.lost))
    require(count(units) == count(event.returned) + count(event.lost), "the ranges overlap")
    _require_held(task, units)
    require(not (event.returned and iteration.finished), "the iteration is finished")
    if task.phase is TaskPhase.RUNNING:
        iteration.pool.num_held -= count(units)
    splits.returned = united((*splits.returned, *event.lost))
    _return_to_pool(iteration, task, event.returned)
    for unit, rows in event.partially_consumed:
        if is_held(task, unit):
            remove_ordinals(task, unit, rows)
    for unit, rows in event.partially_returned:
        require(is_held(task, unit), "the task does not hold the unit")
        left = splits.remaining_ordinals.get(unit, EVERYTHING)
        require(not subtracted(rows, left), "the ordinals are not the task's to give")
        remove_ordinals(task, unit, rows)
        if not iteration.finished:
            _return_ordinals(iteration, _split_index(task, unit), rows)
    if event.lost:
        _record_missing(iteration, task, event.client_id, splits.to_split_indices(event.lost))
    iteration.version += 1


def tasks_forgotten(state: DispatcherState, event: events.TasksForgotten) -> None:
    """Forget lost tasks; what was lost with them stays in mind."""
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
        iteration.num_older_missing += count(old.splits)
    del iteration.missing_splits[:-MAX_REMEMBERED_LOSSES]
