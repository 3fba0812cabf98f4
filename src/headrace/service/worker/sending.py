"""What of a portion is sent: the part that was asked for, in memory that its receiver may have."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.element import wire
from headrace.service.worker.portion import Portion
from headrace.transport.channel import Buffer

__all__ = ["frame_of"]


def frame_of(portion: Portion) -> Sequence[Buffer]:
    """Return the buffers of a portion's elements, and of no others that were made with them."""
    buffers = portion.buffers
    if portion.rows is not None:
        buffers = wire.encode(wire.decode(buffers).slice(*portion.rows))
    if portion.is_shared:
        # A client in this process gets writable memory as it is, and a copy of other memory.
        buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
    return buffers
