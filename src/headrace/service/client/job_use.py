"""Tells a reader that comes too late for one epoch from one whose job is used up."""

from __future__ import annotations

import logging

from headrace.errors import FailedPreconditionError
from headrace.plan.iteration_counter import IterationCounter
from headrace.service.messages import OpenIteration, OpenIterationReply

__all__ = ["JobUse"]

_log = logging.getLogger(__name__)


class JobUse:
    """What one result of `distribute` found of the job that it reads.

    A job is used up for a reader whose first epoch has no elements left while no other client reads
    the job: it was restarted under the old name, and would train on nothing. A reader that had
    elements of the job before, or that others read beside, has only come late.

    Args:
        counter: Numbers the iterations; None: the job is not shared.
    """

    def __init__(self, counter: IterationCounter | None = None) -> None:
        self._counter = counter
        #: The number of the iteration that was opened last, and why it had nothing; "": it had.
        self._latest = (0, "")
        #: Why it had nothing, if it ends without an element; "": that says nothing.
        self._if_empty = ""
        #: Whether an element says that the job is not used up: a saved place says nothing of it.
        self._counts = False

    def opened(self, opening: OpenIteration, reply: OpenIterationReply) -> None:
        """Note what the dispatcher said of an iteration; log why it has no elements.

        Raises:
            FailedPreconditionError: The iterator was restored to the start of an iteration of
                which elements went to clients that have left.
        """
        number = opening.epoch
        is_restored = self._counter is not None and self._counter.take_restored(number[0])
        if (
            is_restored
            and reply.opened_by
            and not (opening.start_position_id or reply.has_other_readers)
        ):
            raise FailedPreconditionError(
                f"the state stands at the start of epoch {number[0]} of job {reply.job_name!r}, "
                f"which was begun by {reply.opened_by} and has elements left only in part. Use "
                "another job_name to read the whole epoch"
            )
        self._latest, self._if_empty = (number[0], ""), ""
        self._counts = not opening.start_position_id
        read_by = reply.finished_by if reply.finished else reply.opened_by
        if not read_by or not reply.job_name:
            return
        words = (
            f"job {reply.job_name!r} has no elements left for epoch {'.'.join(map(str, number))}: "
            f"it was read by {read_by}, and each epoch of a job is read once"
        )
        has_joined = self._counter is not None and self._counter.has_joined
        if not (reply.has_other_readers or has_joined or opening.start_position_id):
            self._if_empty = f"{words}. Use another job_name to read the data again"
        elif reply.finished:
            _log.warning("%s", words)
        if reply.finished:
            self.ended()

    def received(self) -> None:
        """Note that the iteration had elements. Cheap."""
        if self._counts and self._counter is not None:
            self._counter.note_joined()
        self._if_empty, self._counts = "", False

    def ended(self) -> None:
        """Note that the iteration is over; without an element, its job may be used up."""
        if self._if_empty:
            self._latest = (self._latest[0], self._if_empty)
            _log.error("%s", self._if_empty)
        self._if_empty = ""

    def used_up(self, number: int) -> str:
        """Return why iteration `number` found its job used up; "": it did not."""
        latest, words = self._latest
        return words if latest == number else ""
