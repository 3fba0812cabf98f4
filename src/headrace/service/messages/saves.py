"""Saves: a dataset is written into a directory by the workers, and no client reads it."""

from __future__ import annotations

import msgspec

from headrace.serving.call import Done, Message, Question

__all__ = [
    "CommitFiles",
    "GetSaveStatus",
    "SaveDestination",
    "SaveStatus",
    "SavedFile",
    "StartSave",
]


class SavedFile(msgspec.Struct, frozen=True, array_like=True):
    """A chunk file of a task's stream that is whole and not published (`saved.ChunkRecord`)."""

    number: int
    """Its number in the stream, from 0 on."""
    elements: int
    bytes: int
    form: str


class SaveDestination(msgspec.Struct, frozen=True, array_like=True):
    """Where a task writes what it makes; its stream has the number of the task."""

    save_id: str
    """Id of the save."""
    path: str
    """The directory, which was begun."""
    spec: bytes
    """Spec of the elements as JSON (`saved.format.Begun.spec`); empty: not known beforehand."""
    chunk_bytes: int | None = None
    """How large chunk files are to be; None: a good size."""


class SaveStatus(Message, frozen=True):
    """The reply to `StartSave` and `GetSaveStatus`: how far a save is."""

    is_open: bool = False
    """The directory was begun: whoever waits for it finds it."""
    is_closed: bool = False
    """Nothing more happens: it is finished, or it failed."""
    error: str = ""
    """Not empty: it failed, and this is why."""
    error_class: str = ""
    """The name of the error's class."""
    elements: int = 0
    """In files that count, as `files` and `bytes` are."""
    files: int = 0
    bytes: int = 0


class StartSave(Question[SaveStatus], frozen=True):
    """Let the workers save a registered dataset. Whoever asks chooses the id: a request that is
    repeated finds what the first one began."""

    save_id: str
    """Id of the save: 16 hexadecimal digits."""
    dataset_id: str
    path: str
    """A directory, by path or URL, that means the same to the dispatcher and to all workers."""
    plan_digest: str
    """Digest of the plan (`plan_digest.identity_digest`)."""
    spec: bytes
    """Spec of the elements as JSON; empty: not known before they are made."""
    seed: int
    """For unseeded randomness."""
    chunk_bytes: int | None = None


class GetSaveStatus(Question[SaveStatus], frozen=True):
    """Ask how far a save is. A NotFoundError says that the dispatcher does not know it."""

    save_id: str


class CommitFiles(Question[Done], frozen=True):
    """Say that files of a task's stream are whole, and which units they hold. From then on they
    count, and the units are not dealt again."""

    worker_id: str
    task_id: int
    task_token: str
    report_number: int
    """How often the task has said so before; the same number is noted once."""
    files: tuple[SavedFile, ...]
    num_done: int
    """All units before this one, in dealt order, are in these files and those before them."""
