"""Actions of a client's session: requests to workers, calls to the dispatcher, warnings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.element.frame_compression import decompress_frame
from headrace.errors import HeadraceError
from headrace.service.client.worker_errors import add_worker_address
from headrace.service.messages import DispatcherRequest, GetElements, GetElementsReply, TaskAddress

__all__ = ["ClientActions", "ReceivedBatch", "TaskRequest", "decode_batch"]


class TaskRequest(NamedTuple):
    """Request to send to the worker of a task."""

    task: TaskAddress
    request_number: int
    message: GetElements


@dataclass(frozen=True)
class ReceivedBatch:
    """Reply of a worker, to be delivered to the consumer."""

    task: TaskAddress
    request_number: int
    num_elements: int
    payload: Any
    """Data that the runner received with the reply, or an error to raise."""
    reply: GetElementsReply | None = None
    """The worker's reply; None for an error of the request."""


@dataclass
class ClientActions:
    """Actions to execute now."""

    requests: list[TaskRequest] = field(default_factory=list)
    calls: list[DispatcherRequest] = field(default_factory=list)
    """Requests to the dispatcher; all are idempotent."""
    disconnects: list[int] = field(default_factory=list)
    """Tasks whose connections are no longer needed."""
    warnings: list[str] = field(default_factory=list)
    wake_in: float = math.inf
    """Seconds after which to act again if nothing happens before."""

    def wake_within(self, seconds: float) -> None:
        """Act again within this many seconds."""
        self.wake_in = min(self.wake_in, seconds)


# --- contents of a reply: elements or an error ----------------------------------------------------


def decode_batch(batch: ReceivedBatch) -> Chunk | Exception:
    """Return the elements of a batch, or the error in their place."""
    if isinstance(batch.payload, Exception):
        return add_worker_address(batch.task.worker_address, batch.payload)
    try:
        return wire.decode(decompress_frame(batch.payload))
    except HeadraceError as error:
        return add_worker_address(batch.task.worker_address, error)
