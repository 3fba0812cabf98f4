"""Reports of what happened to a task or a job: one line of text for each of its events.

Events have no times: each line is numbered with its journal record. The tables of descriptions
define what each event means; frequent events are combined into one line.
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
    """One line of a report."""

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
    lines, repeated = [], _RepeatedEvents("Assigned", "Saved")
    if task_id in state.tasks:
        lines.append(ReportLine(number, _describe_task_state(state, state.tasks[task_id])))
    for record, event in _flatten(records):
        # Most events are described before they are applied, a creation only afterwards.
        task = state.tasks.get(task_id)
        description = None if task is None else _describe_for_task(state, event, task)
        is_repeated = description is not None and repeated.add(state, record, event)
        apply(state, event)
        if isinstance(event, events.TaskCreated) and event.task_id == task_id:
            description = _describe_task_created(state, state.tasks[task_id])
        if description is not None and not is_repeated:
            lines += [*repeated.flush(), ReportLine(record, description)]
    return lines + repeated.flush()


def report_job(
    number: int, state: DispatcherState, records: EventRecords, name: str
) -> list[ReportLine]:
    """Return what happened to the job of this name, or to saves into this directory.

    Arguments as in `report_task`.
    """
    lines, repeated = [], _RepeatedEvents("Assigned to its tasks:", "Its tasks saved")
    job_id = _find_job(state, name)
    if job_id is not None:
        job = state.jobs[job_id]
        running = [
            iteration_id
            for iteration_id in job.iterations.values()
            if not state.iterations[iteration_id].finished
        ]
        lines.append(
            ReportLine(
                number,
                f"State at this record: {describe_job(state, job)}, dataset {job.dataset_id}, "
                f"{pluralize(job.num_epochs, 'epoch')} started, {len(running)} unfinished.",
            )
        )
    for record, event in _flatten(records):
        job_id = _find_job(state, name)
        description = None if job_id is None else _describe_for_job(state, event, job_id)
        is_repeated = description is not None and repeated.add(state, record, event)
        apply(state, event)
        if isinstance(event, SaveStarted) and event.path == name:
            description = SAVE_DESCRIPTIONS[SaveStarted](event)
        if isinstance(event, events.JobCreated) and _find_job(state, name) == event.job_id:
            description = _describe_job_created(state, event)
        if description is not None and not is_repeated:
            lines += [*repeated.flush(), ReportLine(record, description)]
    return lines + repeated.flush()


def summarize(state: DispatcherState, records: EventRecords) -> list[str]:
    """Return the jobs, epochs and tasks in the state after all records."""
    for _, event in _flatten(records):
        apply(state, event)
    lines = [
        ", ".join(
            pluralize(len(collection), noun)
            for collection, noun in (
                (state.datasets, "dataset"),
                (state.workers, "worker"),
                (state.jobs, "job"),
                (state.clients, "client"),
            )
        )
    ]
    for job in state.jobs.values():
        epochs = "" if job.save_id else f", {pluralize(job.num_epochs, 'epoch')} started"
        lines.append(f"{describe_job(state, job)}, dataset {job.dataset_id}{epochs}")
        for iteration_id in job.iterations.values():
            iteration = state.iterations[iteration_id]
            tasks = ", ".join(
                f"{task.task_id} ({task.phase.name.lower()}, {task.address})"
                for task in state.tasks_of(iteration)
            )
            progress = "finished" if iteration.finished else "open"
            lines.append(f"  {format_epoch(iteration.epoch)} ({progress}): tasks {tasks or 'none'}")
    return lines


def _flatten(records: EventRecords) -> Iterator[tuple[int, AnyEvent]]:
    for record, record_events in records:
        for event in record_events:
            yield record, event


def _find_job(state: DispatcherState, name: str) -> int | None:
    if name in state.jobs_by_name:
        return state.jobs_by_name[name]
    save_jobs = (
        each
        for each, job in state.jobs.items()
        if job.save_id and _save_path(state, job.save_id) == name
    )
    return next(save_jobs, None)


def _save_path(state: DispatcherState, save: str) -> str:
    return state.saves[save].path


class _RepeatedEvents:
    """Collector that combines frequent events of each kind into one line.

    Args:
        assigned_prefix: Start of the line about assigned splits.
        committed_prefix: Start of the line about saved files.
    """

    def __init__(self, assigned_prefix: str, committed_prefix: str) -> None:
        self._assigned_prefix, self._committed_prefix = assigned_prefix, committed_prefix
        self._reset()

    def _reset(self) -> None:
        #: First record of each kind, and the totals of the collected events.
        self._records: dict[type, int] = {}
        self._assignments: list[tuple[int, int]] = []
        self._tasks: set[int] = set()
        self._files = self._elements = self._horizon = 0

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
            self._horizon = event.horizon
        else:
            return False
        self._records.setdefault(type(event), record)
        return True

    def flush(self) -> list[ReportLine]:
        """Return one line for each kind collected, and reset."""
        descriptions: dict[type, Callable[[], str]] = {
            events.SplitsAssigned: self._describe_assignments,
            FilesCommitted: self._describe_files,
            HorizonAdvanced: self._describe_rounds,
        }
        lines = [ReportLine(record, descriptions[kind]()) for kind, record in self._records.items()]
        self._reset()
        return lines

    def _describe_assignments(self) -> str:
        splits = union(self._assignments)
        details = []
        if len(self._assignments) > 1:
            details.append(pluralize(total_length(splits), "split"))
            details.append(f"{len(self._assignments)} assignments")
        if len(self._tasks) > 1:
            details.append(pluralize(len(self._tasks), "task"))
        suffix = f" ({', '.join(details)})" if details else ""
        return f"{self._assigned_prefix} {describe_splits(splits)}{suffix}."

    def _describe_files(self) -> str:
        files, elements = pluralize(self._files, "file"), pluralize(self._elements, "element")
        return f"{self._committed_prefix} {files} with {elements}."

    def _describe_rounds(self) -> str:
        return _describe_horizon(self._horizon)


# --- creation -----------------------------------------------------------------------------------


def _describe_job_created(state: DispatcherState, event: events.JobCreated) -> str | None:
    if event.save_id:
        return None  # the start of the save is reported by its own event
    mode = ShardingPolicy(event.options.processing_mode).name
    return f"Job {event.name!r} created for dataset {event.dataset_id} with policy {mode}."


def _describe_task_created(state: DispatcherState, task: DispatcherTask) -> str:
    details = [describe_iteration(state, state.iterations[task.iteration_id])]
    shard = shard_of(task.mode_state)
    if shard is not None:
        details.append(f"shard {shard.index} of {shard.num_shards}")
    if isinstance(task.mode_state, CoordinatedTask) and task.mode_state.starting_round:
        details.append(f"starting at round {task.mode_state.starting_round}")
    if task.attempt:
        details.append(f"retry {task.attempt} after losses")
    return (
        f"Task {task.task_id} created on worker {task.address} ({task.worker_id[:8]}): "
        f"{', '.join(details)}."
    )


def _describe_task_state(state: DispatcherState, task: DispatcherTask) -> str:
    assigned = task.assigned
    phase = {
        TaskPhase.RUNNING: "running",
        TaskPhase.FINISHED: "finished",
        TaskPhase.LOST: f"lost ({task.reason})",
        TaskPhase.FAILED: f"failed ({task.reason})",
    }[task.phase]
    return (
        f"State at this record: task {task.task_id} on worker {task.address}, "
        f"{describe_iteration(state, state.iterations[task.iteration_id])}, {phase}; "
        f"{pluralize(assigned.num_assigned, 'split')} in "
        f"{pluralize(assigned.num_assignments, 'assignment')}, "
        f"{assigned.num_done} known to be done."
    )


# --- relevance of events -------------------------------------------------------------------------


def _describe_for_task(state: DispatcherState, event: AnyEvent, task: DispatcherTask) -> str | None:
    """Return what an event means for a task, before it is applied; None if nothing."""
    kind = type(event)
    if kind in TASK_DESCRIPTIONS and getattr(event, "task_id", None) == task.task_id:
        return TASK_DESCRIPTIONS[kind](state, event, task)
    if kind in WORKER_DESCRIPTIONS and getattr(event, "worker_id", None) == task.worker_id:
        has_ended = task.phase is not TaskPhase.RUNNING and not task.assigned.num_held
        return None if has_ended else WORKER_DESCRIPTIONS[kind](event)
    if kind in ITERATION_DESCRIPTIONS and getattr(event, "iteration_id", None) == task.iteration_id:
        return ITERATION_DESCRIPTIONS[kind](event)
    if kind in SAVE_DESCRIPTIONS and getattr(event, "save_id", "") == _save_of(state, task):
        return SAVE_DESCRIPTIONS[kind](event)
    if isinstance(event, events.ClientLeft) and state.clients[event.client_id] == task.iteration_id:
        return f"Client {event.client_id} left."
    if isinstance(event, events.TasksForgotten) and task.task_id in event.task_ids:
        return "Removed from the dispatcher's state; its iteration remembers the lost splits."
    return None


def _save_of(state: DispatcherState, task: DispatcherTask) -> str:
    return state.jobs[state.iterations[task.iteration_id].job_id].save_id or "none"


def _describe_for_job(state: DispatcherState, event: AnyEvent, job_id: int) -> str | None:
    """Return what an event means for a job, before it is applied; None if nothing."""
    kind = type(event)
    if kind in SAVE_DESCRIPTIONS and getattr(event, "save_id", "") == state.jobs[job_id].save_id:
        return SAVE_DESCRIPTIONS[kind](event)
    if isinstance(event, events.JobForgotten):
        return "Job removed from the dispatcher's state." if event.job_id == job_id else None
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
        return f"Task {event.task_id} created on worker {address}."
    if isinstance(event, events.ClientLeft):
        return f"Client {event.client_id} left."
    if isinstance(event, events.TasksForgotten):
        return f"{_name_tasks(event.task_ids)} removed from the dispatcher's state."
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
    description = WORKER_DESCRIPTIONS[type(event)](event)
    return f"{_name_tasks(involved)} on worker {worker.address}: {description}"


def _name_tasks(task_ids: Sequence[int]) -> str:
    return f"{'Task' if len(task_ids) == 1 else 'Tasks'} {', '.join(map(str, task_ids))}"


# --- descriptions of events, for `event_report` --------------------------------------------------

# An event is described from the state before it is applied. Ranges of split indices include both
# ends: "10 to 19".

_MAX_RANGES = 8


# --- formatting ----------------------------------------------------------------------------------


def pluralize(number: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_job(state: DispatcherState, job: Job) -> str:
    """Describe a job: a named job, a client's own, or a save."""
    if job.save_id:
        return f"save into {state.saves[job.save_id].path!r}"
    return f"job {job.name!r}" if job.name else f"job of client {job.owner}"


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
    return f"{'split' if total_length(ranges) == 1 else 'splits'} {_join(parts)}"


