"""Deciders for saves: start, committed files, and directories.

The dispatcher's core never accesses a directory. Its publisher asks for the pending work of all
saves (`ListOpenSaves`), does it, and reports it (`ReportDirectory`); only the dispatcher's process
can send these two requests.
"""

from __future__ import annotations

import re

import msgspec

from headrace.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.python_versions import (
    check_iteration_can_run,
    check_workers_can_run,
)
from headrace.service.dispatcher.state import DispatcherState, TaskPhase
from headrace.service.dispatcher.tasks import get_worker_task
from headrace.service.modes.distributed_save.policy import SaveSharding
from headrace.service.modes.distributed_save.records import (
    CommittedFile,
    FilesCommitted,
    SaveClosed,
    SaveDirectoryCreated,
    SaveFailed,
    SaveStarted,
    SaveState,
    files_of,
)
from headrace.serving.rpc import Done, Message, TypedRequest

__all__ = [
    "ListOpenSaves",
    "ListOpenSavesReply",
    "OpenSave",
    "ReportDirectory",
    "commit_files",
    "get_save_status",
    "list_open_saves",
    "report_directory",
    "start_save",
]

_OPTIONS = messages.JobOptions(processing_mode=int(ShardingPolicy.DYNAMIC), target_workers="ANY")
_POLICY = SaveSharding()
_INFINITE = -1
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_INT64 = range(-(1 << 63), 1 << 63)


class OpenSave(msgspec.Struct, frozen=True):
    """An open save, and the required contents of its directory."""

    save_id: str
    path: str
    plan_digest: str
    spec: bytes
    is_open: bool
    new_files: tuple[CommittedFile, ...]
    """Its files in order, without those that the publisher knows."""
    is_finished: bool
    """True once its list of files is final."""
    error: str


class ListOpenSavesReply(Message, frozen=True):
    """Reply to `ListOpenSaves`."""

    saves: tuple[OpenSave, ...]


class ListOpenSaves(TypedRequest[ListOpenSavesReply], frozen=True):
    """Request the required contents of the directories of all open saves."""

    known_files: dict[str, int]
    """Save -> number of its files that the publisher knows."""


class ReportDirectory(TypedRequest[Done], frozen=True):
    """Report the outcome of an operation on a directory."""

    save_id: str
    outcome: str
    """"opened", "failed" or "closed"."""
    error: str = ""
    """Why the operation failed."""
    error_class: str = ""
    """Name of the error's class."""


def start_save(
    state: DispatcherState, request: messages.StartSave, context: DecisionContext
) -> DispatcherDecision:
    """Start a save.

    Raises:
        AlreadyExistsError: If a save into this directory was started before and has not failed.
        FailedPreconditionError: If the dataset has no splits, or the workers run another minor
            version of Python than the client that registered it.
        InvalidArgumentError: If the dataset is infinite, or the dispatcher keeps no journal.
        NotFoundError: If the dataset is not registered.
        ValueError: If the request is invalid.
    """
    _validate(request)
    existing = state.saves.get(request.save_id)
    if existing is not None:
        if existing.path != request.path:
            raise ValueError(
                f"save {request.save_id} was started with path={existing.path!r}; got "
                f"path={request.path!r}"
            )
        return DispatcherDecision(reply=_save_status(state, existing))
    if not context.limits.keeps_journal:
        raise InvalidArgumentError(
            "saving a dataset with a data service requires running the dispatcher in the fault "
            "tolerant mode: its journal records which elements are in the files. Start it with "
            "DispatcherConfig(work_dir=..., fault_tolerant_mode=True), `headrace dispatcher "
            "--work-dir DIR`, or LocalCluster(work_dir=...)"
        )
    for other in state.saves.values():
        if other.path == request.path and not other.error:
            raise AlreadyExistsError(
                f"a save into {request.path!r} is already started or completed; choose another "
                "directory"
            )
    dataset = state.dataset(request.dataset_id)
    if dataset.num_splits == _INFINITE:
        raise InvalidArgumentError(
            "Saving an infinite dataset is not allowed: limit it with `take(n)`"
        )
    _POLICY.check_dataset(state, dataset)
    check_workers_can_run(state, dataset)
    started: tuple[AnyEvent, ...] = (
        SaveStarted(
            save_id=request.save_id,
            path=request.path,
            plan_digest=request.plan_digest,
            spec=request.spec,
            chunk_bytes=request.chunk_bytes,
            max_saves_per_worker=context.limits.max_saves_per_worker,
            job_id=state.next_job_id,
            iteration_id=state.next_iteration_id,
        ),
        events.JobCreated(
            job_id=state.next_job_id,
            name=None,
            owner=None,
            dataset_id=request.dataset_id,
            options=_OPTIONS,
            save_id=request.save_id,
        ),
        events.IterationCreated(
            iteration_id=state.next_iteration_id,
            job_id=state.next_job_id,
            epoch=(0,),
            seed=request.seed,
            num_splits=_POLICY.num_splits(dataset, None),
        ),
    )
    return DispatcherDecision(
        events=started,
        compose_reply=lambda after: _save_status(after, after.saves[request.save_id]),
    )


