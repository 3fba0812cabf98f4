"""Deciders: saves begin, their files count, and their directories are looked after.

The dispatcher's core never touches a directory. Its shell asks what is to be done with those of
all saves (`LookAtSaves`), does it, and says so (`NoteSave`); both are requests that nobody else can
send.
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
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.python_versions import (
    check_iteration_can_run,
    check_workers_can_run,
)
from headrace.service.dispatcher.state import DispatcherState, TaskPhase
from headrace.service.dispatcher.tasks import workers_task
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.distributed_save.policy import Saving
from headrace.service.modes.distributed_save.records import (
    FilesSaved,
    Save,
    SaveBegun,
    SaveClosed,
    SaveFailed,
    SaveOpened,
    Stored,
    files_of,
)
from headrace.serving.call import Done, Message, Question

__all__ = [
    "LookAtSaves",
    "NoteSave",
    "SaveWork",
    "SavesAtWork",
    "begin_save",
    "get_save",
    "look_at_saves",
    "note_save",
    "save_files",
]

_TERMS = messages.Terms(processing_mode=int(ShardingPolicy.DYNAMIC), target_workers="ANY")
_SAVING = Saving()
_INFINITE = -1
_ID = re.compile(r"[0-9a-f]{16}")
_NUMBERS = range(-(1 << 63), 1 << 63)


class SaveWork(msgspec.Struct, frozen=True):
    """A save that is not closed: what its directory is to be."""

    save: str
    path: str
    plan: str
    spec: bytes
    is_open: bool
    stored: tuple[Stored, ...]
    """Its files, in their order, without those that the shell knows of."""
    is_over: bool
    """No more files come."""
    error: str


class SavesAtWork(Message, frozen=True):
    """The reply to `LookAtSaves`."""

    saves: tuple[SaveWork, ...]


class LookAtSaves(Question[SavesAtWork], frozen=True):
    """Ask what is to be done with the directories of all saves that are not closed."""

    known: dict[str, int]
    """Save -> how many of its files the shell knows."""


class NoteSave(Question[Done], frozen=True):
    """Say what became of a directory."""

    save: str
    what: str
    """"opened", "failed" or "closed"."""
    error: str = ""
    """Why it failed."""
    kind: str = ""
    """The name of the error's class."""


def begin_save(state: DispatcherState, request: messages.BeginSave, moment: Moment) -> Decision:
    """Begin a save.

    Raises:
        AlreadyExistsError: One into this directory was begun before, and has not failed.
        FailedPreconditionError: The dataset cannot be dealt, or the workers run another minor
            version of Python than whoever registered it.
        InvalidArgumentError: It is infinite, or the dispatcher keeps no journal.
        NotFoundError: It is not registered.
        ValueError: The request makes no sense.
    """
    _check_sense(request)
    known = state.saves.get(request.save)
    if known is not None:
        if known.path != request.path:
            raise ValueError(f"the save {request.save} was begun in {known.path!r}")
        return Decision(reply=_update(state, known))
    if not moment.limits.keeps_journal:
        raise InvalidArgumentError(
            "saving a dataset with a data service requires running the dispatcher in the fault "
            "tolerant mode: it must remember which elements are in the files. Start it with "
            "DispatcherConfig(work_dir=..., fault_tolerant_mode=True), `headrace dispatcher "
            "--work-dir DIR`, or LocalCluster(work_dir=...)"
        )
    for other in state.saves.values():
        if other.path == request.path and not other.error:
            raise AlreadyExistsError(
                f"a save into {request.path!r} is already started or completed; name another "
                "directory"
            )
    dataset = state.dataset(request.dataset_id)
    if dataset.positions == _INFINITE:
        raise InvalidArgumentError(
            "Saving an infinite dataset is not allowed: choose how many elements with take(n)"
        )
    _SAVING.check(state, dataset)
    check_workers_can_run(state, dataset)
    facts: tuple[Update, ...] = (
        SaveBegun(
            save=request.save,
            path=request.path,
            plan=request.plan,
            spec=request.spec,
            chunk_bytes=request.chunk_bytes,
            at_once=moment.limits.saves_at_once,
            job_id=state.next_job,
            iteration_id=state.next_iteration,
        ),
        updates.JobCreated(
            job_id=state.next_job,
            name=None,
            owner=None,
            dataset_id=request.dataset_id,
            terms=_TERMS,
            save=request.save,
        ),
        updates.IterationCreated(
            iteration_id=state.next_iteration,
            job_id=state.next_job,
            pass_number=(0,),
            seed=request.seed,
            positions=_SAVING.positions(dataset, None),
        ),
    )
    return Decision(updates=facts, compose=lambda after: _update(after, after.saves[request.save]))


