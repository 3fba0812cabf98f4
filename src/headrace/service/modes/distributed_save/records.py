"""What the dispatcher remembers of distributed saves, and the facts that change it."""

from __future__ import annotations

import msgspec

from headrace.service.dispatcher.event import Event
from headrace.service.dispatcher.mode_state import TaskModeState
from headrace.service.messages import SavedFile

__all__ = [
    "MAX_CLOSED_SAVES",
    "CommittedFile",
    "FilesCommitted",
    "SaveClosed",
    "SaveDirectoryCreated",
    "SaveFailed",
    "SaveStarted",
    "SaveState",
    "TaskFiles",
    "files_of",
]

MAX_CLOSED_SAVES = 100


class CommittedFile(msgspec.Struct, frozen=True, array_like=True):
    """A chunk file that counts (`saved.ChunkRecord`), in the order of `committed_files`."""

    stream: int
    number: int
    elements: int
    bytes: int
    form: str


class SaveState(msgspec.Struct):
    """A dataset that workers write into a directory; its units are those of an iteration."""

    save_id: str
    path: str
    plan_digest: str
    spec: bytes
    chunk_bytes: int | None
    max_saves_per_worker: int
    """For how many saves one worker writes at a time."""
    #: They are there until it is closed; the iteration is the job's only one.
    job_id: int
    iteration_id: int
    #: Whether its directory was begun; before that it has no tasks.
    is_open: bool = False
    #: All files that count, in their order, until it is closed; and how many they were.
    committed_files: list[CommittedFile] = msgspec.field(default_factory=list)
    num_files: int = 0
    num_elements: int = 0
    num_bytes: int = 0
    #: Why it failed, as far as it is not its iteration that did; and the name of the error's class.
    error: str = ""
    error_class: str = ""
    #: The directory says how it ended.
    is_closed: bool = False


class TaskFiles(TaskModeState):
    """The files that a task of a save has written."""

    #: How often it said that files are whole, and how many these were.
    num_reports: int = 0
    num_files: int = 0


def files_of(mode: TaskModeState | None) -> TaskFiles:
    """Return the files of a task of a save."""
    assert isinstance(mode, TaskFiles), mode
    return mode


class SaveStarted(Event, frozen=True):
    """Workers are to write a dataset into a directory; the job and the iteration come next."""

    save_id: str
    path: str
    plan_digest: str
    spec: bytes
    chunk_bytes: int | None
    max_saves_per_worker: int
    """For how many saves one worker writes at a time."""
    job_id: int
    iteration_id: int


class SaveDirectoryCreated(Event, frozen=True):
    """The directory of a save was begun."""

    save_id: str


class FilesCommitted(Event, frozen=True):
    """Files of a task count from now on, in this order after all of its save before.

    They hold, with those of the task before them, its units before `num_done`, in dealt order.
    """

    task_id: int
    report_number: int
    files: tuple[SavedFile, ...]
    num_done: int


class SaveFailed(Event, frozen=True):
    """A save cannot go on: its directory is lost, or was never free."""

    save_id: str
    error: str
    error_class: str = ""


class SaveClosed(Event, frozen=True):
    """The directory says how a save ended."""

    save_id: str
