"""Applies facts about units: what was dealt to whom, what came back, what is missing.

A part of `apply`, which says how. Units of a task are numbered in dealt order (`ranges`), and its
`returned`, `received` and `touched` are sets of those numbers; an iteration's units are places in
its stream.
"""

from __future__ import annotations

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.fact import require
from headrace.service.dispatcher.state import (
    LOSSES_REMEMBERED,
    DispatcherState,
    Iteration,
    Missing,
    Task,
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
    "client_dropped",
    "forget_done",
    "give",
    "give_back_kept",
    "give_up",
    "is_among",
    "is_held",
    "receive",
    "running_task",
    "tasks_forgotten",
    "touch",
    "touch_first",
    "units_dealt",
    "units_given_up",
    "units_returned",
    "units_taken_over",
]


def running_task(state: DispatcherState, task_id: int) -> Task:
    """Return a task that runs; anything else contradicts the fact in hand."""
    task = state.tasks[task_id]
    require(task.phase is TaskPhase.RUNNING, "the task does not run")
    return task


def units_dealt(state: DispatcherState, fact: updates.UnitsDealt) -> None:
    """Move units from the stream, or from those that came back, to a task."""
    task = running_task(state, fact.task_id)
    splits = task.splits
    iteration = state.iterations[task.iteration_id]
    pool = iteration.splits
    require(fact.number == splits.grants, "it is not the task's next grant")
    require(fact.start < fact.stop, "it deals nothing")
    given = ((fact.start, fact.stop),)
    rows = pool.parts.pop(fact.start, ())
    if rows:
        require(fact.stop == fact.start + 1, "a unit in part is dealt alone")
    elif fact.start < pool.next:
        left = subtracted(pool.returned, given)
        returned = count(pool.returned) - count(left)
        require(returned == fact.stop - fact.start, "the units were dealt already")
        pool.returned = left
    else:
        require(fact.start == pool.next, "it leaves units out")
        pool.next = fact.stop
    pool.held -= splits.held
    splits.grants, splits.last, splits.last_rows = (
        fact.number + 1,
        (fact.start, fact.stop),
        rows,
    )
    forget_done(task, fact.done)
    if rows:
        splits.rows[splits.dealt] = rows
    if splits.runs and splits.runs[-1][1] == fact.start:
        splits.runs[-1] = (splits.runs[-1][0], fact.stop)
    else:
        splits.runs.append((fact.start, fact.stop))
    splits.dealt += fact.stop - fact.start
    pool.held += splits.held


def forget_done(task: Task, done: int) -> None:
    """Forget units of a task before a number: they are done."""
    splits = task.splits
    if done > splits.done:
        drop_first(splits.runs, done - splits.done)
        splits.done = done
        splits.returned = at_least(splits.returned, done)
        splits.received = at_least(splits.received, done)
        splits.touched = at_least(splits.touched, done)
        for unit in [unit for unit in splits.rows if unit < done]:
            del splits.rows[unit]