def get_save_status(
    state: DispatcherState, request: messages.GetSaveStatus, context: DecisionContext
) -> DispatcherDecision:
    """Return the status of a save.

    Raises:
        FailedPreconditionError: If the workers run another minor version of Python.
        NotFoundError: If the save is not known.
    """
    save = state.saves.get(request.save_id)
    if save is None:
        raise NotFoundError(
            f"save {request.save_id} not found: it ended long ago, or the dispatcher was restarted "
            "without its journal. Its directory records how it ended"
        )
    if not save.is_closed:
        check_iteration_can_run(state, state.iterations[save.iteration_id])
    return DispatcherDecision(reply=_save_status(state, save))


def _save_status(state: DispatcherState, save: SaveState) -> messages.SaveStatus:
    return messages.SaveStatus(
        is_open=save.is_open,
        is_closed=save.is_closed,
        error=_error_message(state, save),
        error_class=save.error_class,
        elements=save.num_elements,
        files=save.num_files,
        bytes=save.num_bytes,
    )


def _error_message(state: DispatcherState, save: SaveState) -> str:
    iteration = state.iterations.get(save.iteration_id)
    return save.error or ("" if iteration is None else iteration.failure_reason)


def commit_files(
    state: DispatcherState, request: messages.CommitFiles, context: DecisionContext
) -> DispatcherDecision:
    """Commit files of a task.

    Raises:
        FailedPreconditionError: If the task does not run, or writes no files.
        ValueError: If the request is invalid.
    """
    task = get_worker_task(state, request)
    splits = task.assigned
    iteration = state.iterations[task.iteration_id]
    job = state.jobs[iteration.job_id]
    if not job.save_id:
        raise FailedPreconditionError(f"task {task.task_id} belongs to no save: clients read it")
    files = files_of(task.mode_state)
    if request.report_number < files.num_reports:
        return DispatcherDecision()
    if task.phase is not TaskPhase.RUNNING:
        raise FailedPreconditionError(
            f"task {task.task_id} is {task.phase.name.lower()}: only a running task can commit "
            "files"
        )
    if request.report_number > files.num_reports:
        raise ValueError(
            f"task {task.task_id} sent report_number={request.report_number}, but the next one is "
            f"{files.num_reports}"
        )
    if not splits.num_done <= request.num_done <= splits.num_assigned:
        raise ValueError(
            f"task {task.task_id} reported num_done={request.num_done}; expected a value from "
            f"{splits.num_done}, reported before, to {splits.num_assigned}, the assigned splits"
        )
    for number, file in enumerate(request.files, start=files.num_files):
        if file.number != number or file.elements < 1 or file.bytes < 1:
            raise ValueError(
                f"task {task.task_id} reported {file}; expected number={number}, and elements and "
                "bytes of at least 1"
            )
    committed = FilesCommitted(
        task_id=task.task_id,
        report_number=request.report_number,
        files=request.files,
        num_done=request.num_done,
    )
    return DispatcherDecision(events=(committed,))


def list_open_saves(
    state: DispatcherState, request: ListOpenSaves, context: DecisionContext
) -> DispatcherDecision:
    """Return the required contents of the directories of all open saves."""
    return DispatcherDecision(
        reply=ListOpenSavesReply(  # type: ignore[arg-type]  # sent within the process
            saves=tuple(
                OpenSave(
                    save_id=save.save_id,
                    path=save.path,
                    plan_digest=save.plan_digest,
                    spec=save.spec,
                    is_open=save.is_open,
                    new_files=tuple(
                        save.committed_files[request.known_files.get(save.save_id, 0) :]
                    ),
                    is_finished=state.iterations[save.iteration_id].finished,
                    error=_error_message(state, save),
                )
                for save in state.saves.values()
                if not save.is_closed
            )
        )
    )


def report_directory(
    state: DispatcherState, request: ReportDirectory, context: DecisionContext
) -> DispatcherDecision:
    """Record the outcome of an operation on a directory."""
    save = state.saves.get(request.save_id)
    if save is None or save.is_closed:
        return DispatcherDecision()
    return DispatcherDecision(events=_OUTCOMES[request.outcome](save, request))


def _directory_created(save: SaveState, request: ReportDirectory) -> tuple[AnyEvent, ...]:
    return () if save.is_open else (SaveDirectoryCreated(save_id=save.save_id),)


def _directory_failed(save: SaveState, request: ReportDirectory) -> tuple[AnyEvent, ...]:
    if save.error:
        return ()
    return (SaveFailed(save_id=save.save_id, error=request.error, error_class=request.error_class),)


def _directory_closed(save: SaveState, request: ReportDirectory) -> tuple[AnyEvent, ...]:
    return (
        SaveClosed(save_id=save.save_id),
        events.IterationForgotten(iteration_id=save.iteration_id),
        events.JobForgotten(job_id=save.job_id),
    )


_OUTCOMES = {"opened": _directory_created, "failed": _directory_failed, "closed": _directory_closed}


def _validate(request: messages.StartSave) -> None:
    if not _SAVE_ID.fullmatch(request.save_id):
        raise ValueError(f"save_id must have 16 hexadecimal digits; got {request.save_id!r}")
    if not request.path:
        raise ValueError("path must not be empty")
    if request.seed not in _INT64:
        raise ValueError(f"seed must be a signed 64-bit integer; got {request.seed}")
    if request.chunk_bytes is not None and request.chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be None or at least 1; got {request.chunk_bytes}")
