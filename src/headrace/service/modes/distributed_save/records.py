"""State of distributed saves in the dispatcher, and the events that change it."""

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
    """A committed chunk file (`saved.format.ChunkRecord`), in the order of `committed_files`."""

    stream: int
    number: int
    elements: int
    bytes: int
    schema: str


class SaveState(msgspec.Struct):
    """A dataset that workers write into a directory; its splits are those of an iteration."""

    save_id: str
    path: str
    plan_digest: str
    spec: bytes
    chunk_bytes: int | None
    max_saves_per_worker: int
    """Number of saves that one worker writes for at the same time."""
    #: Job and iteration, which exist until the save is closed; the job has no other iteration.
    job_id: int
    iteration_id: int
    #: True once its directory is created; it has no tasks before.
    is_open: bool = False
    #: All committed files in order, until the save is closed, and their totals.
    committed_files: list[CommittedFile] = msgspec.field(default_factory=list)
    num_files: int = 0
    num_elements: int = 0
    num_bytes: int = 0
    #: Why the save failed, unless its iteration did, and the name of the error's class.
    error: str = ""
    error_class: str = ""
    #: True once the directory records how the save ended.
    is_closed: bool = False


class TaskFiles(TaskModeState):
    """Number of files that a task of a save has written."""

    #: Number of reports of finished files, and number of files in them.
    num_reports: int = 0
    num_files: int = 0


def files_of(mode: TaskModeState | None) -> TaskFiles:
    """Return the files of a task of a save."""
    assert isinstance(mode, TaskFiles), mode
    return mode


class SaveStarted(Event, frozen=True):
    """A save into a directory was started; events for its job and iteration follow."""

    save_id: str
    path: str
    plan_digest: str
    spec: bytes
    chunk_bytes: int | None
    max_saves_per_worker: int
    """Number of saves that one worker writes for at the same time."""
    job_id: int
    iteration_id: int


class SaveDirectoryCreated(Event, frozen=True):
    """The directory of a save was created."""

    save_id: str


class FilesCommitted(Event, frozen=True):
    """Files of a task were committed, in this order after all earlier ones of the save.

    With the task's earlier files, they contain its splits before `num_done`, in assignment order.
    """

    task_id: int
    report_number: int
    files: tuple[SavedFile, ...]
    num_done: int


class SaveFailed(Event, frozen=True):
    """A save failed: its directory was lost, or belongs to another save."""

    save_id: str
    error: str
    error_class: str = ""


class SaveClosed(Event, frozen=True):
    """The directory of a save records how it ended."""

    save_id: str
