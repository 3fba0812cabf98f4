"""What the dispatcher remembers of distributed saves, and the facts that change it."""

from __future__ import annotations

import msgspec

from headrace.service.dispatcher.fact import Fact
from headrace.service.dispatcher.mode_state import TaskModeState
from headrace.service.messages import SavedFile

__all__ = [
    "SAVES_REMEMBERED",
    "FilesSaved",
    "Save",
    "SaveBegun",
    "SaveClosed",
    "SaveFailed",
    "SaveOpened",
    "Stored",
    "TaskFiles",
    "files_of",
]

SAVES_REMEMBERED = 100


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A chunk file that counts (`saved.ChunkRecord`); its place in `Save.stored` is its order."""

    stream: int
    number: int
    elements: int
    bytes: int
    form: str


class Save(msgspec.Struct):
    """A dataset that workers write into a directory; its units are those of an iteration."""

    save: str
    path: str
    plan: str
    spec: bytes
    chunk_bytes: int | None
    at_once: int
    """For how many saves one worker writes at a time."""
    #: They are there until it is closed; the iteration is the job's only one.
    job_id: int
    iteration_id: int
    #: Whether its directory was begun; before that it has no tasks.
    is_open: bool = False
    #: All files that count, in their order, until it is closed; and how many they were.
    stored: list[Stored] = msgspec.field(default_factory=list)
    files: int = 0
    elements: int = 0
    size: int = 0
    #: Why it failed, as far as it is not its iteration that did; and the name of the error's class.
    error: str = ""
    kind: str = ""
    #: The directory says how it ended.
    is_closed: bool = False


class TaskFiles(TaskModeState):
    """The files that a task of a save has written."""

    #: How often it said that files are whole, and how many these were.
    reports: int = 0
    number: int = 0


def files_of(mode: TaskModeState | None) -> TaskFiles:
    """Return the files of a task of a save."""
    assert isinstance(mode, TaskFiles), mode
    return mode


class SaveBegun(Fact, frozen=True):
    """Workers are to write a dataset into a directory; the job and the iteration come next."""

    save: str
    path: str
    plan: str
    spec: bytes
    chunk_bytes: int | None
    at_once: int
    """For how many saves one worker writes at a time."""
    job_id: int
    iteration_id: int


class SaveOpened(Fact, frozen=True):
    """The directory of a save was begun."""

    save: str


class FilesSaved(Fact, frozen=True):
    """Files of a task count from now on, in this order after all of its save before.

    They hold, with those of the task before them, its units before `done`, in dealt order.
    """

    task_id: int
    number: int
    files: tuple[SavedFile, ...]
    done: int


class SaveFailed(Fact, frozen=True):
    """A save cannot go on: its directory is lost, or was never free."""

    save: str
    error: str
    kind: str = ""


class SaveClosed(Fact, frozen=True):
    """The directory says how a save ended."""

    save: str
