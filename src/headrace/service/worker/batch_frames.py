"""Frames of a result batch: the requested rows, in memory that the receiver may own."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.element import wire
from headrace.service.worker.result_batch import ResultBatch
from headrace.transport.channel import Buffer

__all__ = ["batch_frame"]


def batch_frame(batch: ResultBatch) -> Sequence[Buffer]:
    """Return the buffers of a batch's elements, without other rows of the same chunk."""
    buffers = batch.buffers
    if batch.row_range is not None:
        buffers = wire.encode(wire.decode(buffers).slice(*batch.row_range))
    if batch.is_shared:
        # A client in this process uses writable memory directly, and copies read-only memory.
        buffers = [memoryview(buffer).toreadonly() for buffer in buffers]
    return buffers
