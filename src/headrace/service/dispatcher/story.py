"""The story of a task, or of a job, in plain sentences: what its facts say, one after another.

Facts have no times: a record of the journal is a step, and its number stands before each sentence.
Ranges of units are written as they are counted, "10 to 19" with both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.ranges import Ranges, count, located, united
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.dispatcher.updates import Update

_MOST_RANGES = 8

__all__ = ["Sentence", "overview", "tell_job", "tell_task"]


@dataclass(frozen=True)
class Sentence:
    """One thing that happened."""

    record: int
    """Of the journal."""
    words: str

    def __str__(self) -> str:
        return f"record {self.record}: {self.words}"


Records = Iterable[tuple[int, list[Update]]]


def tell_task(
    number: int, state: DispatcherState, records: Records, task_id: int
) -> list[Sentence]:
    """Return what happened to a task; nothing where it never was.

    Args:
        number: The record that `state` is of.
        state: What was the case before the records; it follows them.
        records: Facts, with the numbers of their records.
        task_id: Whose story.
    """
    found, dealing = [], _Dealing()
    if task_id in state.tasks:
        found.append(Sentence(number, f"so far, {_standing(state, state.tasks[task_id])}"))
    for record, fact in _facts(records):
        # Some can be told before they are applied, and a beginning only after.
        task = state.tasks.get(task_id)
        words = None if task is None else _say_of_task(state, fact, task)
        apply(state, fact)
        if isinstance(fact, updates.TaskCreated) and fact.task_id == task_id:
            words = _task_begins(state, state.tasks[task_id])
        if isinstance(fact, updates.UnitsDealt) and fact.task_id == task_id:
            dealing.add(record, fact)
        elif words is not None:
            found += dealing.told("It was dealt")
            found.append(Sentence(record, words))
    return found + dealing.told("It was dealt")


def tell_job(number: int, state: DispatcherState, records: Records, name: str) -> list[Sentence]:
    """Return what happened to a named job; nothing where it never was. See `tell_task`."""
    found, dealing = [], _Dealing()
    if name in state.names:
        job = state.jobs[state.names[name]]
        running = [each for each in job.iterations.values() if not state.iterations[each].finished]
        found.append(
            Sentence(
                number,
                f"so far, job {name!r} over dataset {job.dataset_id} had begun {job.passes} "
                f"passes, of which {len(running)} were not over.",
            )
        )
    for record, fact in _facts(records):
        job_id = state.names.get(name)
        words = None if job_id is None else _say_of_job(state, fact, job_id)
        apply(state, fact)
        if isinstance(fact, updates.JobCreated) and fact.name == name:
            mode = ShardingPolicy(fact.processing_mode).name
            words = f"Job {name!r} began, over dataset {fact.dataset_id}, with policy {mode}."
        if isinstance(fact, updates.UnitsDealt) and words is not None:
            dealing.add(record, fact)
        elif words is not None:
            found += dealing.told("Its tasks were dealt")
            found.append(Sentence(record, words))
    return found + dealing.told("Its tasks were dealt")


def overview(state: DispatcherState, records: Records) -> list[str]:
    """Return what there is to ask about: jobs, their passes and tasks, at the end."""
    for _, fact in _facts(records):
        apply(state, fact)
    lines = [
        ", ".join(
            plural(len(things), noun)
            for things, noun in (
                (state.datasets, "dataset"),
                (state.workers, "worker"),
                (state.jobs, "job"),
                (state.clients, "client"),
            )
        )
    ]
    for job in state.jobs.values():
        whose = f"job {job.name!r}" if job.name else f"the job of client {job.owner}"
        lines.append(f"{whose}, dataset {job.dataset_id}, passes so far: {job.passes}")
        for iteration_id in job.iterations.values():
            iteration = state.iterations[iteration_id]
            tasks = ", ".join(
                f"{task.task_id} ({task.phase.name.lower()}, {task.address})"
                for task in state.tasks_of(iteration)
            )
            end = "over" if iteration.finished else "open"
            lines.append(f"  pass {_pass_of(iteration)} ({end}): tasks {tasks or 'none'}")
    return lines


def _facts(records: Records) -> Iterator[tuple[int, Update]]:
    for number, facts in records:
        for fact in facts:
            yield number, fact


class _Dealing:
    """Grants that follow each other, of which one sentence is enough."""

    def __init__(self) -> None:
        self._grants: list[tuple[int, int]] = []
        self._tasks: set[int] = set()
        self._record = 0

    def add(self, record: int, fact: updates.UnitsDealt) -> None:
        """Take note of a grant."""
        self._record = self._record if self._grants else record
        self._grants.append((fact.start, fact.stop))
        self._tasks.add(fact.task_id)

    def told(self, beginning: str) -> list[Sentence]:
        """Return the sentence of the grants so far, if there are any, and begin again."""
        if not self._grants:
            return []
        units, number, tasks = united(self._grants), len(self._grants), sorted(self._tasks)
        words = f"{beginning} {_units(units)}"
        words += f", {plural(count(units), 'unit')} in {number} grants" if number > 1 else ""
        words += f", to {plural(len(tasks), 'task')}" if len(tasks) > 1 else ""
        record, self._grants, self._tasks = self._record, [], set()
        return [Sentence(record, f"{words}.")]


def plural(number: int, noun: str) -> str:
    """Write how many of something there are."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- sentences -----------------------------------------------------------------------------------


