"""Sentences: what each kind of fact means for a task, a pass or a job, for `story`.

A fact is told before it is applied, of the state before it. Ranges of units are written as they are
counted, "10 to 19" with both ends, by their numbers in the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.state import DispatcherState, Iteration, Job, Task, TaskPhase
from headrace.service.passes import pass_in_words
from headrace.service.ranges import Ranges, common, count, located, subtracted, united
from headrace.service.rows import Parts

__all__ = [
    "NOT_OF_JOBS",
    "OF_PASSES",
    "OF_SAVES",
    "OF_TASKS",
    "OF_WORKERS",
    "plural",
    "reading_of",
    "units_in_words",
    "whose",
]

_MOST_RANGES = 8


# --- words ---------------------------------------------------------------------------------------


def plural(number: int, noun: str, several: str = "") -> str:
    """Write how many of something there are."""
    return f"{number} {noun}" if number == 1 else f"{number} {several or noun + 's'}"


def whose(state: DispatcherState, job: Job) -> str:
    """Say which job it is: a named one, a client's own, or a save."""
    if job.save:
        return f"the save into {state.saves[job.save].path!r}"
    return f"job {job.name!r}" if job.name else f"the job of client {job.owner}"


def reading_of(state: DispatcherState, iteration: Iteration) -> str:
    """Say which pass of which job it is."""
    job = state.jobs[iteration.job_id]
    if job.save:
        return whose(state, job)
    return f"{pass_in_words(iteration.pass_number)} of {whose(state, job)}"


def units_in_words(ranges: Ranges | list[tuple[int, int]]) -> str:
    """Write ranges of units, with both ends; of very many, the first and the last."""
    parts = [
        f"{start}" if stop - start == 1 else f"{start} to {stop - 1}" for start, stop in ranges
    ]
    if len(parts) > _MOST_RANGES:
        parts = [*parts[: _MOST_RANGES - 1], f"others up to {ranges[-1][1] - 1}"]
    return f"{'unit' if count(ranges) == 1 else 'units'} {_listed(parts)}"


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _of_task(task: Task, units: Ranges) -> str:
    return units_in_words(located(task.runs, task.done, units))


def _begun(parts: Parts) -> Ranges:
    """Return the units of which elements are named."""
    return united((unit, unit + 1) for unit, _ in parts)


def _elements(task: Task, units: Ranges, parts: Parts) -> str:
    words = []
    if units:
        words.append(f"{_of_task(task, units)} whole")
    if parts:
        words.append(f"some elements of {_of_task(task, _begun(parts))}")
    return _listed(words) or "nothing of it"


# --- tasks ---------------------------------------------------------------------------------------


def _dealt(state: DispatcherState, fact: updates.UnitsDealt, task: Task) -> str:
    units = units_in_words(((fact.start, fact.stop),))
    is_part = fact.start in state.iterations[task.iteration_id].parts
    return f"It was dealt what nobody had of {units}." if is_part else f"It was dealt {units}."


def _taken_over(state: DispatcherState, fact: updates.UnitsTakenOver, task: Task) -> str:
    return f"It was slow with {_of_task(task, fact.units)}: others are dealt that too."


def _returned(state: DispatcherState, fact: updates.UnitsReturned, task: Task) -> str:
    in_part = common(fact.units, united((unit, unit + 1) for unit in task.rows))
    whole = subtracted(fact.units, in_part)
    is_running = task.phase is TaskPhase.RUNNING
    words = []
    if whole:
        how = "Its worker handed back" if is_running else "Nobody had received"
        which = "which is" if count(whole) == 1 else "which are"
        words.append(f"{how} {_of_task(task, whole)}, {which} dealt again.")
    if in_part:
        who = "it had still to give" if is_running else "nobody had received"
        words.append(f"What {who} of {_of_task(task, in_part)} is dealt again.")
    return " ".join(words)


def _given_up(state: DispatcherState, fact: updates.UnitsGivenUp, task: Task) -> str:
    were = "was" if count(fact.units) == 1 else "were"
    which = "it" if count(fact.units) == 1 else "them"
    return (
        f"{_of_task(task, fact.units).capitalize()} {were} given up: each task that was dealt "
        f"{which} was lost."
    )


def _finished(state: DispatcherState, fact: updates.TaskFinished, task: Task) -> str:
    if fact.cut:
        return "It ended before its copy did, because its worker was asked to leave."
    return "It handed out its last element, and was finished."


def _failed(state: DispatcherState, fact: updates.TaskFailed, task: Task) -> str:
    return f"It failed: {fact.reason}."


def _lost(state: DispatcherState, fact: updates.TaskLost, task: Task) -> str:
    return f"It was given up, though its worker was there: {fact.reason}."


def _lasted(state: DispatcherState, fact: updates.CopyLasted, task: Task) -> str:
    return "It had run for so long that what it reads kills no worker."


def _settled(state: DispatcherState, fact: updates.TaskSettled, task: Task) -> str:
    whole, some = count(fact.received), count(subtracted(fact.touched, fact.received))
    said = []
    if whole:
        said.append(f"{plural(whole, 'unit')} whole")
    if some:
        said.append(
            f"something of {some} more" if whole else f"something of {plural(some, 'unit')}"
        )
    received = ", and ".join(said) or "nothing of it"
    who = f"client {fact.client_id}" if fact.client_id else "its clients"
    return f"It became known that {who} had received {received}."


def _rounds_settled(state: DispatcherState, fact: updates.RoundsSettled, task: Task) -> str:
    rounds = plural(fact.rounds, "round")
    return f"It became known that client {fact.client_id} had received {rounds} of it."


