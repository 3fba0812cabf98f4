"""Reports of what happened to a task or a job, as sentences made from its events.

Events have no times: each sentence is numbered with its journal record. The tables of descriptions
define what each event means; frequent events are combined into one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    Job,
    JobIteration,
    TaskPhase,
)
from headrace.service.element_sets import PartialSplits
from headrace.service.epochs import format_epoch
from headrace.service.modes.coordinated_reads.events import (
    CoordinatedTask,
    HorizonAdvanced,
    RoundsReported,
)
from headrace.service.modes.distributed_save.records import (
    FilesCommitted,
    SaveClosed,
    SaveDirectoryCreated,
    SaveFailed,
    SaveStarted,
)
from headrace.service.modes.static.records import shard_of
from headrace.service.ranges import Ranges, intersect, subtract, total_length, union

__all__ = [
    "ITERATION_DESCRIPTIONS",
    "SAVE_DESCRIPTIONS",
    "TASK_DESCRIPTIONS",
    "UNREPORTED_EVENTS",
    "WORKER_DESCRIPTIONS",
    "ReportLine",
    "describe_iteration",
    "describe_job",
    "describe_splits",
    "pluralize",
    "report_job",
    "report_task",
    "summarize",
]


@dataclass(frozen=True)
class ReportLine:
    """One sentence of a report."""

    record: int
    """Number of the journal record."""
    text: str

    def __str__(self) -> str:
        return f"record {self.record}: {self.text}"


EventRecords = Iterable[tuple[int, list[AnyEvent]]]


def report_task(
    number: int, state: DispatcherState, records: EventRecords, task_id: int
) -> list[ReportLine]:
    """Return what happened to a task; empty if it never existed.

    Args:
        number: Record number of `state`.
        state: State before the records; updated as they are applied.
        records: Events, with the numbers of their records.
        task_id: Task to report on.
    """
    found, often = [], _RepeatedEvents("It was dealt", "It saved")
    if task_id in state.tasks:
        found.append(
            ReportLine(number, f"so far, {_describe_task_state(state, state.tasks[task_id])}")
        )
    for record, fact in _flatten(records):
        # Most events are described before they are applied, a creation only afterwards.
        task = state.tasks.get(task_id)
        words = None if task is None else _describe_for_task(state, fact, task)
        is_often = words is not None and often.add(state, record, fact)
        apply(state, fact)
        if isinstance(fact, events.TaskCreated) and fact.task_id == task_id:
            words = _describe_task_created(state, state.tasks[task_id])
        if words is not None and not is_often:
            found += [*often.flush(), ReportLine(record, words)]
    return found + often.flush()


def report_job(
    number: int, state: DispatcherState, records: EventRecords, name: str
) -> list[ReportLine]:
    """Return what happened to the job of this name, or to saves into this directory.

    Arguments as in `report_task`.
    """
    found, often = [], _RepeatedEvents("Its tasks were dealt", "They saved")
    job_id = _find_job(state, name)
    if job_id is not None:
        job = state.jobs[job_id]
        running = [each for each in job.iterations.values() if not state.iterations[each].finished]
        found.append(
            ReportLine(
                number,
                f"so far, {describe_job(state, job)} over dataset {job.dataset_id} had begun "
                f"{pluralize(job.num_epochs, 'pass', 'passes')}, of which {len(running)} "
                f"{'was' if len(running) == 1 else 'were'} not over.",
            )
        )
    for record, fact in _flatten(records):
        job_id = _find_job(state, name)
        words = None if job_id is None else _describe_for_job(state, fact, job_id)
        is_often = words is not None and often.add(state, record, fact)
        apply(state, fact)
        if isinstance(fact, SaveStarted) and fact.path == name:
            words = SAVE_DESCRIPTIONS[SaveStarted](fact)
        if isinstance(fact, events.JobCreated) and _find_job(state, name) == fact.job_id:
            words = _describe_job_created(state, fact)
        if words is not None and not is_often:
            found += [*often.flush(), ReportLine(record, words)]
    return found + often.flush()


def summarize(state: DispatcherState, records: EventRecords) -> list[str]:
    """Return the jobs, epochs and tasks in the state after all records."""
    for _, fact in _flatten(records):
        apply(state, fact)
    lines = [
        ", ".join(
            pluralize(len(things), noun)
            for things, noun in (
                (state.datasets, "dataset"),
                (state.workers, "worker"),
                (state.jobs, "job"),
                (state.clients, "client"),
            )
        )
    ]
    for job in state.jobs.values():
        passes = "" if job.save_id else f", passes so far: {job.num_epochs}"
        lines.append(f"{describe_job(state, job)}, dataset {job.dataset_id}{passes}")
        for iteration_id in job.iterations.values():
            iteration = state.iterations[iteration_id]
            tasks = ", ".join(
                f"{task.task_id} ({task.phase.name.lower()}, {task.address})"
                for task in state.tasks_of(iteration)
            )
            end = "over" if iteration.finished else "open"
            lines.append(f"  {format_epoch(iteration.epoch)} ({end}): tasks {tasks or 'none'}")
    return lines


def _flatten(records: EventRecords) -> Iterator[tuple[int, AnyEvent]]:
    for number, facts in records:
        for fact in facts:
            yield number, fact


def _find_job(state: DispatcherState, name: str) -> int | None:
    if name in state.jobs_by_name:
        return state.jobs_by_name[name]
    into = (
        each
        for each, job in state.jobs.items()
        if job.save_id and _save_path(state, job.save_id) == name
    )
    return next(into, None)


def _save_path(state: DispatcherState, save: str) -> str:
    return state.saves[save].path


class _RepeatedEvents:
    """Collector that combines frequent events of each kind into one sentence.

    Args:
        assigned_prefix: Start of the sentence about assigned splits.
        committed_prefix: Start of the sentence about saved files.
    """

    def __init__(self, assigned_prefix: str, committed_prefix: str) -> None:
        self._assigned_prefix, self._committed_prefix = assigned_prefix, committed_prefix
        self._reset()

    def _reset(self) -> None:
        #: First record of each kind, and the totals of the collected events.
        self._records: dict[type, int] = {}
        self._assignments: list[tuple[int, int]] = []
        self._tasks: set[int] = set()
        self._files = self._elements = self._until = 0

    def add(self, state: DispatcherState, record: int, event: AnyEvent) -> bool:
        """Collect an event that is about to be applied; return False if it is of another kind."""
        if isinstance(event, events.SplitsAssigned):
            iteration = state.iterations[state.tasks[event.task_id].iteration_id]
            if event.start in iteration.pool.partial_splits:
                return False
            self._assignments.append((event.start, event.stop))
            self._tasks.add(event.task_id)
        elif isinstance(event, FilesCommitted):
            self._files += len(event.files)
            self._elements += sum(file.elements for file in event.files)
        elif isinstance(event, HorizonAdvanced):
            self._until = event.horizon
        else:
            return False
        self._records.setdefault(type(event), record)
        return True

    def flush(self) -> list[ReportLine]:
        """Return one sentence for each kind collected, and reset."""
        words: dict[type, Callable[[], str]] = {
            events.SplitsAssigned: self._describe_assignments,
            FilesCommitted: self._describe_files,
            HorizonAdvanced: self._describe_rounds,
        }
        found = [ReportLine(record, words[kind]()) for kind, record in self._records.items()]
        self._reset()
        return found

    def _describe_assignments(self) -> str:
        units, number, tasks = union(self._assignments), len(self._assignments), len(self._tasks)
        words = f"{self._assigned_prefix} {describe_splits(units)}"
        words += (
            f", {pluralize(total_length(units), 'unit')} in {number} grants" if number > 1 else ""
        )
        words += f", to {pluralize(tasks, 'task')}" if tasks > 1 else ""
        return f"{words}."

    def _describe_files(self) -> str:
        files, elements = pluralize(self._files, "file"), pluralize(self._elements, "element")
        return f"{self._committed_prefix} {files}, of {elements}."

    def _describe_rounds(self) -> str:
        return f"Consumers could go on up to round {self._until}."


# --- creation -----------------------------------------------------------------------------------


def _describe_job_created(state: DispatcherState, event: events.JobCreated) -> str | None:
    if event.save_id:
        return None  # the start of the save is reported by its own event
    mode = ShardingPolicy(event.options.processing_mode).name
    return f"Job {event.name!r} began, over dataset {event.dataset_id}, with policy {mode}."


def _describe_task_created(state: DispatcherState, task: DispatcherTask) -> str:
    reading = describe_iteration(state, state.iterations[task.iteration_id])
    shard, rounds = shard_of(task.mode_state), task.mode_state
    share = "" if shard is None else f", for share {shard.index} of {shard.num_shards}"
    joined = rounds.starting_round if isinstance(rounds, CoordinatedTask) else 0
    first = f", from round {joined} on" if joined else ""
    again = f" It was retry {task.attempt} after losses." if task.attempt else ""
    return (
        f"Task {task.task_id} was given to the worker at {task.address} ({task.worker_id[:8]}), "
        f"for {reading}{share}{first}.{again}"
    )


def _describe_task_state(state: DispatcherState, task: DispatcherTask) -> str:
    splits = task.assigned
    phase = {
        TaskPhase.RUNNING: "ran",
        TaskPhase.FINISHED: "had finished",
        TaskPhase.LOST: f"was lost ({task.reason})",
        TaskPhase.FAILED: f"had failed ({task.reason})",
    }[task.phase]
    return (
        f"task {task.task_id} on the worker at {task.address}, for "
        f"{describe_iteration(state, state.iterations[task.iteration_id])}, {phase}; it had been "
        "dealt "
        f"{splits.num_assigned} units in {splits.num_assignments} grants, of which "
        f"{splits.num_done} were "
        "known to be done."
    )


# --- relevance of events -------------------------------------------------------------------------


def _describe_for_task(state: DispatcherState, event: AnyEvent, task: DispatcherTask) -> str | None:
    """Return what an event means for a task, before it is applied; None if nothing."""
    kind = type(event)
    if kind in TASK_DESCRIPTIONS and getattr(event, "task_id", None) == task.task_id:
        return TASK_DESCRIPTIONS[kind](state, event, task)
    if kind in WORKER_DESCRIPTIONS and getattr(event, "worker_id", None) == task.worker_id:
        is_over = task.phase is not TaskPhase.RUNNING and not task.assigned.num_held
        return None if is_over else WORKER_DESCRIPTIONS[kind](event)
    if kind in ITERATION_DESCRIPTIONS and getattr(event, "iteration_id", None) == task.iteration_id:
        return ITERATION_DESCRIPTIONS[kind](event)
    if kind in SAVE_DESCRIPTIONS and getattr(event, "save_id", "") == _save_of(state, task):
        return SAVE_DESCRIPTIONS[kind](event)
    if isinstance(event, events.ClientLeft) and state.clients[event.client_id] == task.iteration_id:
        return f"Client {event.client_id} left."
    if isinstance(event, events.TasksForgotten) and task.task_id in event.task_ids:
        return "The task left the dispatcher's memory; what was lost with it is kept in mind."
    return None


def _save_of(state: DispatcherState, task: DispatcherTask) -> str:
    return state.jobs[state.iterations[task.iteration_id].job_id].save_id or "none"


def _describe_for_job(state: DispatcherState, event: AnyEvent, job_id: int) -> str | None:
    """Return what an event means for a job, before it is applied; None if nothing."""
    kind = type(event)
    if kind in SAVE_DESCRIPTIONS and getattr(event, "save_id", "") == state.jobs[job_id].save_id:
        return SAVE_DESCRIPTIONS[kind](event)
    if isinstance(event, events.JobForgotten):
        return "The job was forgotten." if event.job_id == job_id else None
    if isinstance(event, events.IterationCreated):
        return ITERATION_DESCRIPTIONS[kind](event) if event.job_id == job_id else None
    if isinstance(event, events.WorkerLost | events.WorkerDraining | events.WorkerLeft):
        return _describe_for_worker_tasks(state, event, job_id)
    task = state.tasks.get(getattr(event, "task_id", -1))
    iteration_id = getattr(event, "iteration_id", -1 if task is None else task.iteration_id)
    if isinstance(event, events.ClientLeft):
        iteration_id = state.clients[event.client_id]
    iteration = state.iterations.get(iteration_id)
    if iteration is None or iteration.job_id != job_id:
        return None
    if isinstance(event, events.TaskCreated):
        address = state.workers[event.worker_id].address
        return f"Task {event.task_id} was given to the worker at {address}."
    if isinstance(event, events.ClientLeft):
        return f"Client {event.client_id} left."
    if isinstance(event, events.TasksForgotten):
        tasks = ", ".join(map(str, event.task_ids))
        return f"Task{'s' * (len(event.task_ids) > 1)} {tasks} left the dispatcher's memory."
    if kind in ITERATION_DESCRIPTIONS:
        return ITERATION_DESCRIPTIONS[kind](event)
    if task is not None:
        return f"Task {task.task_id}: {TASK_DESCRIPTIONS[kind](state, event, task)}"
    return None


def _describe_for_worker_tasks(
    state: DispatcherState,
    event: events.WorkerLost | events.WorkerDraining | events.WorkerLeft,
    job_id: int,
) -> str | None:
    worker = state.workers[event.worker_id]
    involved = [
        task_id
        for task_id in sorted(worker.tasks)
        if state.iterations[state.tasks[task_id].iteration_id].job_id == job_id
    ]
    if not involved:
        return None
    said = WORKER_DESCRIPTIONS[type(event)](event)
    tasks = ", ".join(map(str, involved))
    return f"Task{'s' * (len(involved) > 1)} {tasks} (the worker at {worker.address}): {said}"


# --- descriptions of events, for `event_report` --------------------------------------------------

# An event is described before it is applied, from the state before it. Ranges of splits are written
# with both ends, "10 to 19", as indices in the stream.

_MAX_RANGES = 8


# --- formatting ----------------------------------------------------------------------------------


def pluralize(number: int, noun: str, several: str = "") -> str:
    """Format a count with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {several or noun + 's'}"


