"""Activity: what workers and clients say of their work, with their heartbeats.

All numbers are sums since the task, or the reading, began: what is lost or said twice does no harm.
"""

from __future__ import annotations

from headrace.serving.call import Message

__all__ = [
    "WAITING_FOR_CLIENTS",
    "WAITING_FOR_SPLITS",
    "StepSeconds",
    "TaskActivity",
    "TrainerActivity",
]

WAITING_FOR_CLIENTS = "clients"
WAITING_FOR_SPLITS = "units"
"""What production of a task may wait for: that clients take what is there, or units to read."""


class StepSeconds(Message, frozen=True):
    """How long threads of a worker were at one step of a dataset; found by looking now and then."""

    step: str
    """The step, and where the user wrote it: "map at train.py:12"."""
    seconds: float


class TrainerActivity(Message, frozen=True):
    """How far one of the trainers is that share a task."""

    trainer_id: str
    delivered: int
    """Elements that it was sent."""
    skipped: int = 0
    """Elements that were gone when it came to them."""
    lag: int = 0
    """Elements that were made, and that it has not been sent yet."""


class TaskActivity(Message, frozen=True):
    """What a worker has done for one task."""

    task_id: int
    elements: int
    bytes: int
    """Of the elements, as they are sent."""
    buffered_batches: int = 0
    """Portions that are made, and that no client has asked for."""
    buffered_bytes: int = 0
    waiting_for: str = ""
    """What production stands still for now; empty: it goes on."""
    client_wait_seconds: float = 0.0
    split_wait_seconds: float = 0.0
    """Seconds, with the wait that goes on."""
    steps: tuple[StepSeconds, ...] = ()
    trainers: tuple[TrainerActivity, ...] = ()
    """Where each of several trainers reads all of its elements."""
