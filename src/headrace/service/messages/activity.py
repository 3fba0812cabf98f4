"""Activity counters in the heartbeats of workers and clients.

All numbers are totals since the task or the reading started, so lost and repeated messages do no
harm.
"""

from __future__ import annotations

from headrace.serving.rpc import Message

__all__ = [
    "WAITING_FOR_CLIENTS",
    "WAITING_FOR_SPLITS",
    "StepSeconds",
    "TaskActivity",
    "TrainerActivity",
]

WAITING_FOR_CLIENTS = "clients"
WAITING_FOR_SPLITS = "splits"
"""Values of `TaskActivity.waiting_for`: production waits for clients that request elements, or for
splits."""


class StepSeconds(Message, frozen=True):
    """Time that threads of a worker spent in one step of a dataset, measured by sampling."""

    step: str
    """Name of the step, and where the user wrote it: "map at train.py:12"."""
    seconds: float
    position: int = -1
    """Number of the step in the plan, inputs first; -1 if unknown."""
    threads: int = 0
    """Number of threads that call its function; 0 for steps without such threads."""


class TrainerActivity(Message, frozen=True):
    """Progress of one of the trainers that share a task."""

    trainer_id: str
    delivered: int
    """Number of elements sent to it."""
    skipped: int = 0
    """Number of elements that were evicted before it requested them."""
    lag: int = 0
    """Number of elements that are produced and not yet sent to it."""


class TaskActivity(Message, frozen=True):
    """Activity of a worker for one task."""

    task_id: int
    elements: int
    bytes: int
    """Size of the elements as they are sent."""
    buffered_batches: int = 0
    """Number of result batches that no client has requested yet."""
    buffered_bytes: int = 0
    waiting_for: str = ""
    """What production waits for now; empty if it does not wait."""
    client_wait_seconds: float = 0.0
    split_wait_seconds: float = 0.0
    """Total seconds waited, including a wait in progress."""
    steps: tuple[StepSeconds, ...] = ()
    trainers: tuple[TrainerActivity, ...] = ()
    """Progress of each trainer, if several trainers read all elements of the task."""