def _reading(state: DispatcherState, iteration: Iteration) -> str:
    job = state.jobs[iteration.job_id]
    whose = f"job {job.name!r}" if job.name else f"the job of client {job.owner}"
    return f"pass {_pass_of(iteration)} of {whose}"


def _pass_of(iteration: Iteration) -> str:
    return ".".join(map(str, iteration.pass_number)) or "0"


def _task_begins(state: DispatcherState, task: Task) -> str:
    iteration = state.iterations[task.iteration_id]
    share = "" if task.shard is None else f", for share {task.shard} of {task.of}"
    again = f" It was the {task.attempt}. try after losses." if task.attempt else ""
    return (
        f"Task {task.task_id} was given to the worker at {task.address} ({task.worker_id[:8]}), "
        f"for {_reading(state, iteration)}{share}.{again}"
    )


def _standing(state: DispatcherState, task: Task) -> str:
    phase = {
        TaskPhase.RUNNING: "ran",
        TaskPhase.FINISHED: "had finished",
        TaskPhase.LOST: f"was lost ({task.reason})",
        TaskPhase.FAILED: f"had failed ({task.reason})",
    }[task.phase]
    return (
        f"task {task.task_id} on the worker at {task.address}, for "
        f"{_reading(state, state.iterations[task.iteration_id])}, {phase}; it had been dealt "
        f"{task.dealt} units in {task.grants} grants, of which {task.done} were known to be done."
    )


def _units(ranges: Ranges | list[tuple[int, int]]) -> str:
    """Write ranges of units, with both ends; of very many, the first and the last."""
    parts = [
        f"{start}" if stop - start == 1 else f"{start} to {stop - 1}" for start, stop in ranges
    ]
    if len(parts) > _MOST_RANGES:
        parts = [*parts[: _MOST_RANGES - 1], f"others up to {ranges[-1][1] - 1}"]
    shown = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
    return f"{'unit' if count(ranges) == 1 else 'units'} {shown}"


def _of_task(task: Task, units: Ranges) -> str:
    return _units(located(task.runs, task.done, units))


def _dealt(state: DispatcherState, fact: updates.UnitsDealt, task: Task) -> str:
    return f"It was dealt {_units(((fact.start, fact.stop),))}."


def _returned(state: DispatcherState, fact: updates.UnitsReturned, task: Task) -> str:
    how = "Its worker handed back" if task.phase is TaskPhase.RUNNING else "Nobody had received"
    return f"{how} {_of_task(task, fact.units)}, which are dealt again."


