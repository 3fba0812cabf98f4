"""The story of a task, or of a job, in plain sentences: what its facts say, one after another.

Facts have no times: a record of the journal is a step, and its number stands before each sentence.
What each fact means, `sentences` says; of what happens again and again, one sentence is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.sentences import (
    OF_PASSES,
    OF_SAVES,
    OF_TASKS,
    OF_WORKERS,
    plural,
    reading_of,
    units_in_words,
    whose,
)
from headrace.service.dispatcher.state import DispatcherState, Task, TaskPhase
from headrace.service.dispatcher.updates import Update
from headrace.service.passes import pass_in_words
from headrace.service.ranges import count, united

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
    found, often = [], _Often("It was dealt", "It saved")
    if task_id in state.tasks:
        found.append(Sentence(number, f"so far, {_standing(state, state.tasks[task_id])}"))
    for record, fact in _facts(records):
        # Some can be told before they are applied, and a beginning only after.
        task = state.tasks.get(task_id)
        words = None if task is None else _say_of_task(state, fact, task)
        is_often = words is not None and often.takes(state, record, fact)
        apply(state, fact)
        if isinstance(fact, updates.TaskCreated) and fact.task_id == task_id:
            words = _task_begins(state, state.tasks[task_id])
        if words is not None and not is_often:
            found += [*often.told(), Sentence(record, words)]
    return found + often.told()


def tell_job(number: int, state: DispatcherState, records: Records, name: str) -> list[Sentence]:
    """Return what happened to a job by its name, or to saves into a directory; see `tell_task`."""
    found, often = [], _Often("Its tasks were dealt", "They saved")
    job_id = _job_named(state, name)
    if job_id is not None:
        job = state.jobs[job_id]
        running = [each for each in job.iterations.values() if not state.iterations[each].finished]
        found.append(
            Sentence(
                number,
                f"so far, {whose(state, job)} over dataset {job.dataset_id} had begun "
                f"{plural(job.passes, 'pass', 'passes')}, of which {len(running)} "
                f"{'was' if len(running) == 1 else 'were'} not over.",
            )
        )
    for record, fact in _facts(records):
        job_id = _job_named(state, name)
        words = None if job_id is None else _say_of_job(state, fact, job_id)
        is_often = words is not None and often.takes(state, record, fact)
        apply(state, fact)
        if isinstance(fact, updates.SaveBegun) and fact.path == name:
            words = OF_SAVES[updates.SaveBegun](fact)
        if isinstance(fact, updates.JobCreated) and _job_named(state, name) == fact.job_id:
            words = _job_begins(state, fact)
        if words is not None and not is_often:
            found += [*often.told(), Sentence(record, words)]
    return found + often.told()


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
        passes = "" if job.save else f", passes so far: {job.passes}"
        lines.append(f"{whose(state, job)}, dataset {job.dataset_id}{passes}")
        for iteration_id in job.iterations.values():
            iteration = state.iterations[iteration_id]
            tasks = ", ".join(
                f"{task.task_id} ({task.phase.name.lower()}, {task.address})"
                for task in state.tasks_of(iteration)
            )
            end = "over" if iteration.finished else "open"
            lines.append(
                f"  {pass_in_words(iteration.pass_number)} ({end}): tasks {tasks or 'none'}"
            )
    return lines


def _facts(records: Records) -> Iterator[tuple[int, Update]]:
    for number, facts in records:
        for fact in facts:
            yield number, fact


def _job_named(state: DispatcherState, name: str) -> int | None:
    if name in state.names:
        return state.names[name]
    into = (each for each, job in state.jobs.items() if job.save and _path(state, job.save) == name)
    return next(into, None)


def _path(state: DispatcherState, save: str) -> str:
    return state.saves[save].path


class _Often:
    """Facts that follow each other again and again, of each kind of which one sentence is enough.

    Args:
        dealt: How the sentence of units that are dealt begins.
        saved: How the one of files begins.
    """

    def __init__(self, dealt: str, saved: str) -> None:
        self._dealt, self._saved = dealt, saved
        self._begin()

    def _begin(self) -> None:
        #: The first record of each kind; and what the facts say together.
        self._records: dict[type, int] = {}
        self._grants: list[tuple[int, int]] = []
        self._tasks: set[int] = set()
        self._files = self._elements = self._until = 0

    def takes(self, state: DispatcherState, record: int, fact: Update) -> bool:
        """Take note of a fact that is about to be applied, if it is one of these."""
        if isinstance(fact, updates.UnitsDealt):
            iteration = state.iterations[state.tasks[fact.task_id].iteration_id]
            if fact.start in iteration.parts:
                return False
            self._grants.append((fact.start, fact.stop))
            self._tasks.add(fact.task_id)
        elif isinstance(fact, updates.FilesSaved):
            self._files += len(fact.files)
            self._elements += sum(file.elements for file in fact.files)
        elif isinstance(fact, updates.RoundsOpened):
            self._until = fact.until
        else:
            return False
        self._records.setdefault(type(fact), record)
        return True

    def told(self) -> list[Sentence]:
        """Return a sentence of each kind that there was, and begin again."""
        words: dict[type, Callable[[], str]] = {
            updates.UnitsDealt: self._of_grants,
            updates.FilesSaved: self._of_files,
            updates.RoundsOpened: self._of_rounds,
        }
        found = [Sentence(record, words[kind]()) for kind, record in self._records.items()]
        self._begin()
        return found

    def _of_grants(self) -> str:
        units, number, tasks = united(self._grants), len(self._grants), len(self._tasks)
        words = f"{self._dealt} {units_in_words(units)}"
        words += f", {plural(count(units), 'unit')} in {number} grants" if number > 1 else ""
        words += f", to {plural(tasks, 'task')}" if tasks > 1 else ""
        return f"{words}."

    def _of_files(self) -> str:
        files, elements = plural(self._files, "file"), plural(self._elements, "element")
        return f"{self._saved} {files}, of {elements}."

    def _of_rounds(self) -> str:
        return f"Consumers could go on up to round {self._until}."


# --- beginnings ----------------------------------------------------------------------------------


def _job_begins(state: DispatcherState, fact: updates.JobCreated) -> str | None:
    if fact.save:
        return None  # the save's beginning was told
    mode = ShardingPolicy(fact.terms.processing_mode).name
    return f"Job {fact.name!r} began, over dataset {fact.dataset_id}, with policy {mode}."


def _task_begins(state: DispatcherState, task: Task) -> str:
    reading = reading_of(state, state.iterations[task.iteration_id])
    share = "" if task.shard is None else f", for share {task.shard} of {task.of}"
    first = f", from round {task.starting_round} on" if task.starting_round else ""
    again = f" It was retry {task.attempt} after losses." if task.attempt else ""
    return (
        f"Task {task.task_id} was given to the worker at {task.address} ({task.worker_id[:8]}), "
        f"for {reading}{share}{first}.{again}"
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
        f"{reading_of(state, state.iterations[task.iteration_id])}, {phase}; it had been dealt "
        f"{task.dealt} units in {task.grants} grants, of which {task.done} were known to be done."
    )


# --- what a fact means for whom ------------------------------------------------------------------


def _say_of_task(state: DispatcherState, fact: Update, task: Task) -> str | None:
    """Return what a fact means for a task, before it is applied; None: nothing."""
    kind = type(fact)
    if kind in OF_TASKS and getattr(fact, "task_id", None) == task.task_id:
        return OF_TASKS[kind](state, fact, task)
    if kind in OF_WORKERS and getattr(fact, "worker_id", None) == task.worker_id:
        is_over = task.phase is not TaskPhase.RUNNING and not task.held
        return None if is_over else OF_WORKERS[kind](fact)
    if kind in OF_PASSES and getattr(fact, "iteration_id", None) == task.iteration_id:
        return OF_PASSES[kind](fact)
    if kind in OF_SAVES and getattr(fact, "save", "") == _save_of(state, task):
        return OF_SAVES[kind](fact)
    if isinstance(fact, updates.ClientLeft) and state.clients[fact.client_id] == task.iteration_id:
        return f"Client {fact.client_id} left."
    if isinstance(fact, updates.TasksForgotten) and task.task_id in fact.task_ids:
        return "The task left the dispatcher's memory; what was lost with it is kept in mind."
    return None


def _save_of(state: DispatcherState, task: Task) -> str:
    return state.jobs[state.iterations[task.iteration_id].job_id].save or "none"


def _say_of_job(state: DispatcherState, fact: Update, job_id: int) -> str | None:
    """Return what a fact means for a job, before it is applied; None: nothing."""
    kind = type(fact)
    if kind in OF_SAVES and getattr(fact, "save", "") == state.jobs[job_id].save:
        return OF_SAVES[kind](fact)
    if isinstance(fact, updates.JobForgotten):
        return "The job was forgotten." if fact.job_id == job_id else None
    if isinstance(fact, updates.IterationCreated):
        return OF_PASSES[kind](fact) if fact.job_id == job_id else None
    if isinstance(fact, updates.WorkerLost | updates.WorkerLeaving | updates.WorkerLeft):
        return _say_of_workers_tasks(state, fact, job_id)
    task = state.tasks.get(getattr(fact, "task_id", -1))
    iteration_id = getattr(fact, "iteration_id", -1 if task is None else task.iteration_id)
    if isinstance(fact, updates.ClientLeft):
        iteration_id = state.clients[fact.client_id]
    iteration = state.iterations.get(iteration_id)
    if iteration is None or iteration.job_id != job_id:
        return None
    if isinstance(fact, updates.TaskCreated):
        address = state.workers[fact.worker_id].address
        return f"Task {fact.task_id} was given to the worker at {address}."
    if isinstance(fact, updates.ClientLeft):
        return f"Client {fact.client_id} left."
    if isinstance(fact, updates.TasksForgotten):
        tasks = ", ".join(map(str, fact.task_ids))
        return f"Task{'s' * (len(fact.task_ids) > 1)} {tasks} left the dispatcher's memory."
    if kind in OF_PASSES:
        return OF_PASSES[kind](fact)
    if task is not None:
        return f"Task {task.task_id}: {OF_TASKS[kind](state, fact, task)}"
    return None


def _say_of_workers_tasks(
    state: DispatcherState,
    fact: updates.WorkerLost | updates.WorkerLeaving | updates.WorkerLeft,
    job_id: int,
) -> str | None:
    worker = state.workers[fact.worker_id]
    involved = [
        task_id
        for task_id in sorted(worker.tasks)
        if state.iterations[state.tasks[task_id].iteration_id].job_id == job_id
    ]
    if not involved:
        return None
    said = OF_WORKERS[type(fact)](fact)
    tasks = ", ".join(map(str, involved))
    return f"Task{'s' * (len(involved) > 1)} {tasks} (the worker at {worker.address}): {said}"