def describe_job(state: DispatcherState, job: Job) -> str:
    """Describe a job: a named job, a client's own, or a save."""
    if job.save_id:
        return f"the save into {state.saves[job.save_id].path!r}"
    return f"job {job.name!r}" if job.name else f"the job of client {job.owner}"


def describe_iteration(state: DispatcherState, iteration: JobIteration) -> str:
    """Describe an iteration by its epoch and job."""
    job = state.jobs[iteration.job_id]
    if job.save_id:
        return describe_job(state, job)
    return f"{format_epoch(iteration.epoch)} of {describe_job(state, job)}"


def describe_splits(ranges: Ranges | list[tuple[int, int]]) -> str:
    """Format ranges of splits with both ends; long lists are shortened."""
    parts = [
        f"{start}" if stop - start == 1 else f"{start} to {stop - 1}" for start, stop in ranges
    ]
    if len(parts) > _MAX_RANGES:
        parts = [*parts[: _MAX_RANGES - 1], f"others up to {ranges[-1][1] - 1}"]
    return f"{'unit' if total_length(ranges) == 1 else 'units'} {_join(parts)}"


def _join(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _describe_task_splits(task: DispatcherTask, units: Ranges) -> str:
    return describe_splits(task.assigned.to_split_indices(units))


def _partial_ranges(parts: PartialSplits) -> Ranges:
    """Return the splits that have an entry in `parts`."""
    return union((unit, unit + 1) for unit, _ in parts)


def _describe_elements(task: DispatcherTask, units: Ranges, parts: PartialSplits) -> str:
    words = []
    if units:
        words.append(f"{_describe_task_splits(task, units)} whole")
    if parts:
        words.append(f"some elements of {_describe_task_splits(task, _partial_ranges(parts))}")
    return _join(words) or "nothing of it"


# --- tasks ---------------------------------------------------------------------------------------


def _splits_assigned(
    state: DispatcherState, event: events.SplitsAssigned, task: DispatcherTask
) -> str:
    units = describe_splits(((event.start, event.stop),))
    is_part = event.start in state.iterations[task.iteration_id].pool.partial_splits
    return f"It was dealt what nobody had of {units}." if is_part else f"It was dealt {units}."


def _splits_reassigned(
    state: DispatcherState, event: events.SplitsReassigned, task: DispatcherTask
) -> str:
    return (
        f"It was slow with {_describe_task_splits(task, event.splits)}: others are dealt that too."
    )


def _splits_returned(
    state: DispatcherState, event: events.SplitsReturned, task: DispatcherTask
) -> str:
    in_part = intersect(
        event.splits, union((unit, unit + 1) for unit in task.assigned.remaining_ordinals)
    )
    whole = subtract(event.splits, in_part)
    is_running = task.phase is TaskPhase.RUNNING
    words = []
    if whole:
        how = "Its worker handed back" if is_running else "Nobody had received"
        which = "which is" if total_length(whole) == 1 else "which are"
        words.append(f"{how} {_describe_task_splits(task, whole)}, {which} dealt again.")
    if in_part:
        who = "it had still to give" if is_running else "nobody had received"
        words.append(f"What {who} of {_describe_task_splits(task, in_part)} is dealt again.")
    return " ".join(words)


def _splits_abandoned(
    state: DispatcherState, event: events.SplitsAbandoned, task: DispatcherTask
) -> str:
    were = "was" if total_length(event.splits) == 1 else "were"
    which = "it" if total_length(event.splits) == 1 else "them"
    return (
        f"{_describe_task_splits(task, event.splits).capitalize()} {were} given up: each task that "
        "was dealt "
        f"{which} was lost."
    )


def _task_finished(state: DispatcherState, event: events.TaskFinished, task: DispatcherTask) -> str:
    if event.cut_short:
        return "It ended before its copy did, because its worker was asked to leave."
    return "It handed out its last element, and was finished."


def _task_failed(state: DispatcherState, event: events.TaskFailed, task: DispatcherTask) -> str:
    return f"It failed: {event.reason}."


def _task_lost(state: DispatcherState, event: events.TaskLost, task: DispatcherTask) -> str:
    return f"It was given up, though its worker was there: {event.reason}."


def _copy_marked_stable(
    state: DispatcherState, event: events.CopyMarkedStable, task: DispatcherTask
) -> str:
    return "It had run for so long that what it reads kills no worker."


def _delivery_reported(
    state: DispatcherState, event: events.DeliveryReported, task: DispatcherTask
) -> str:
    whole, some = (
        total_length(event.delivered),
        total_length(subtract(event.partially_delivered, event.delivered)),
    )
    said = []
    if whole:
        said.append(f"{pluralize(whole, 'unit')} whole")
    if some:
        said.append(
            f"something of {some} more" if whole else f"something of {pluralize(some, 'unit')}"
        )
    received = ", and ".join(said) or "nothing of it"
    who = f"client {event.client_id}" if event.client_id else "its clients"
    return f"It became known that {who} had received {received}."


def _rounds_settled(state: DispatcherState, event: RoundsReported, task: DispatcherTask) -> str:
    rounds = pluralize(event.rounds, "round")
    return f"It became known that client {event.client_id} had received {rounds} of it."


def _elements_received(
    state: DispatcherState, event: events.ElementsReceived, task: DispatcherTask
) -> str:
    received = _describe_elements(task, event.splits, event.partial_splits)
    return f"It became known that client {event.client_id} had received {received}."


def _elements_consumed(
    state: DispatcherState, event: events.ElementsConsumed, task: DispatcherTask
) -> str:
    used = _describe_elements(task, event.splits, event.partial_splits)
    return f"It became known that client {event.client_id} had used {used}."


def _departed_client_reported(
    state: DispatcherState, event: events.DepartedClientReported, task: DispatcherTask
) -> str:
    words = [f"Client {event.client_id} was gone."]
    if event.partially_consumed:
        words.append(
            "It had used elements of "
            f"{_describe_task_splits(task, _partial_ranges(event.partially_consumed))}."
        )
    if event.returned:
        was = "was" if total_length(event.returned) == 1 else "were"
        words.append(
            f"{_describe_task_splits(task, event.returned).capitalize()} {was} sent to it alone: "
            "dealt again."
        )
    if event.partially_returned:
        units = _describe_task_splits(task, _partial_ranges(event.partially_returned))
        words.append(f"Elements of {units} that it was sent and had not used are dealt again.")
    if event.lost:
        was = "was" if total_length(event.lost) == 1 else "were"
        words.append(
            f"{_describe_task_splits(task, event.lost).capitalize()} {was} sent to it in part: "
            "missing."
        )
    if not (event.returned or event.partially_returned or event.lost):
        words.append("Nothing that it was sent had to be dealt again.")
    return " ".join(words)


def _files_committed(state: DispatcherState, event: FilesCommitted, task: DispatcherTask) -> str:
    elements = sum(file.elements for file in event.files)
    return f"It saved {pluralize(len(event.files), 'file')}, of {pluralize(elements, 'element')}."


TASK_DESCRIPTIONS: dict[type, Callable[[DispatcherState, Any, DispatcherTask], str]] = {
    events.SplitsAssigned: _splits_assigned,
    events.SplitsReturned: _splits_returned,
    events.SplitsReassigned: _splits_reassigned,
    events.SplitsAbandoned: _splits_abandoned,
    events.TaskFinished: _task_finished,
    events.TaskFailed: _task_failed,
    events.TaskLost: _task_lost,
    events.CopyMarkedStable: _copy_marked_stable,
    events.DeliveryReported: _delivery_reported,
    RoundsReported: _rounds_settled,
    events.ElementsReceived: _elements_received,
    events.ElementsConsumed: _elements_consumed,
    events.DepartedClientReported: _departed_client_reported,
    FilesCommitted: _files_committed,
}

"""Descriptions of events that name a task."""


# --- workers, iterations, saves ------------------------------------------------------------------


def _worker_draining(event: events.WorkerDraining) -> str:
    return "Its worker was asked to leave: it takes no more and delivers what it has."


def _worker_left(event: events.WorkerLeft) -> str:
    return "Its worker left."


def _worker_lost(event: events.WorkerLost) -> str:
    return f"Its worker was taken for lost: {event.reason}."


WORKER_DESCRIPTIONS: dict[type, Callable[[Any], str]] = {
    events.WorkerDraining: _worker_draining,
    events.WorkerLeft: _worker_left,
    events.WorkerLost: _worker_lost,
}

"""Descriptions of events that name a worker, for the tasks on it."""


def _iteration_created(event: events.IterationCreated) -> str:
    first = f", from unit {event.first_split} on" if event.first_split else ""
    return f"{format_epoch(event.epoch).capitalize()} began{first}, with seed {event.seed}."


def _client_joined(event: events.ClientJoined) -> str:
    index = event.consumer_index
    consumer = "" if index is None else f", as consumer {index}"
    return f"Client {event.client_id} began to read{consumer}."


def _rounds_opened(event: HorizonAdvanced) -> str:
    return f"Consumers could go on up to round {event.horizon}."


def _iteration_finished(event: events.IterationFinished) -> str:
    return (
        f"The pass was given up: {event.failure_reason}."
        if event.failure_reason
        else "The pass was finished."
    )


def _iteration_discarded(event: events.IterationDiscarded) -> str:
    return "Nobody read the pass any more: it was given up, to begin again if it is opened."


def _iteration_forgotten(event: events.IterationForgotten) -> str:
    return "The pass was over, and left the dispatcher's memory."


ITERATION_DESCRIPTIONS: dict[type, Callable[[Any], str]] = {
    events.IterationCreated: _iteration_created,
    events.ClientJoined: _client_joined,
    HorizonAdvanced: _rounds_opened,
    events.IterationFinished: _iteration_finished,
    events.IterationDiscarded: _iteration_discarded,
    events.IterationForgotten: _iteration_forgotten,
}

"""Descriptions of events that name an iteration."""


def _save_started(event: SaveStarted) -> str:
    return f"A save into {event.path!r} began."


def _save_directory_created(event: SaveDirectoryCreated) -> str:
    return "The directory was begun: workers could write."


def _save_failed(event: SaveFailed) -> str:
    return f"The save failed: {event.error}."


def _save_closed(event: SaveClosed) -> str:
    return "The directory said how the save ended."


SAVE_DESCRIPTIONS: dict[type, Callable[[Any], str]] = {
    SaveStarted: _save_started,
    SaveDirectoryCreated: _save_directory_created,
    SaveFailed: _save_failed,
    SaveClosed: _save_closed,
}

"""Descriptions of events that name a save."""

UNREPORTED_EVENTS = frozenset(
    {
        events.DispatcherStarted,
        events.PlanStored,
        events.PlanForgotten,
        events.DatasetRegistered,
        events.DatasetPinned,
        events.DatasetForgotten,
        events.SlotsConfigured,
        events.WorkerRegistered,
    }
)

"""Events that appear in no report of a task or a job."""
