"""Base of all channels: tracking of unanswered requests, and checks of use."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from headrace.errors import DeadlineExceededError, FailedPreconditionError
from headrace.forks import register_fork_sensitive
from headrace.transport.channel import Buffer, Channel

__all__ = ["RequestTrackingChannel"]


class RequestTrackingChannel(Channel):
    """The part of a channel that does not depend on its transport.

    Args:
        address: Address of the server, as "host:port".
    """

    def __init__(self, address: str) -> None:
        self._address = address
        #: Ids of requests that were sent and have no reply.
        self._unanswered: set[int] = set()
        self._closed = False
        self._forked = False
        self._process = os.getpid()
        register_fork_sensitive(self)

    @property
    def address(self) -> str:
        return self._address

    def after_fork_in_child(self) -> None:
        """Reject further use, in a newly forked process."""
        self._forked = True

    def _check_usable(self) -> None:
        if self._closed:
            raise FailedPreconditionError(f"the channel to {self._address} is closed")
        if self._forked:
            raise FailedPreconditionError(
                f"the channel to {self._address} was opened before a fork and belongs to "
                "the parent process; open another one in this process"
            )

    def call(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, timeout: float
    ) -> tuple[msgspec.Struct, Sequence[Buffer]]:
        self._check_usable()
        if self._unanswered:
            raise FailedPreconditionError(
                f"call() requires that no other request is pending, but {len(self._unanswered)} are"
            )
        request_id = self.send(message, buffers)
        reply = self.receive(timeout)
        if reply is None:
            self._unanswered.discard(request_id)
            raise DeadlineExceededError(
                f"{self._address} did not reply to {type(message).__name__} within {timeout:g} s"
            )
        if isinstance(reply.message, Exception):
            raise reply.message
        return reply.message, reply.buffers
