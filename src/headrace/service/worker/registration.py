"""Registration of the worker with the dispatcher, and its heartbeats.

Rule 1. Each registration uses a new id. It ends when the dispatcher no longer knows the id, or when
    the dispatcher is a different one, restarted without a journal.
Rule 2. The next heartbeat follows the reply to the last one after an interval. The worker's
    configuration sets the interval; otherwise the dispatcher does, longer if there are many
    workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from headrace.service.messages import (
    RegisterWorker,
    RegisterWorkerReply,
    TaskActivity,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)

__all__ = ["ProcessorUse", "Registration"]

_RETRY_SECONDS = 1.0


class ProcessorUse(NamedTuple):
    """Processor use of a process.

    Attributes:
        cores: Cores that it may use; 0.0 if unknown.
        cpu_seconds: Processor time since its start, summed over threads.
        machine_cpu_seconds: Processor time of all programs on these cores; 0.0 if unknown.
    """

    cores: float = 0.0
    cpu_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0


_UNKNOWN_USE = ProcessorUse()


class Registration:
    """State of a worker's registration.

    Args:
        address: Address at which clients reach the worker.
        tags: See `WorkerConfig.worker_tags`.
        new_id: Returns a new id on each call.
        interval: Seconds between heartbeats; None lets the dispatcher decide.
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
        self._configured_interval = interval
        self._interval = 1.0
        self._dispatcher_id = ""
        self.worker_id: str = ""
        self.is_registered: bool = False
        self.was_ever_registered: bool = False
        """Whether a dispatcher has ever accepted this worker."""
        self.due_at: float = math.inf
        """Time of the next heartbeat or registration attempt."""

    def start(self) -> RegisterWorker:
        """Start a registration under a new id; return the request."""
        self.worker_id = self._new_id()
        self.is_registered, self.due_at = False, math.inf
        return RegisterWorker(worker_id=self.worker_id, address=self._address, tags=self._tags)

    def accepted_by_dispatcher(self, reply: RegisterWorkerReply, now: float) -> None:
        """Record that the dispatcher accepted the worker."""
        self.is_registered = self.was_ever_registered = True
        self._dispatcher_id = reply.dispatcher_id
        self._interval = (
            reply.heartbeat_interval
            if self._configured_interval is None
            else self._configured_interval
        )
        self.due_at = now + self._interval

    def rejected_by_dispatcher(self, now: float) -> None:
        """Record that the dispatcher rejected the worker; it may accept it later."""
        self.due_at = now + _RETRY_SECONDS

    def make_heartbeat(
        self,
        running: tuple[int, ...],
        activity: tuple[TaskActivity, ...] = (),
        processor_use: ProcessorUse = _UNKNOWN_USE,
    ) -> WorkerHeartbeat:
        """Return a heartbeat; the next one is due after its reply."""
        self.due_at = math.inf
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            tasks=running,
            activity=activity,
            cores=processor_use.cores,
            cpu_seconds=processor_use.cpu_seconds,
            machine_cpu_seconds=processor_use.machine_cpu_seconds,
        )

    def heartbeat_answered(self, reply: WorkerHeartbeatReply | Exception, now: float) -> None:
        """Record the reply to a heartbeat."""
        if (
            isinstance(reply, WorkerHeartbeatReply)
            and reply.heartbeat_interval
            and self._configured_interval is None
        ):
            self._interval = reply.heartbeat_interval
        self.due_at = now + self._interval

    def matches_dispatcher(self, update: WorkerHeartbeatReply) -> bool:
        """Return whether the reply is from the dispatcher that accepted the worker."""
        return update.dispatcher_id in ("", self._dispatcher_id)