def _join(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _describe_task_splits(task: DispatcherTask, splits: Ranges) -> str:
    return describe_splits(task.assigned.to_split_indices(splits))


def _partial_ranges(partial_splits: PartialSplits) -> Ranges:
    """Return the splits that have an entry in `partial_splits`."""
    return union((split, split + 1) for split, _ in partial_splits)


def _describe_elements(task: DispatcherTask, splits: Ranges, partial_splits: PartialSplits) -> str:
    descriptions = []
    if splits:
        descriptions.append(f"{_describe_task_splits(task, splits)} completely")
    if partial_splits:
        descriptions.append(
            f"some elements of {_describe_task_splits(task, _partial_ranges(partial_splits))}"
        )
    return _join(descriptions) or "nothing"


# --- tasks ---------------------------------------------------------------------------------------


def _splits_assigned(
    state: DispatcherState, event: events.SplitsAssigned, task: DispatcherTask
) -> str:
    splits = describe_splits(((event.start, event.stop),))
    is_partial = event.start in state.iterations[task.iteration_id].pool.partial_splits
    return (
        f"Assigned the undelivered elements of {splits}." if is_partial else f"Assigned {splits}."
    )


def _splits_reassigned(
    state: DispatcherState, event: events.SplitsReassigned, task: DispatcherTask
) -> str:
    return (
        f"Slow with {_describe_task_splits(task, event.splits)}: assigned to other tasks as well."
    )


def _splits_returned(
    state: DispatcherState, event: events.SplitsReturned, task: DispatcherTask
) -> str:
    partial = intersect(
        event.splits, union((split, split + 1) for split in task.assigned.remaining_ordinals)
    )
    whole = subtract(event.splits, partial)
    is_running = task.phase is TaskPhase.RUNNING
    sentences = []
    if whole:
        cause = "Its worker returned" if is_running else "No client received"
        sentences.append(f"{cause} {_describe_task_splits(task, whole)}: to be assigned again.")
    if partial:
        cause = "Its worker returned" if is_running else "No client received"
        sentences.append(
            f"{cause} the remaining elements of {_describe_task_splits(task, partial)}: to be "
            "assigned again."
        )
    return " ".join(sentences)


def _splits_abandoned(
    state: DispatcherState, event: events.SplitsAbandoned, task: DispatcherTask
) -> str:
    return (
        f"Abandoned {_describe_task_splits(task, event.splits)}: every task that held them was "
        "lost."
    )


def _task_finished(state: DispatcherState, event: events.TaskFinished, task: DispatcherTask) -> str:
    if event.cut_short:
        return "Ended before the end of its copy, because its worker is draining."
    return "Finished: all elements were delivered."


def _task_failed(state: DispatcherState, event: events.TaskFailed, task: DispatcherTask) -> str:
    return f"Failed: {event.reason}."


def _task_lost(state: DispatcherState, event: events.TaskLost, task: DispatcherTask) -> str:
    return f"Declared lost, although its worker is registered: {event.reason}."


def _copy_marked_stable(
    state: DispatcherState, event: events.CopyMarkedStable, task: DispatcherTask
) -> str:
    return "Marked stable: it has run so long that its dataset is assumed not to kill workers."


def _delivery_reported(
    state: DispatcherState, event: events.DeliveryReported, task: DispatcherTask
) -> str:
    num_whole = total_length(event.delivered)
    num_partial = total_length(subtract(event.partially_delivered, event.delivered))
    counts = []
    if num_whole:
        counts.append(pluralize(num_whole, "split"))
    if num_partial:
        counts.append(f"elements of {pluralize(num_partial, 'split')}")
    clients = f"client {event.client_id}" if event.client_id else "its clients"
    return f"Known to be received by {clients}: {_join(counts) or 'nothing'}."


def _rounds_reported(state: DispatcherState, event: RoundsReported, task: DispatcherTask) -> str:
    rounds = pluralize(event.rounds, "round")
    return f"Known to be received by client {event.client_id}: {rounds}."


def _elements_received(
    state: DispatcherState, event: events.ElementsReceived, task: DispatcherTask
) -> str:
    received = _describe_elements(task, event.splits, event.partial_splits)
    return f"Known to be received by client {event.client_id}: {received}."


def _elements_consumed(
    state: DispatcherState, event: events.ElementsConsumed, task: DispatcherTask
) -> str:
    consumed = _describe_elements(task, event.splits, event.partial_splits)
    return f"Known to be consumed by client {event.client_id}: {consumed}."


def _departed_client_reported(
    state: DispatcherState, event: events.DepartedClientReported, task: DispatcherTask
) -> str:
    outcomes = []
    if event.partially_consumed:
        splits = _describe_task_splits(task, _partial_ranges(event.partially_consumed))
        outcomes.append(f"it had consumed elements of {splits}")
    if event.returned:
        splits = _describe_task_splits(task, event.returned)
        outcomes.append(f"only it was sent {splits}, to be assigned again")
    if event.partially_returned:
        splits = _describe_task_splits(task, _partial_ranges(event.partially_returned))
        outcomes.append(f"unconsumed elements of {splits}, to be assigned again")
    if event.lost:
        splits = _describe_task_splits(task, event.lost)
        outcomes.append(f"elements of {splits} sent to it are lost")
    if not (event.returned or event.partially_returned or event.lost):
        outcomes.append("nothing to assign again")
    return f"Departed client {event.client_id}: {'; '.join(outcomes)}."


def _files_committed(state: DispatcherState, event: FilesCommitted, task: DispatcherTask) -> str:
    elements = sum(file.elements for file in event.files)
    return f"Saved {pluralize(len(event.files), 'file')} with {pluralize(elements, 'element')}."


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
    RoundsReported: _rounds_reported,
    events.ElementsReceived: _elements_received,
    events.ElementsConsumed: _elements_consumed,
    events.DepartedClientReported: _departed_client_reported,
    FilesCommitted: _files_committed,
}
"""Descriptions of events that name a task."""


