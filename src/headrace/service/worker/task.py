"""A task: the lock around its policy, the thread that produces, the units that it was dealt."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable

from headrace.errors import CancelledError, FailedPreconditionError
from headrace.execution.iterator import ElementIterator
from headrace.service.messages import GetElements, SplitGranted, TaskDefinition
from headrace.service.worker.answering import answer
from headrace.service.worker.first_come import Bounds, Departure, FirstCome, Left
from headrace.service.worker.portion import Answer, Portion
from headrace.service.worker.producer import Producer
from headrace.service.worker.unit_feed import UnitFeed
from headrace.transport.channel import Request

__all__ = ["Task", "wrong_ticket"]

_log = logging.getLogger(__name__)


class Task:
    """Produces one task's elements and hands them out.

    Args:
        definition: What the dispatcher says of it.
        open_plan: Makes the iterator over its elements from its feed, which is None where the plan
            is read whole. Called on the producing thread.
        ask: Asks the dispatcher for units: their number, how many are wanted, how many are done.
            None: the plan is read whole.
        report: Tells the dispatcher that the task is over, and why if it failed. Called on the
            producing thread; does not raise.
        over: Hears that the task is finished and everything acknowledged. May be called twice.
        bounds: How much may be kept.
    """

    def __init__(
        self,
        definition: TaskDefinition,
        open_plan: Callable[[UnitFeed | None], ElementIterator],
        ask: Callable[[int, int, int], SplitGranted] | None,
        report: Callable[[str | None], None],
        over: Callable[[], None],
        bounds: Bounds | None = None,
    ) -> None:
        self.task_id = definition.task_id
        self.ticket = definition.ticket
        self.is_dealt = ask is not None
        self._report = report
        self._over = over
        self._changed = threading.Condition()
        self._hand_out: FirstCome[Request] = FirstCome(bounds)
        self._closed = False
        #: Nothing more is to be produced, but what was is delivered.
        self._cut = False
        self._failed = False
        self._finished = False
        self._feed = None if ask is None else UnitFeed(lambda n, want: ask(n, want, self.done))
        feed = self._feed
        self._producer = Producer(
            f"task-{self.task_id}",
            lambda: open_plan(feed),
            self,
            counts_units=self.is_dealt,
            hurries=lambda: feed is not None and feed.is_alone,
        )

    def start(self) -> None:
        """Begin to produce.

        Raises:
            RuntimeError: The system has no thread left.
        """
        self._producer.start()

    @property
    def finished(self) -> bool:
        """Whether all elements were handed out, or the task failed."""
        return self._finished

    @property
    def done(self) -> int:
        """Number of units that were delivered and acknowledged."""
        with self._changed:
            return self._hand_out.done

    @property
    def is_settled(self) -> bool:
        """Whether the task is finished and everything acknowledged."""
        with self._changed:
            return self._finished and self._hand_out.is_settled

    # --- clients ----------------------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """Answer a `GetElements` now or later. Does not wait."""
        message = request.message
        assert isinstance(message, GetElements)
        if not hmac.compare_digest(message.ticket.encode(), self.ticket.encode()):
            request.fail(wrong_ticket(self.task_id))
            return
        with self._changed:
            answers = self._hand_out.ask(
                request, message.client_id, message.number, message.acknowledged, time.monotonic()
            )
            self._changed.notify_all()
        self._send(answers)

    def depart(self, client_id: str) -> Departure:
        """Give a client that is gone nothing more; return what it had not acknowledged."""
        with self._changed:
            answers, departure = self._hand_out.depart(client_id)
        self._send(answers)
        return departure

    def forget(self, client_id: str) -> None:
        """Forget what a client that is gone had not acknowledged: the dispatcher has heard it."""
        with self._changed:
            answers = self._hand_out.forget(client_id)
            self._changed.notify_all()
        self._send(answers)

    def forget_silent(self) -> None:
        """Drop what clients of a copy hold that were not heard of for long.

        Of dealt units nothing is dropped before the dispatcher says that a client is gone.
        """
        if self.is_dealt:
            return
        with self._changed:
            answers, lost = self._hand_out.forget_silent(time.monotonic())
            self._changed.notify_all()
        if lost:
            _log.warning(
                "task %d: %d elements were dropped: the client that they were sent to did not "
                "acknowledge them and was not heard of for long",
                self.task_id,
                lost,
            )
        self._send(answers)

    def _send(self, answers: list[tuple[Request, Answer]]) -> None:
        for request, content in answers:
            answer(request, content)
        if self.is_settled:
            self._over()

    # --- the worker -------------------------------------------------------------------------------

    def cut(self) -> None:
        """Take no more units, produce no more of a copy; deliver what there is."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()
        if self._feed is not None:
            self._feed.drain()

    def close(self, reason: Exception | None = None) -> Left:
        """Call the task off, without waiting for its thread; return what was not delivered.

        Args:
            reason: What its clients are to see; None: that it was deleted.
        """
        with self._changed:
            self._closed = True
            answers, left = self._hand_out.call_off(reason or self._deleted())
            self._changed.notify_all()
        if self._feed is not None:
            self._feed.close()
        for request, content in answers:
            answer(request, content)
        return left

    def units_to_hand_back(self, left: Left, timeout: float) -> tuple[tuple[int, int], ...]:
        """Return the units, in dealt order, of which nothing was given to anybody.

        Args:
            left: What `close` returned.
            timeout: Seconds to wait for a request for units that is under way.
        """
        if self._feed is None or self._failed:
            return ()
        self._feed.close(timeout)
        dealt = self._feed.dealt
        return ((left.units_from, dealt),) if left.units_from < dealt else ()

    def join(self, timeout: float) -> None:
        """Wait so many seconds for the thread."""
        self._producer.join(timeout)

    def _deleted(self) -> CancelledError:
        return CancelledError(
            f"task {self.task_id} has been deleted: its iteration was released, because its "
            "clients closed it or were not heard of for too long; iterate over the dataset again"
        )

    # --- the producer -----------------------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Wait until another portion may be made; False: nothing more is wanted."""
        with self._changed:
            while not self._is_enough() and not self._hand_out.has_room:
                self._changed.wait()
            return not self._is_enough()

    def _is_enough(self) -> bool:
        # A dealt task that is cut runs out by itself: its units are delivered.
        return self._closed or (self._cut and not self.is_dealt)

    def put(self, portion: Portion) -> None:
        """Take a portion."""
        with self._changed:
            answers = self._hand_out.add(portion)
        self._send(answers)

    def end(self, failure: str | None) -> None:
        """Take note that no portion will follow; finish when everything was handed out."""
        dealt = 0 if self._feed is None or failure is not None else self._feed.dealt
        with self._changed:
            self._failed = failure is not None
            answers = self._hand_out.exhaust(dealt)
        self._send(answers)
        with self._changed:
            while not self._hand_out.may_finish and not self._closed:
                self._changed.wait()
            if self._closed:
                return
        try:
            self._report(failure)
        finally:
            with self._changed:
                self._finished = True
                answers = self._hand_out.finish()
            self._send(answers)


def wrong_ticket(task_id: int) -> FailedPreconditionError:
    """Return the error for a request that does not show the task's ticket."""
    return FailedPreconditionError(
        f"the request shows another ticket than that of task {task_id} on this worker: it belongs "
        "to a reading that another incarnation of the dispatcher began (it was restarted without "
        "its journal), or to no reading of this service at all; iterate over the dataset again, "
        "and run the dispatcher with `fault_tolerant_mode` so that restarts are not noticed"
    )
