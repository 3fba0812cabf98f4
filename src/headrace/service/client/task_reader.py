"""Reading of one task: its requests and replies, and whether its worker responds."""

from __future__ import annotations

from typing import Any

from headrace.errors import UnavailableError
from headrace.service.client.delivery_record import DeliveryRecord
from headrace.service.messages import GetElementsReply, TaskAddress
from headrace.serving.request_window import RequestWindow
from headrace.waiting import Backoff

__all__ = ["TaskReader"]

_RETRY_SECONDS = 0.1


class TaskReader:
    """State of a task that is being read.

    Args:
        address: Address of the task.
    """

    def __init__(self, address: TaskAddress) -> None:
        self.address = address
        self.window: RequestWindow[tuple[GetElementsReply | None, Any]] = RequestWindow()
        #: Numbers of the requests to send or resend, in order.
        self.unsent: list[int] = []
        #: How often a request was repeated while the original waits at the worker. The worker
        #: replies to the original with an AbortedError.
        self._repeated: dict[int, int] = {}
        #: The worker has sent everything it had and waits until that is consumed.
        self.is_draining = False
        #: The worker reported the end; replies to other requests may be in flight.
        self.is_ending = False
        #: Replies that were delivered to the consumer and are not consumed.
        self.unconsumed: dict[int, GetElementsReply] = {}
        self.received_record: DeliveryRecord = DeliveryRecord()
        #: Elements that the consumer has consumed.
        self.consumed_record: DeliveryRecord = DeliveryRecord()
        #: When the last request was sent, and the last reply number that it acknowledged.
        self.sent_at: float = 0.0
        self.acknowledged_to: int = 0
        #: Earliest time of the next request; 0.0 for no limit.
        self.retry_at: float = 0.0
        self._backoff = Backoff(0.02, longest=1.0)
        #: Error of the lost connection, until the worker responds again; otherwise empty.
        self.connection_error: str = ""
        #: When the connection was lost, without pauses of this process.
        self.disconnected_at: float = 0.0
        #: Whether the worker's address refuses connections.
        self.is_refused: bool = False

    @property
    def has_unsent_acknowledgement(self) -> bool:
        """Whether replies were consumed that no request in flight acknowledges."""
        window = self.window
        return (
            bool(window.num_unanswered)
            and not self.unconsumed
            and window.acknowledged > self.acknowledged_to
        )

    @property
    def can_request_more(self) -> bool:
        """Whether another request can help; a draining worker needs only one."""
        return not (self.is_draining and self.window.num_outstanding)

    # --- requests ---------------------------------------------------------------------------------

    def new_request(self) -> int:
        """Return the number of a new request to send."""
        number = self.window.allocate()
        self.unsent.append(number)
        return number

    def repeat_last(self) -> None:
        """Repeat the last request, which waits at the worker, to acknowledge consumed replies."""
        number = self.window.numbers_to_resend()[-1]
        self._repeated[number] = self._repeated.get(number, 0) + 1
        self.unsent.append(number)

    def take_unsent(self, now: float) -> list[int]:
        """Return the requests to send now, which count as sent.

        Each request acknowledges consumed replies.
        """
        # A delayed request that was in flight twice may have been answered since.
        numbers = [number for number in self.unsent if self.window.is_unanswered(number)]
        self.unsent = []
        if numbers:
            self.sent_at, self.acknowledged_to = now, self.window.acknowledged
        return numbers

    # --- worker -----------------------------------------------------------------------------------

    def worker_responded(self) -> None:
        """Record that the worker responded."""
        if self.connection_error:
            self.retry_at = 0.0
        self._backoff.reset()
        self.connection_error = ""

    def request_aborted(self, number: int, now: float) -> None:
        """Record that the worker aborted a request, or the original of a repeated request."""
        num_repeats = self._repeated.pop(number, 0)
        if num_repeats > 1:
            self._repeated[number] = num_repeats - 1
        if not num_repeats and self.window.is_unanswered(number):
            self.retry_later(number, now)

    def retry_later(self, number: int, now: float) -> None:
        """Resend a request after a short delay, because the worker cannot answer now."""
        self.unsent.append(number)
        self.retry_at = now + _RETRY_SECONDS

    def disconnected(self, error: UnavailableError, now: float) -> None:
        """Record that the connection was lost or could not be opened."""
        if not self.connection_error:
            self.connection_error, self.disconnected_at = str(error), now
        self.is_refused = bool(getattr(error, "refused", False))
        self.unsent = []
        self._repeated.clear()
        self.retry_at = now + next(self._backoff)

    def resume(self) -> None:
        """End the delay of `retry_at`; after a lost connection, resend all unanswered requests."""
        if self.retry_at:
            self.retry_at = 0.0
            if self.connection_error:
                self.unsent = self.window.numbers_to_resend()

    # --- replies ----------------------------------------------------------------------------------

    def accept(self, number: int, reply: GetElementsReply) -> bool:
        """Accept the next reply in order; return whether it has something for the consumer."""
        self.received_record.add_reply(reply)
        self._repeated.pop(number, None)
        is_empty = reply.end_of_task or not (reply.num_elements or reply.error)
        if is_empty or not self.window.record_elements(reply.first_element, reply.num_elements):
            return False
        self.unconsumed[number] = reply
        return True

    def consume(self, number: int) -> None:
        """Record that a reply was consumed completely."""
        reply = self.unconsumed.get(number)
        if reply is not None:
            # In this order, so that an interrupt may repeat a reply but not lose one.
            self.consumed_record.add_reply(reply)
            self.unconsumed.pop(number, None)
        self.window.mark_consumed(number)
