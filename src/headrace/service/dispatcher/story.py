"""The story of a task, or of a job, in plain sentences: what its facts say, one after another.

Facts have no times: a record of the journal is a step, and its number stands before each sentence.
What each fact means, `sentences` says; of what happens again and again, one sentence is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.state import DispatcherState, Iteration, Job, Task, TaskPhase
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.coordinated_reads.records import RoundsOpened, RoundsSettled, TaskRounds
from headrace.service.modes.distributed_save.records import (
    FilesSaved,
    SaveBegun,
    SaveClosed,
    SaveFailed,
    SaveOpened,
)
from headrace.service.modes.static.records import shard_of
from headrace.service.passes import pass_in_words
from headrace.service.ranges import Ranges, common, count, subtracted, united
from headrace.service.rows import Parts

__all__ = [
    "NOT_OF_JOBS",
    "OF_PASSES",
    "OF_SAVES",
    "OF_TASKS",
    "OF_WORKERS",
    "Sentence",
    "overview",
    "plural",
    "reading_of",
    "tell_job",
    "tell_task",
    "units_in_words",
    "whose",
]


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
        if isinstance(fact, SaveBegun) and fact.path == name:
            words = OF_SAVES[SaveBegun](fact)
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
            if fact.start in iteration.splits.parts:
                return False
            self._grants.append((fact.start, fact.stop))
            self._tasks.add(fact.task_id)
        elif isinstance(fact, FilesSaved):
            self._files += len(fact.files)
            self._elements += sum(file.elements for file in fact.files)
        elif isinstance(fact, RoundsOpened):
            self._until = fact.until
        else:
            return False
        self._records.setdefault(type(fact), record)
        return True

    def told(self) -> list[Sentence]:
        """Return a sentence of each kind that there was, and begin again."""
        words: dict[type, Callable[[], str]] = {
            updates.UnitsDealt: self._of_grants,
            FilesSaved: self._of_files,
            RoundsOpened: self._of_rounds,
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
    shard, rounds = shard_of(task.mode), task.mode
    share = "" if shard is None else f", for share {shard.index} of {shard.of}"
    joined = rounds.first if isinstance(rounds, TaskRounds) else 0
    first = f", from round {joined} on" if joined else ""
    again = f" It was retry {task.attempt} after losses." if task.attempt else ""
    return (
        f"Task {task.task_id} was given to the worker at {task.address} ({task.worker_id[:8]}), "
        f"for {reading}{share}{first}.{again}"
    )


def _standing(state: DispatcherState, task: Task) -> str:
    splits = task.splits
    phase = {
        TaskPhase.RUNNING: "ran",
        TaskPhase.FINISHED: "had finished",
        TaskPhase.LOST: f"was lost ({task.reason})",
        TaskPhase.FAILED: f"had failed ({task.reason})",
    }[task.phase]
    return (
        f"task {task.task_id} on the worker at {task.address}, for "
        f"{reading_of(state, state.iterations[task.iteration_id])}, {phase}; it had been dealt "
        f"{splits.dealt} units in {splits.grants} grants, of which {splits.done} were "
        "known to be done."
    )


# --- what a fact means for whom ------------------------------------------------------------------


def _say_of_task(state: DispatcherState, fact: Update, task: Task) -> str | None:
    """Return what a fact means for a task, before it is applied; None: nothing."""
    kind = type(fact)
    if kind in OF_TASKS and getattr(fact, "task_id", None) == task.task_id:
        return OF_TASKS[kind](state, fact, task)
    if kind in OF_WORKERS and getattr(fact, "worker_id", None) == task.worker_id:
        is_over = task.phase is not TaskPhase.RUNNING and not task.splits.held
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


# --- sentences: what each kind of fact means for a task, a pass or a job, for `story` -------------

# A fact is told before it is applied, of the state before it. Ranges of units are written as they
# are
# counted, "10 to 19" with both ends, by their numbers in the stream.

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
    return units_in_words(task.splits.located(units))


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
    is_part = fact.start in state.iterations[task.iteration_id].splits.parts
    return f"It was dealt what nobody had of {units}." if is_part else f"It was dealt {units}."


def _taken_over(state: DispatcherState, fact: updates.UnitsTakenOver, task: Task) -> str:
    return f"It was slow with {_of_task(task, fact.units)}: others are dealt that too."


def _returned(state: DispatcherState, fact: updates.UnitsReturned, task: Task) -> str:
    in_part = common(fact.units, united((unit, unit + 1) for unit in task.splits.rows))
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


def _rounds_settled(state: DispatcherState, fact: RoundsSettled, task: Task) -> str:
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


def _files_saved(state: DispatcherState, fact: FilesSaved, task: Task) -> str:
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
    RoundsSettled: _rounds_settled,
    updates.ElementsReceived: _received,
    updates.ElementsUsed: _used,
    updates.ClientDropped: _dropped,
    FilesSaved: _files_saved,
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


def _rounds_opened(fact: RoundsOpened) -> str:
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
    RoundsOpened: _rounds_opened,
    updates.IterationFinished: _iteration_finished,
    updates.IterationCollected: _collected,
    updates.IterationForgotten: _forgotten,
}

"""Of the pass that the fact names."""


def _save_begun(fact: SaveBegun) -> str:
    return f"A save into {fact.path!r} began."


def _save_opened(fact: SaveOpened) -> str:
    return "The directory was begun: workers could write."


def _save_failed(fact: SaveFailed) -> str:
    return f"The save failed: {fact.error}."


def _save_closed(fact: SaveClosed) -> str:
    return "The directory said how the save ended."


OF_SAVES: dict[type, Callable[[Any], str]] = {
    SaveBegun: _save_begun,
    SaveOpened: _save_opened,
    SaveFailed: _save_failed,
    SaveClosed: _save_closed,
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
