"""Facts: everything that the dispatcher must remember, in the past tense.

Rule 1. A fact is complete: applying it needs the state before it and nothing else, no clock and no
        chance, so the same facts always add up to the same state.
Rule 2. A fact that was ever written to a journal keeps its name and its fields; new fields have
        defaults. What a fact means never changes.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "ClientJoined",
    "ClientLeft",
    "DatasetRegistered",
    "IterationCollected",
    "IterationCreated",
    "IterationFinished",
    "IterationForgotten",
    "JobCreated",
    "JobForgotten",
    "SplitProduced",
    "TaskCreated",
    "TaskFinished",
    "Update",
    "WorkerLost",
    "WorkerRegistered",
]


class Fact(msgspec.Struct, frozen=True, tag=True):
    """One thing that happened; its class name is kept as its tag."""


class DatasetRegistered(Fact, frozen=True):
    """A dataset became known; its plan is kept under `plan`, a digest of the plan's bytes."""

    dataset_id: str
    token: str
    fingerprint: str
    element_spec: bytes
    cardinality: int
    split_sizes: tuple[int, ...]
    compression: str | None
    plan: bytes


class WorkerRegistered(Fact, frozen=True):
    """A worker joined, or told its tags anew."""

    worker_id: str
    address: str
    tags: tuple[str, ...]


class WorkerLost(Fact, frozen=True):
    """A worker is gone for good, and its running tasks with it."""

    worker_id: str


class JobCreated(Fact, frozen=True):
    """A job came to be: named, or the own one of a client."""

    job_id: int
    name: str | None
    owner: str | None
    dataset_id: str
    processing_mode: int
    target_workers: str


class JobForgotten(Fact, frozen=True):
    """A job that nobody can join any more left memory; it had no iteration left."""

    job_id: int


class IterationCreated(Fact, frozen=True):
    """One more pass of a job began."""

    iteration_id: int
    job_id: int
    repetition: int


class IterationFinished(Fact, frozen=True):
    """All tasks are over, at least one of them by reaching its end."""

    iteration_id: int


class IterationCollected(Fact, frozen=True):
    """An iteration without clients was given up; opening it again begins a fresh one."""

    iteration_id: int


class IterationForgotten(Fact, frozen=True):
    """A finished iteration left memory; its job remembers that it finished."""

    iteration_id: int


class TaskCreated(Fact, frozen=True):
    """A worker was given an iteration."""

    task_id: int
    iteration_id: int
    worker_id: str


class TaskFinished(Fact, frozen=True):
    """A task handed out its last element."""

    task_id: int


class ClientJoined(Fact, frozen=True):
    """A client reads an iteration."""

    client_id: str
    iteration_id: int


class ClientLeft(Fact, frozen=True):
    """A client closed its iteration, or was silent for too long."""

    client_id: str


class SplitProduced(Fact, frozen=True):
    """Indices `start` to `stop` - 1 of a source were dealt to a task.

    A `repetition` after the source's current one began the source anew.
    """

    task_id: int
    source: int
    repetition: tuple[int, ...]
    number: int
    start: int
    stop: int


Update: TypeAlias = (
    DatasetRegistered
    | WorkerRegistered
    | WorkerLost
    | JobCreated
    | JobForgotten
    | IterationCreated
    | IterationFinished
    | IterationCollected
    | IterationForgotten
    | TaskCreated
    | TaskFinished
    | ClientJoined
    | ClientLeft
    | SplitProduced
)
