"""How a worker leaves: what lives on when its member is dropped."""

from __future__ import annotations

import contextlib
import threading

from headrace.distribute.meeting.messages import Leave
from headrace.errors import HeadraceError
from headrace.transport.channel import Channel

__all__ = ["End"]

_LOCK_SECONDS = 1.0


class End:
    """Leaves: what waits hears it.

    Args:
        channel: Leads to the place.
        rank: Of the worker.
        incarnation: Of its member.
    """

    def __init__(self, channel: Channel, rank: int, incarnation: str) -> None:
        self._channel, self._rank, self._incarnation = channel, rank, incarnation
        #: Which hall it is, once that is known.
        self.hall = ""
        #: Held by whoever uses the channel. Who has it may take it again: a finalizer calls
        #: `close`, in the middle of anything.
        self.lock = threading.RLock()
        self.is_closed = False

    def close(self) -> None:
        """Leave; the others are told if they wait. May be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        # A thread that waits may have the lock, and the program is to end all the same.
        if not self.lock.acquire(timeout=_LOCK_SECONDS):
            return
        try:
            # Where nobody is there any more, there is nobody to be told.
            with contextlib.suppress(HeadraceError, OSError):
                self._channel.send(
                    Leave(hall=self.hall, rank=self._rank, incarnation=self._incarnation)
                )
            self._channel.close()
        finally:
            self.lock.release()
