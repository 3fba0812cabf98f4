"""Messages about saves: workers write a dataset into a directory, and no client reads it."""

from __future__ import annotations

import msgspec

from headrace.serving.rpc import Done, Message, TypedRequest

__all__ = [
    "CommitFiles",
    "GetSaveStatus",
    "SaveDestination",
    "SaveStatus",
    "SavedFile",
    "StartSave",
]


class SavedFile(msgspec.Struct, frozen=True, array_like=True):
    """A finished, unpublished chunk file of a task's stream (`saved.format.ChunkRecord`)."""

    number: int
    """Number of the file in the stream, from 0."""
    elements: int
    bytes: int
    schema: str


class SaveDestination(msgspec.Struct, frozen=True, array_like=True):
    """Where a task writes its elements; its stream has the number of the task."""

    save_id: str
    """Id of the save."""
    path: str
    """The directory, already created."""
    spec: bytes
    """Spec of the elements as JSON (`saved.format.SaveHeader.spec`); empty if unknown."""
    chunk_bytes: int | None = None
    """Target size of chunk files in bytes; None uses a default."""


class SaveStatus(Message, frozen=True):
    """Status of a save: the reply to `StartSave` and `GetSaveStatus`."""

    is_open: bool = False
    """True once the directory was created and readers can find it."""
    is_closed: bool = False
    """True once the save has finished or failed."""
    error: str = ""
    """Why the save failed; empty if it did not."""
    error_class: str = ""
    """Name of the error's class."""
    elements: int = 0
    """Number of elements in committed files, as are `files` and `bytes`."""
    files: int = 0
    bytes: int = 0


class StartSave(TypedRequest[SaveStatus], frozen=True):
    """Let the workers save a registered dataset.

    The client chooses the id: a repeated request finds the save that the first one started.
    """

    save_id: str
    """Id of the save: 16 hexadecimal digits."""
    dataset_id: str
    path: str
    """A directory, as path or URL, that the dispatcher and all workers can access by this name."""
    plan_digest: str
    """Digest of the plan (`plan.identity.identity_digest`)."""
    spec: bytes
    """Spec of the elements as JSON; empty if unknown before they are produced."""
    seed: int
    """Seed for unseeded randomness."""
    chunk_bytes: int | None = None


class GetSaveStatus(TypedRequest[SaveStatus], frozen=True):
    """Request the status of a save. A NotFoundError means that the dispatcher does not know it."""

    save_id: str


class CommitFiles(TypedRequest[Done], frozen=True):
    """Report finished files of a task's stream, and which splits they contain. They are then
    committed, and the splits are not assigned again."""

    worker_id: str
    task_id: int
    task_token: str
    report_number: int
    """Number of earlier reports of the task; a repeated number counts once."""
    files: tuple[SavedFile, ...]
    num_done: int
    """All splits before this one, in assignment order, are in these files and the earlier ones."""
