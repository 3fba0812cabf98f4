"""Delivery of a task that writes its elements to files, and has no clients.

A delivery policy (`worker.delivery_policy`) in which files take the place of replies: a result
batch names finished files, which are reported to the dispatcher until it confirms them, one batch
after the other.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from headrace.errors import FailedPreconditionError
from headrace.service.messages import GetElements, SavedFile
from headrace.service.ranges import Ranges, first_n
from headrace.service.worker.delivery_policy import (
    BufferLimits,
    DeliveryPolicy,
    DepartedClientOutput,
    UndeliveredOutput,
)
from headrace.service.worker.result_batch import BatchReply, ResultBatch

__all__ = ["FileDelivery"]

R = TypeVar("R")

_MAX_UNREPORTED = 3


class FileDelivery(DeliveryPolicy[R]):
    """Tracks finished files, and those that the dispatcher has confirmed.

    Args:
        limits: Unused, since written elements take no memory.
    """

    def __init__(self, limits: BufferLimits | None = None) -> None:
        #: Unconfirmed reports: files, and the number of splits that are done with them.
        self._unreported: deque[tuple[tuple[SavedFile, ...], int]] = deque()
        self._report_number = 0
        self._num_done = 0
        #: Number of splits that are done with all reports so far, sent or queued.
        self._num_written = 0
        self._exhausted = False

    # --- state ----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether more may be written."""
        return len(self._unreported) < _MAX_UNREPORTED

    @property
    def completed_splits(self) -> Ranges:
        """Splits, in assignment order, that are in committed files."""
        return first_n(self._num_done)

    @property
    def can_finish(self) -> bool:
        """Whether the dispatcher has confirmed everything."""
        return self._exhausted and not self._unreported

    @property
    def is_fully_acknowledged(self) -> bool:
        """Whether the dispatcher has confirmed everything."""
        return self.can_finish

    @property
    def unreported_files(self) -> tuple[int, tuple[SavedFile, ...], int] | None:
        """Next report: its number, the files, and the number of splits done with them."""
        return (self._report_number, *self._unreported[0]) if self._unreported else None

    # --- inputs ---------------------------------------------------------------------------------

    def add_batch(self, batch: ResultBatch) -> list[tuple[R, BatchReply]]:
        """Queue a report of finished files."""
        self._queue_report(batch.files, batch.done_to)
        return []

    def note_exhausted(self, splits: int = 0) -> list[tuple[R, BatchReply]]:
        """Record that no result batch will follow; `splits` splits are then complete."""
        self._exhausted = True
        if splits > self._num_written:
            self._queue_report((), splits)
        return []

    def _queue_report(self, files: tuple[SavedFile, ...], num_done: int) -> None:
        self._num_written = max(self._num_written, num_done)
        self._unreported.append((files, self._num_written))

    def files_reported(self, number: int) -> None:
        """Record that the dispatcher has confirmed a report."""
        if self._unreported and number == self._report_number:
            self._report_number += 1
            _, self._num_done = self._unreported.popleft()

    def cancel(self, refusal: Exception) -> tuple[list[tuple[R, BatchReply]], UndeliveredOutput]:
        """Drop all reports."""
        self._unreported.clear()
        return [], UndeliveredOutput(
            elements=0, unacknowledged=0, delivered_splits=first_n(self._num_written)
        )

    # --- clients (none) -------------------------------------------------------------------------

    def request_received(
        self, request: R, message: GetElements, now: float
    ) -> list[tuple[R, BatchReply]]:
        """Reject a client's request."""
        error = FailedPreconditionError(f"task {message.task_id} writes files and has no clients")
        return [(request, error)]

    def note_finished(self) -> list[tuple[R, BatchReply]]:
        """Do nothing: no client waits for the end."""
        return []

    def remove_client(
        self, client_id: str
    ) -> tuple[list[tuple[R, BatchReply]], DepartedClientOutput]:
        """Return an empty result: clients received nothing."""
        return [], DepartedClientOutput(unacknowledged=(), possibly_lost=())

    def forget_client(self, client_id: str) -> list[tuple[R, BatchReply]]:
        """Do nothing: clients received nothing."""
        return []

    def drop_expired(self, now: float) -> tuple[list[tuple[R, BatchReply]], int]:
        """Return an empty result: clients received nothing."""
        return [], 0