def _received(state: DispatcherState, fact: updates.ElementsReceived, task: Task) -> str:
    received = _elements(task, fact.units, fact.parts)
    return f"It became known that client {fact.client_id} had received {received}."


def _used(state: DispatcherState, fact: updates.ElementsUsed, task: Task) -> str:
    used = _elements(task, fact.units, fact.parts)
    return f"It became known that client {fact.client_id} had used {used}."


def _dropped(state: DispatcherState, fact: updates.ClientDropped, task: Task) -> str:
    words = [f"Client {fact.client_id} was gone."]
    if fact.used:
        words.append(f"It had used elements of {_of_task(task, _begun(fact.used))}.")
    if fact.returned:
        was = "was" if count(fact.returned) == 1 else "were"
        words.append(
            f"{_of_task(task, fact.returned).capitalize()} {was} sent to it alone: dealt again."
        )
    if fact.parts:
        units = _of_task(task, _begun(fact.parts))
        words.append(f"Elements of {units} that it was sent and had not used are dealt again.")
    if fact.lost:
        was = "was" if count(fact.lost) == 1 else "were"
        words.append(f"{_of_task(task, fact.lost).capitalize()} {was} sent to it in part: missing.")
    if not (fact.returned or fact.parts or fact.lost):
        words.append("Nothing that it was sent had to be dealt again.")
    return " ".join(words)


def _files_saved(state: DispatcherState, fact: updates.FilesSaved, task: Task) -> str:
    elements = sum(file.elements for file in fact.files)
    return f"It saved {plural(len(fact.files), 'file')}, of {plural(elements, 'element')}."


OF_TASKS: dict[type, Callable[[DispatcherState, Any, Task], str]] = {
    updates.UnitsDealt: _dealt,
    updates.UnitsReturned: _returned,
    updates.UnitsTakenOver: _taken_over,
    updates.UnitsGivenUp: _given_up,
    updates.TaskFinished: _finished,
    updates.TaskFailed: _failed,
    updates.TaskLost: _lost,
    updates.CopyLasted: _lasted,
    updates.TaskSettled: _settled,
    updates.RoundsSettled: _rounds_settled,
    updates.ElementsReceived: _received,
    updates.ElementsUsed: _used,
    updates.ClientDropped: _dropped,
    updates.FilesSaved: _files_saved,
}
"""Of the task that the fact names."""


# --- workers, passes, saves ----------------------------------------------------------------------


def _worker_leaving(fact: updates.WorkerLeaving) -> str:
    return "Its worker was asked to leave: it takes no more and delivers what it has."


def _worker_left(fact: updates.WorkerLeft) -> str:
    return "Its worker left."


def _worker_lost(fact: updates.WorkerLost) -> str:
    return f"Its worker was taken for lost: {fact.reason}."


OF_WORKERS: dict[type, Callable[[Any], str]] = {
    updates.WorkerLeaving: _worker_leaving,
    updates.WorkerLeft: _worker_left,
    updates.WorkerLost: _worker_lost,
}
"""Of tasks on the worker that the fact names."""


def _pass_begun(fact: updates.IterationCreated) -> str:
    first = f", from unit {fact.first_unit} on" if fact.first_unit else ""
    return f"{pass_in_words(fact.pass_number).capitalize()} began{first}, with seed {fact.seed}."


def _joined(fact: updates.ClientJoined) -> str:
    index = fact.consumer_index
    consumer = "" if index is None else f", as consumer {index}"
    return f"Client {fact.client_id} began to read{consumer}."


def _rounds_opened(fact: updates.RoundsOpened) -> str:
    return f"Consumers could go on up to round {fact.until}."


def _iteration_finished(fact: updates.IterationFinished) -> str:
    return f"The pass was given up: {fact.failed}." if fact.failed else "The pass was finished."


def _collected(fact: updates.IterationCollected) -> str:
    return "Nobody read the pass any more: it was given up, to begin again if it is opened."


def _forgotten(fact: updates.IterationForgotten) -> str:
    return "The pass was over, and left the dispatcher's memory."


OF_PASSES: dict[type, Callable[[Any], str]] = {
    updates.IterationCreated: _pass_begun,
    updates.ClientJoined: _joined,
    updates.RoundsOpened: _rounds_opened,
    updates.IterationFinished: _iteration_finished,
    updates.IterationCollected: _collected,
    updates.IterationForgotten: _forgotten,
}
"""Of the pass that the fact names."""


def _save_begun(fact: updates.SaveBegun) -> str:
    return f"A save into {fact.path!r} began."


def _save_opened(fact: updates.SaveOpened) -> str:
    return "The directory was begun: workers could write."


def _save_failed(fact: updates.SaveFailed) -> str:
    return f"The save failed: {fact.error}."


def _save_closed(fact: updates.SaveClosed) -> str:
    return "The directory said how the save ended."


OF_SAVES: dict[type, Callable[[Any], str]] = {
    updates.SaveBegun: _save_begun,
    updates.SaveOpened: _save_opened,
    updates.SaveFailed: _save_failed,
    updates.SaveClosed: _save_closed,
}
"""Of the save that the fact names."""

NOT_OF_JOBS = frozenset(
    {
        updates.DispatcherStarted,
        updates.PlanStored,
        updates.PlanForgotten,
        updates.DatasetRegistered,
        updates.DatasetKept,
        updates.DatasetForgotten,
        updates.SlotsConfigured,
        updates.WorkerRegistered,
    }
)
"""Facts that no story of a task or a job tells."""