def get_save(state: DispatcherState, request: messages.GetSave, moment: Moment) -> Decision:
    """Say how far a save is.

    Raises:
        FailedPreconditionError: The workers that are there run another minor version of Python.
        NotFoundError: It is not known.
    """
    save = state.saves.get(request.save)
    if save is None:
        raise NotFoundError(
            f"the save {request.save} is not known here: it was over long ago, or the dispatcher "
            "was restarted without its journal. The directory says what became of it"
        )
    if not save.is_closed:
        check_iteration_can_run(state, state.iterations[save.iteration_id])
    return Decision(reply=_update(state, save))


def _update(state: DispatcherState, save: Save) -> messages.SaveUpdate:
    return messages.SaveUpdate(
        is_open=save.is_open,
        is_closed=save.is_closed,
        error=_error(state, save),
        kind=save.kind,
        elements=save.elements,
        files=save.files,
        bytes=save.size,
    )


def _error(state: DispatcherState, save: Save) -> str:
    iteration = state.iterations.get(save.iteration_id)
    return save.error or ("" if iteration is None else iteration.failed)


def save_files(state: DispatcherState, request: messages.SaveFiles, moment: Moment) -> Decision:
    """Let files of a task count.

    Raises:
        AbortedError: The task has said something later already.
        FailedPreconditionError: The task is over, or writes no files.
        ValueError: The request makes no sense.
    """
    task = workers_task(state, request)
    splits = task.splits
    iteration = state.iterations[task.iteration_id]
    job = state.jobs[iteration.job_id]
    if not job.save:
        raise FailedPreconditionError(f"task {task.task_id} writes no files: clients read it")
    files = files_of(task.mode)
    if request.number < files.reports:
        return Decision()
    if task.phase is not TaskPhase.RUNNING:
        raise FailedPreconditionError(
            f"task {task.task_id} is {task.phase.name.lower()}: what it wrote since counts no more"
        )
    if request.number > files.reports:
        raise ValueError(
            f"task {task.task_id} sent report {request.number + 1} of finished files; "
            f"{files.reports} were heard"
        )
    if not splits.done <= request.done <= splits.dealt:
        raise ValueError(
            f"task {task.task_id} says that units before {request.done} are in files: it was "
            f"dealt {splits.dealt}, of which {splits.done} were so before"
        )
    for place, file in enumerate(request.files, start=files.number):
        if file.number != place or file.elements < 1 or file.bytes < 1:
            raise ValueError(f"task {task.task_id} cannot have written {file} as file {place}")
    saved = FilesSaved(
        task_id=task.task_id, number=request.number, files=request.files, done=request.done
    )
    return Decision(updates=(saved,))


def look_at_saves(state: DispatcherState, request: LookAtSaves, moment: Moment) -> Decision:
    """Say what the directories of all saves are to be."""
    return Decision(
        reply=SavesAtWork(  # type: ignore[arg-type]  # sent within the process
            saves=tuple(
                SaveWork(
                    save=save.save,
                    path=save.path,
                    plan=save.plan,
                    spec=save.spec,
                    is_open=save.is_open,
                    stored=tuple(save.stored[request.known.get(save.save, 0) :]),
                    is_over=state.iterations[save.iteration_id].finished,
                    error=_error(state, save),
                )
                for save in state.saves.values()
                if not save.is_closed
            )
        )
    )


def note_save(state: DispatcherState, request: NoteSave, moment: Moment) -> Decision:
    """Take note of what became of a directory."""
    save = state.saves.get(request.save)
    if save is None or save.is_closed:
        return Decision()
    return Decision(updates=_NOTED[request.what](save, request))


def _opened(save: Save, request: NoteSave) -> tuple[Update, ...]:
    return () if save.is_open else (SaveOpened(save=save.save),)


def _failed(save: Save, request: NoteSave) -> tuple[Update, ...]:
    if save.error:
        return ()
    return (SaveFailed(save=save.save, error=request.error, kind=request.kind),)


def _closed(save: Save, request: NoteSave) -> tuple[Update, ...]:
    return (
        SaveClosed(save=save.save),
        updates.IterationForgotten(iteration_id=save.iteration_id),
        updates.JobForgotten(job_id=save.job_id),
    )


_NOTED = {"opened": _opened, "failed": _failed, "closed": _closed}


def _check_sense(request: messages.BeginSave) -> None:
    if not _ID.fullmatch(request.save):
        raise ValueError(f"a save's id is 16 hexadecimal digits; got save={request.save!r}")
    if not request.path:
        raise ValueError("a save needs a directory; got path=''")
    if request.seed not in _NUMBERS:
        raise ValueError(f"seed={request.seed} must fit into 64 bits with a sign")
    if request.chunk_bytes is not None and request.chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={request.chunk_bytes} must be at least 1")
