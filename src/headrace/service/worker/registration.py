"""Registration: who the worker is to the dispatcher, and when it says that it is alive.

Rule 1. Each registration is under a new id. It is over when the dispatcher does not know the id any
        more, or when it is another one: a dispatcher without a journal that was restarted.
Rule 2. A heartbeat follows each answer to the last one after an interval, which the dispatcher
        wishes unless the worker's configuration does: a longer one where there are many workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.service.messages import (
    RegisterWorker,
    RegisterWorkerReply,
    TaskActivity,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)

__all__ = ["Registration"]

_AGAIN_SECONDS = 1.0


class Registration:
    """How a worker is registered.

    Args:
        address: Where clients reach it.
        tags: See `WorkerConfig.worker_tags`.
        new_id: Returns another id each time.
        interval: Seconds between heartbeats; None: what the dispatcher wishes.
    """

    def __init__(
        self,
        address: str,
        tags: tuple[str, ...],
        new_id: Callable[[], str],
        interval: float | None,
    ) -> None:
        self._address = address
        self._tags = tags
        self._new_id = new_id
        self._wished = interval
        self._interval = 1.0
        self._incarnation = ""
        self.worker_id = ""
        self.is_registered = False
        self.was_ever = False
        """Whether a dispatcher has ever taken this worker."""
        self.due_at = math.inf
        """When the next heartbeat is due, or the next try to register."""

    def begin(self) -> RegisterWorker:
        """Register under a new id; return what to say."""
        self.worker_id = self._new_id()
        self.is_registered, self.due_at = False, math.inf
        return RegisterWorker(worker_id=self.worker_id, address=self._address, tags=self._tags)

    def registered(self, answer: RegisterWorkerReply, now: float) -> None:
        """Take note that the dispatcher has taken the worker."""
        self.is_registered = self.was_ever = True
        self._incarnation = answer.dispatcher_id
        self._interval = answer.heartbeat_interval if self._wished is None else self._wished
        self.due_at = now + self._interval

    def refused(self, now: float) -> None:
        """Take note that the dispatcher has not taken the worker; it may the next time."""
        self.due_at = now + _AGAIN_SECONDS

    def beat(
        self, running: tuple[int, ...], activity: tuple[TaskActivity, ...] = ()
    ) -> WorkerHeartbeat:
        """Return a heartbeat; the next one is due after its answer."""
        self.due_at = math.inf
        return WorkerHeartbeat(worker_id=self.worker_id, tasks=running, activity=activity)

    def beaten(self, answer: WorkerHeartbeatReply | Exception, now: float) -> None:
        """Take note that a heartbeat was answered."""
        if (
            isinstance(answer, WorkerHeartbeatReply)
            and answer.heartbeat_interval
            and self._wished is None
        ):
            self._interval = answer.heartbeat_interval
        self.due_at = now + self._interval

    def is_known_to(self, update: WorkerHeartbeatReply) -> bool:
        """Whether the dispatcher that answered is the one that took the worker."""
        return update.dispatcher_id in ("", self._incarnation)
