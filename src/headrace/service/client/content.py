"""What came with an answer: elements, or what went wrong."""

from __future__ import annotations

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.element.packing import unpack
from headrace.errors import HeadraceError
from headrace.service.client.actions import Delivery
from headrace.service.client.failure import came_from

__all__ = ["content_of"]


def content_of(delivery: Delivery) -> Chunk | Exception:
    """Return the elements of a delivery, or the error that came in their place."""
    if isinstance(delivery.payload, Exception):
        return came_from(delivery.task.worker_address, delivery.payload)
    try:
        return wire.decode(unpack(delivery.payload))
    except HeadraceError as error:
        return came_from(delivery.task.worker_address, error)
