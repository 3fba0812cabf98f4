"""What a client's session wants done: requests to workers, calls to the dispatcher, warnings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.element.packing import unpack
from headrace.errors import HeadraceError
from headrace.service.client.failure import came_from
from headrace.service.messages import DispatcherRequest, GetElements, GetElementsReply, TaskAddress

__all__ = ["Actions", "Ask", "Delivery", "content_of"]


class Ask(NamedTuple):
    """A request to send to a task's worker."""

    task: TaskAddress
    number: int
    message: GetElements


@dataclass(frozen=True)
class Delivery:
    """An answer whose turn has come, for the consumer."""

    task: TaskAddress
    number: int
    count: int
    payload: Any
    """What the shell gave with the answer, or an error to raise."""
    answer: GetElementsReply | None = None
    """What the worker said; None: an error about the request."""


@dataclass
class Actions:
    """What is to be done now."""

    asks: list[Ask] = field(default_factory=list)
    calls: list[DispatcherRequest] = field(default_factory=list)
    """Requests to the dispatcher; each may be repeated."""
    drops: list[int] = field(default_factory=list)
    """Tasks whose connection is no longer needed."""
    warnings: list[str] = field(default_factory=list)
    wake_in: float = math.inf
    """Seconds after which to act again, if nothing happens before."""

    def wake_within(self, seconds: float) -> None:
        """Act again after so many seconds, or before."""
        self.wake_in = min(self.wake_in, seconds)


# --- what came with an answer: elements, or what went wrong ---------------------------------------


def content_of(delivery: Delivery) -> Chunk | Exception:
    """Return the elements of a delivery, or the error that came in their place."""
    if isinstance(delivery.payload, Exception):
        return came_from(delivery.task.worker_address, delivery.payload)
    try:
        return wire.decode(unpack(delivery.payload))
    except HeadraceError as error:
        return came_from(delivery.task.worker_address, error)