def units_returned(state: DispatcherState, fact: updates.UnitsReturned) -> None:
    """Put units of a task back, to be dealt first."""
    task = state.tasks[fact.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.splits
    require(bool(fact.units), "it returns nothing")
    _require_held(task, fact.units)
    back = task.splits.located(fact.units)
    if task.phase is TaskPhase.RUNNING:
        pool.held -= count(fact.units)
    else:
        require(task.gone and not task.unsettled, "somebody may have something of them")
        require(pool.exactly_once or not iteration.finished, "the iteration is finished")
        left = iteration.left_of(task)
        require(not subtracted(fact.units, left), "somebody has something of them")
        if pool.exactly_once:
            _clear_of_suspicion(iteration, task, common(fact.units, task.splits.touched))
        if iteration.may_be_poison(task):
            _recover(iteration, back, task.address)
        # One of its clients has not got all, though the others have gone on: now it may.
        iteration.finished, iteration.failed = False, ""
    _put_back(iteration, task, fact.units)


def units_taken_over(state: DispatcherState, fact: updates.UnitsTakenOver) -> None:
    """Put units that a slow task holds back, to be dealt first."""
    task = state.tasks[fact.task_id]
    iteration = state.iterations[task.iteration_id]
    require(bool(fact.units), "it takes nothing over")
    require(task.phase is TaskPhase.RUNNING, "it does not run")
    require(iteration.splits.exactly_once, "what comes twice would count twice")
    _require_held(task, fact.units)
    iteration.splits.held -= count(fact.units)
    _put_back(iteration, task, fact.units)


def _put_back(iteration: Iteration, task: Task, units: Ranges) -> None:
    """Take units from a task: what it was still to give of them is dealt again."""
    splits = task.splits
    pool = iteration.splits
    whole = units
    for unit in [unit for unit in splits.rows if is_among(unit, units)]:
        _want(iteration, _place(task, unit), splits.rows.pop(unit))
        whole = subtracted(whole, ((unit, unit + 1),))
    splits.returned = united((*splits.returned, *units))
    back = splits.located(whole)
    for place in [place for place in pool.parts if is_among(place, back)]:
        _want(iteration, place, EVERYTHING)
        back = subtracted(back, ((place, place + 1),))
    pool.returned = united((*pool.returned, *back))


def _place(task: Task, unit: int) -> int:
    """Return where in the stream a unit in dealt order is."""
    ((place, _),) = task.splits.located(((unit, unit + 1),))
    return place


def _want(iteration: Iteration, place: int, rows: Ranges) -> None:
    """Deal ordinals of a unit of the stream again."""
    pool = iteration.splits
    known = pool.parts.get(place, ())
    require(not common(known, rows), "ordinals come back that are to be dealt already")
    require(not is_among(place, pool.returned), "the whole unit is to be dealt already")
    pool.parts[place] = united((*known, *rows))


def is_among(unit: int, units: Ranges) -> bool:
    """Whether a unit is in one of the ranges."""
    return any(start <= unit < stop for start, stop in units)


def _clear_of_suspicion(iteration: Iteration, task: Task, units: Ranges) -> None:
    """Take note that a worker which was lost got on with units, so that it was not these."""
    pool = iteration.splits
    if units:
        places = task.splits.located(units)
        pool.recovered = subtracted(pool.recovered, places)
        pool.suspects = subtracted(pool.suspects, places)
        _forget_deaths(iteration, places)


def _forget_deaths(iteration: Iteration, places: Ranges) -> None:
    for place in [place for place in iteration.splits.deaths if is_among(place, places)]:
        del iteration.splits.deaths[place]


def _require_held(task: Task, units: Ranges) -> None:
    splits = task.splits
    require(units == united(units), "the ranges overlap")
    require(not units or units[0][0] >= splits.done, "units that are done cannot come back")
    require(not subtracted(units, ((0, splits.dealt),)), "they were never dealt to the task")
    require(units == subtracted(units, splits.returned), "they were returned already")


def _recover(iteration: Iteration, units: Ranges, address: str) -> None:
    """Take note that units outlived a task, as well as some of them did before."""
    pool = iteration.splits
    again = common(units, pool.suspects)
    suspects = subtracted(common(units, pool.recovered), again)
    if pool.exactly_once and pool.suspects_at_once == 1:
        for place in (each for start, stop in again for each in range(start, stop)):
            pool.deaths[place] = (*pool.deaths.get(place, ()), address)
    if again:
        # One of these it was: in smaller groups it is found.
        pool.suspects_at_once = _part(pool.suspects_at_once)
    if suspects:
        pool.suspects_at_once = max(pool.suspects_at_once, _part(count(suspects)))
    pool.suspects = united((*pool.suspects, *suspects))
    pool.recovered = united((*pool.recovered, *units))


def _part(number: int) -> int:
    return max(1, number // 16)


def units_given_up(state: DispatcherState, fact: updates.UnitsGivenUp) -> None:
    """Deal units that workers died with no more."""
    task = state.tasks[fact.task_id]
    iteration = state.iterations[task.iteration_id]
    pool = iteration.splits
    require(not subtracted(fact.units, iteration.left_of(task)), "somebody has them")
    units = task.splits.located(fact.units)
    touch(task, fact.units)
    pool.given_up = united((*pool.given_up, *units))
    for place in (each for start, stop in units for each in range(start, stop)):
        pool.deaths[place] = (*pool.deaths.get(place, ()), task.address)
    for place in [place for place in pool.parts if is_among(place, units)]:
        del pool.parts[place]
    pool.recovered = subtracted(pool.recovered, units)
    pool.suspects = subtracted(pool.suspects, units)
    # It was these; the others are dealt sooner if many go together.
    pool.suspects_at_once = _part(count(pool.suspects))
    iteration.version += 1


def give_up(state: DispatcherState, task: Task) -> None:
    """Mark a task of which nothing more will come; who read it must say what did."""
    iteration = state.iterations[task.iteration_id]
    iteration.version += 1
    task.gone = True
    if task.splits.held:
        task.unsettled = set(iteration.clients)
    if task.mode is not None:
        task.mode.gone(iteration, task)
    if task.departed:
        # What they received of this, nobody will know.
        touch_first(iteration, task, max(task.departed.values()))
        task.departed = {}


def give_back_kept(iteration: Iteration, task: Task, client_id: str) -> None:
    """Deal again what a client that is gone had of a task that is gone, and did not use."""
    pool = iteration.splits
    units, parts = task.splits.kept_by.pop(client_id, ((), ()))
    if iteration.finished and not iteration.clients:
        return
    found = [
        (place, EVERYTHING)
        for start, stop in task.splits.located(units)
        for place in range(start, stop)
    ]
    found += [(_place(task, unit), rows) for unit, rows in parts]
    for place, rows in found:
        if is_among(place, pool.given_up):
            continue
        iteration.finished, iteration.failed = False, ""
        if rows == EVERYTHING:
            pool.returned = united((*pool.returned, (place, place + 1)))
        else:
            _want(iteration, place, rows)


def receive(task: Task, units: Ranges) -> None:
    """Take note that units came whole to somebody."""
    splits = task.splits
    splits.received = united((*splits.received, *at_least(units, splits.done)))
    for unit in [unit for unit in splits.rows if is_among(unit, units)]:
        del splits.rows[unit]


def is_held(task: Task, unit: int) -> bool:
    """Whether a task is still to give something of a unit."""
    splits = task.splits
    is_there = splits.done <= unit < splits.dealt
    return is_there and not is_among(unit, (*splits.returned, *splits.received))


def give(task: Task, unit: int, rows: Ranges) -> None:
    """Take note that some elements of a unit are no longer the task's to give."""
    left = subtracted(task.splits.rows.get(unit, EVERYTHING), rows)
    if left:
        task.splits.rows[unit] = left
    else:
        receive(task, ((unit, unit + 1),))
        touch(task, ((unit, unit + 1),))


def touch_first(iteration: Iteration, task: Task, units: int) -> None:
    """Take the first units of a task, up to a number, for touched: who may have them is gone."""
    splits = task.splits
    if splits.held and splits.done < units and not iteration.splits.exactly_once:
        touch(task, ((splits.done, units),))


def touch(task: Task, units: Ranges) -> None:
    """Take note that somebody may have something of units."""
    splits = task.splits
    splits.touched = united((*splits.touched, *at_least(units, splits.done)))


def client_dropped(state: DispatcherState, fact: updates.ClientDropped) -> None:
    """Take back what a client that is gone had not acknowledged; note what is missing of it."""
    task = state.tasks[fact.task_id]
    splits = task.splits
    iteration = state.iterations[task.iteration_id]
    del task.departed[fact.client_id]
    units = united((*fact.returned, *fact.lost))
    require(count(units) == count(fact.returned) + count(fact.lost), "the ranges overlap")
    _require_held(task, units)
    require(not (fact.returned and iteration.finished), "the iteration is finished")
    if task.phase is TaskPhase.RUNNING:
        iteration.splits.held -= count(units)
    splits.returned = united((*splits.returned, *fact.lost))
    _put_back(iteration, task, fact.returned)
    for unit, rows in fact.used:
        if is_held(task, unit):
            give(task, unit, rows)
    for unit, rows in fact.parts:
        require(is_held(task, unit), "the task does not hold the unit")
        left = splits.rows.get(unit, EVERYTHING)
        require(not subtracted(rows, left), "the ordinals are not the task's to give")
        give(task, unit, rows)
        if not iteration.finished:
            _want(iteration, _place(task, unit), rows)
    if fact.lost:
        _miss(iteration, task, fact.client_id, splits.located(fact.lost))
    iteration.version += 1


def tasks_forgotten(state: DispatcherState, fact: updates.TasksForgotten) -> None:
    """Forget lost tasks; what was lost with them stays in mind."""
    iteration = state.iterations[fact.iteration_id]
    for task_id in fact.task_ids:
        task = state.tasks.pop(task_id)
        require(task.phase is TaskPhase.LOST and not task.unsettled, "it is not over")
        iteration.tasks.remove(task_id)
        lost = task.missing
        if lost or not iteration.is_dealt:
            units = task.splits.located(lost)
            _miss(iteration, task, "", units)


def _miss(iteration: Iteration, task: Task, client_id: str, units: Ranges) -> None:
    iteration.missing.append(
        Missing(
            task_id=task.task_id,
            client_id=client_id,
            units=units,
            address=task.address,
            reason=task.reason,
        )
    )
    for old in iteration.missing[:-LOSSES_REMEMBERED]:
        iteration.missing_before += count(old.units)
    del iteration.missing[:-LOSSES_REMEMBERED]