# --- workers, iterations, saves ------------------------------------------------------------------


def _worker_draining(event: events.WorkerDraining) -> str:
    return "Its worker is draining: no new work; it delivers the elements that it has computed."


def _worker_left(event: events.WorkerLeft) -> str:
    return "Its worker left."


def _worker_lost(event: events.WorkerLost) -> str:
    return f"Its worker was lost: {event.reason}."


WORKER_DESCRIPTIONS: dict[type, Callable[[Any], str]] = {
    events.WorkerDraining: _worker_draining,
    events.WorkerLeft: _worker_left,
    events.WorkerLost: _worker_lost,
}
"""Descriptions of events that name a worker, for the tasks on it."""


def _iteration_created(event: events.IterationCreated) -> str:
    start = f" at split {event.first_split}" if event.first_split else ""
    return f"{format_epoch(event.epoch).capitalize()} started{start} with seed {event.seed}."


def _client_joined(event: events.ClientJoined) -> str:
    index = event.consumer_index
    consumer = "" if index is None else f" as consumer {index}"
    return f"Client {event.client_id} joined{consumer}."


def _horizon_advanced(event: HorizonAdvanced) -> str:
    return _describe_horizon(event.horizon)


def _describe_horizon(horizon: int) -> str:
    return f"Consumers may read rounds before {horizon}."


