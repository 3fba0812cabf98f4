"""What the calling ends of all carriers share: which requests are open, and who may use them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from headrace.errors import DeadlineExceededError, FailedPreconditionError
from headrace.forks import stays_with_parent
from headrace.transport.channel import Buffer, Channel

__all__ = ["RequestTrackingChannel"]


class RequestTrackingChannel(Channel):
    """A channel, as far as its carrier does not matter.

    Args:
        address: Where the peer listens, as "host:port".
    """

    def __init__(self, address: str) -> None:
        self._address = address
        #: Tickets of requests that were sent and have no answer.
        self._unanswered: set[int] = set()
        self._closed = False
        self._forked = False
        self._process = os.getpid()
        stays_with_parent(self)

    @property
    def address(self) -> str:
        return self._address

    def leave_to_parent(self) -> None:
        """Refuse further use, in a process that was just forked."""
        self._forked = True

    def _check_usable(self) -> None:
        if self._closed:
            raise FailedPreconditionError(f"the channel to {self._address} is closed")
        if self._forked:
            raise FailedPreconditionError(
                f"the channel to {self._address} was opened before a fork; it belongs to the "
                "process that opened it: open another one in this process"
            )

    def call(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, timeout: float
    ) -> tuple[msgspec.Struct, Sequence[Buffer]]:
        self._check_usable()
        if self._unanswered:
            raise FailedPreconditionError(
                f"call() while {len(self._unanswered)} earlier requests are unanswered"
            )
        ticket = self.send(message, buffers)
        reply = self.receive(timeout)
        if reply is None:
            self._unanswered.discard(ticket)
            raise DeadlineExceededError(
                f"{self._address} did not answer {type(message).__name__} in {timeout:g} s"
            )
        if isinstance(reply.message, Exception):
            raise reply.message
        return reply.message, reply.buffers