def _given_up(state: DispatcherState, fact: updates.UnitsGivenUp, task: Task) -> str:
    return (
        f"{_of_task(task, fact.units).capitalize()} were given up: each task that was dealt them "
        "was lost."
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
    return "It had run for long."


def _settled(state: DispatcherState, fact: updates.TaskSettled, task: Task) -> str:
    whole = count(fact.received)
    some = count(fact.touched)
    said = f"{plural(whole, 'unit')} whole" + (f", and something of {some} more" if some else "")
    return f"It became known that client {fact.client_id} had received {said}."


def _dropped(state: DispatcherState, fact: updates.ClientDropped, task: Task) -> str:
    words = f"Client {fact.client_id} was gone."
    if fact.returned:
        words += (
            f" {_of_task(task, fact.returned).capitalize()} were sent to it alone: dealt again."
        )
    if fact.lost:
        words += f" {_of_task(task, fact.lost).capitalize()} were sent to it in part: missing."
    return words


_TASK_FACTS: dict[type, Callable[[DispatcherState, Any, Task], str]] = {
    updates.UnitsDealt: _dealt,
    updates.UnitsReturned: _returned,
    updates.UnitsGivenUp: _given_up,
    updates.TaskFinished: _finished,
    updates.TaskFailed: _failed,
    updates.TaskLost: _lost,
    updates.CopyLasted: _lasted,
    updates.TaskSettled: _settled,
    updates.ClientDropped: _dropped,
}


def _worker_leaving(fact: updates.WorkerLeaving) -> str:
    return "Its worker was asked to leave: it takes no more and delivers what it has."


def _worker_left(fact: updates.WorkerLeft) -> str:
    return "Its worker left."


def _worker_lost(fact: updates.WorkerLost) -> str:
    return f"Its worker was taken for lost: {fact.reason}."


_WORKER_FACTS: dict[type, Callable[[Any], str]] = {
    updates.WorkerLeaving: _worker_leaving,
    updates.WorkerLeft: _worker_left,
    updates.WorkerLost: _worker_lost,
}


def _joined(fact: updates.ClientJoined) -> str:
    return f"Client {fact.client_id} began to read."


def _iteration_finished(fact: updates.IterationFinished) -> str:
    return f"The pass was given up: {fact.failed}." if fact.failed else "The pass was finished."


def _collected(fact: updates.IterationCollected) -> str:
    return "Nobody read the pass any more: it was given up, to begin again if it is opened."


def _forgotten(fact: updates.IterationForgotten) -> str:
    return "The pass was over, and left the dispatcher's memory."


_PASS_FACTS: dict[type, Callable[[Any], str]] = {
    updates.ClientJoined: _joined,
    updates.IterationFinished: _iteration_finished,
    updates.IterationCollected: _collected,
    updates.IterationForgotten: _forgotten,
}


def _say_of_task(state: DispatcherState, fact: Update, task: Task) -> str | None:
    """Return what a fact means for a task, before it is applied; None: nothing."""
    kind = type(fact)
    if getattr(fact, "task_id", None) == task.task_id and kind is not updates.TaskCreated:
        say = _TASK_FACTS.get(kind)
        return say(state, fact, task) if say is not None else f"{fact}."
    if kind in _WORKER_FACTS and getattr(fact, "worker_id", None) == task.worker_id:
        is_over = task.phase is not TaskPhase.RUNNING and not task.held
        return None if is_over else _WORKER_FACTS[kind](fact)
    if kind in _PASS_FACTS and getattr(fact, "iteration_id", None) == task.iteration_id:
        return _PASS_FACTS[kind](fact)
    if isinstance(fact, updates.ClientLeft) and state.clients[fact.client_id] == task.iteration_id:
        return f"Client {fact.client_id} left."
    if isinstance(fact, updates.TasksForgotten) and task.task_id in fact.task_ids:
        return "The task left the dispatcher's memory; what was lost with it is kept in mind."
    return None


def _say_of_job(state: DispatcherState, fact: Update, job_id: int) -> str | None:
    """Return what a fact means for a job, before it is applied; None: nothing."""
    if isinstance(fact, updates.JobForgotten) and fact.job_id == job_id:
        return "The job was forgotten."
    if isinstance(fact, updates.IterationCreated) and fact.job_id == job_id:
        return f"Pass {'.'.join(map(str, fact.pass_number)) or '0'} began, with seed {fact.seed}."
    task = state.tasks.get(getattr(fact, "task_id", -1))
    if isinstance(fact, updates.WorkerLost | updates.WorkerLeaving | updates.WorkerLeft):
        worker = state.workers[fact.worker_id]
        involved = [
            task_id
            for task_id in sorted(worker.tasks)
            if state.iterations[state.tasks[task_id].iteration_id].job_id == job_id
        ]
        if not involved:
            return None
        said = _WORKER_FACTS[type(fact)](fact)
        return f"Tasks {', '.join(map(str, involved))} (the worker at {worker.address}): {said}"
    iteration_id = getattr(fact, "iteration_id", None if task is None else task.iteration_id)
    if isinstance(fact, updates.ClientLeft):
        iteration_id = state.clients[fact.client_id]
    iteration = state.iterations.get(-1 if iteration_id is None else iteration_id)
    if iteration is None or iteration.job_id != job_id:
        return None
    if isinstance(fact, updates.TaskCreated):
        address = state.workers[fact.worker_id].address
        return f"Task {fact.task_id} was given to the worker at {address}."
    if isinstance(fact, updates.ClientLeft):
        return f"Client {fact.client_id} left."
    if isinstance(fact, updates.TasksForgotten):
        return f"Tasks {', '.join(map(str, fact.task_ids))} left the dispatcher's memory."
    if type(fact) in _PASS_FACTS:
        return _PASS_FACTS[type(fact)](fact)
    if task is not None:
        return f"Task {task.task_id}: {_say_of_task(state, fact, task)}"
    return f"{fact}."
