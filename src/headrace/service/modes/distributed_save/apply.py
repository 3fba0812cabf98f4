"""Functions that apply events about saves: start, committed files, end. Part of `apply`.

Work on the directory itself is not an event; `publisher` derives it from the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.apply_splits import drop_done_splits, running_task
from headrace.service.dispatcher.event import require
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.distributed_save.records import (
    MAX_CLOSED_SAVES,
    CommittedFile,
    FilesCommitted,
    SaveClosed,
    SaveDirectoryCreated,
    SaveFailed,
    SaveStarted,
    SaveState,
    files_of,
)

__all__ = ["APPLY"]


def save_started(state: DispatcherState, event: SaveStarted) -> None:
    """Add a save; the following events create its job and iteration."""
    require(event.save_id not in state.saves, "the save id already exists")
    state.saves[event.save_id] = SaveState(
        save_id=event.save_id,
        path=event.path,
        plan_digest=event.plan_digest,
        spec=event.spec,
        chunk_bytes=event.chunk_bytes,
        max_saves_per_worker=event.max_saves_per_worker,
        job_id=event.job_id,
        iteration_id=event.iteration_id,
    )


def save_directory_created(state: DispatcherState, event: SaveDirectoryCreated) -> None:
    """Mark the directory as created, so that workers can write."""
    save = _open_save(state, event.save_id)
    require(not save.is_open, "the save is already open")
    save.is_open = True


def files_committed(state: DispatcherState, event: FilesCommitted) -> None:
    """Commit files of a task; the splits in them are done."""
    task = running_task(state, event.task_id)
    splits = task.assigned
    iteration = state.iterations[task.iteration_id]
    save = _open_save(state, state.jobs[iteration.job_id].save_id)
    files = files_of(task.mode_state)
    require(event.report_number == files.num_reports, "report_number is not the next one")
    require(
        splits.num_done <= event.num_done <= splits.num_assigned,
        "the splits were not assigned to the task, or were done before",
    )
    iteration.pool.num_held -= splits.num_held
    drop_done_splits(task, event.num_done)
    iteration.pool.num_held += splits.num_held
    files.num_reports += 1
    for file in event.files:
        require(file.number == files.num_files, "the file number is not the next one of the stream")
        files.num_files += 1
        save.committed_files.append(
            CommittedFile(task.task_id, file.number, file.elements, file.bytes, file.schema)
        )
        save.num_files += 1
        save.num_elements += file.elements
        save.num_bytes += file.bytes


def save_failed(state: DispatcherState, event: SaveFailed) -> None:
    """Record why a save failed."""
    save = _open_save(state, event.save_id)
    require(not save.error, "the save has already failed")
    require(bool(event.error), "error is empty")
    save.error, save.error_class = event.error, event.error_class


def save_closed(state: DispatcherState, event: SaveClosed) -> None:
    """Keep only the status of a save; its job is forgotten next."""
    save = _open_save(state, event.save_id)
    iteration = state.iterations[save.iteration_id]
    require(iteration.finished, "its iteration is not finished")
    save.is_closed = True
    save.error = save.error or iteration.failure_reason
    save.committed_files = []
    closed = [each.save_id for each in state.saves.values() if each.is_closed]
    for oldest in closed[:-MAX_CLOSED_SAVES]:
        del state.saves[oldest]


def _open_save(state: DispatcherState, save_id: str) -> SaveState:
    save = state.saves[save_id]
    require(not save.is_closed, "the save is closed")
    return save


APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    SaveStarted: save_started,
    SaveDirectoryCreated: save_directory_created,
    FilesCommitted: files_committed,
    SaveFailed: save_failed,
    SaveClosed: save_closed,
}
