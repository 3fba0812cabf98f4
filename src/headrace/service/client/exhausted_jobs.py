"""Distinction between a reader that opens an epoch late and one whose job is exhausted."""

from __future__ import annotations

import logging

from headrace.errors import FailedPreconditionError
from headrace.plan.iteration_counter import IterationCounter
from headrace.service.epochs import format_epoch
from headrace.service.messages import OpenIteration, OpenIterationReply

__all__ = ["ExhaustedJobCheck"]

_log = logging.getLogger(__name__)


class ExhaustedJobCheck:
    """State of the job read by one result of `distribute`.

    A job is exhausted for a reader whose first epoch has no elements left while no other client
    reads the job: it was restarted under the old name, and would train on nothing. A reader that
    received elements of the job before, or reads together with others, has only opened late.

    Args:
        counter: Numbers the iterations; None if the job is not shared.
    """

    def __init__(self, counter: IterationCounter | None = None) -> None:
        self._counter = counter
        #: Number of the iteration opened last, and why it had no elements; "" if it had some.
        self._latest = (0, "")
        #: Message to use if the iteration ends without an element; "" for none.
        self._message_if_empty = ""
        #: Whether an element proves that the job is not exhausted; not so after a restored
        #: position.
        self._expects_elements = False

    def iteration_opened(self, open_request: OpenIteration, reply: OpenIterationReply) -> None:
        """Handle the dispatcher's reply; log why the iteration has no elements.

        Raises:
            FailedPreconditionError: If the iterator was restored to the start of an iteration whose
                elements were partly delivered to clients that have left.
        """
        epoch = open_request.epoch
        is_restored = self._counter is not None and self._counter.take_restored(epoch[0])
        if (
            is_restored
            and reply.opened_by
            and not (open_request.start_position_id or reply.has_other_readers)
        ):
            raise FailedPreconditionError(
                f"cannot restore the start of epoch {epoch[0]} of job {reply.job_name!r}: "
                f"{reply.opened_by} has already read a part of it. Use another job_name to read "
                "the whole epoch"
            )
        self._latest, self._message_if_empty = (epoch[0], ""), ""
        self._expects_elements = not open_request.start_position_id
        read_by = reply.finished_by if reply.finished else reply.opened_by
        if not read_by or not reply.job_name:
            return
        message = (
            f"job {reply.job_name!r}, {format_epoch(epoch)}: no elements left, already read by "
            f"{read_by}; each epoch of a job is delivered once"
        )
        has_joined = self._counter is not None and self._counter.has_joined
        if not (reply.has_other_readers or has_joined or open_request.start_position_id):
            self._message_if_empty = f"{message}. Use another job_name to read the data again"
        elif reply.finished:
            _log.warning("%s", message)
        if reply.finished:
            self.iteration_ended()

    def element_received(self) -> None:
        """Record that the iteration had elements. Cheap."""
        if self._expects_elements and self._counter is not None:
            self._counter.note_joined()
        self._message_if_empty, self._expects_elements = "", False

    def iteration_ended(self) -> None:
        """Record the end of the iteration; without an element, its job may be exhausted."""
        if self._message_if_empty:
            self._latest = (self._latest[0], self._message_if_empty)
            _log.error("%s", self._message_if_empty)
        self._message_if_empty = ""

    def exhausted_message(self, number: int) -> str:
        """Return why iteration `number` found its job exhausted; "" if it did not."""
        latest, message = self._latest
        return message if latest == number else ""