def _iteration_finished(event: events.IterationFinished) -> str:
    return (
        f"Epoch abandoned: {event.failure_reason}." if event.failure_reason else "Epoch finished."
    )


def _iteration_discarded(event: events.IterationDiscarded) -> str:
    return "Epoch discarded, because it had no clients. Opening it again restarts it."


def _iteration_forgotten(event: events.IterationForgotten) -> str:
    return "Finished epoch removed from the dispatcher's state."


ITERATION_DESCRIPTIONS: dict[type, Callable[[Any], str]] = {
    events.IterationCreated: _iteration_created,
    events.ClientJoined: _client_joined,
    HorizonAdvanced: _horizon_advanced,
    events.IterationFinished: _iteration_finished,
    events.IterationDiscarded: _iteration_discarded,
    events.IterationForgotten: _iteration_forgotten,
}
"""Descriptions of events that name an iteration."""


def _save_started(event: SaveStarted) -> str:
    return f"Save into {event.path!r} started."


def _save_directory_created(event: SaveDirectoryCreated) -> str:
    return "Directory created: workers may write."


def _save_failed(event: SaveFailed) -> str:
    return f"Save failed: {event.error}."


def _save_closed(event: SaveClosed) -> str:
    return "Outcome of the save recorded in the directory."


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
