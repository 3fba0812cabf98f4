"""The contract of a channel: calls between two peers, whatever carries them.

A *message* is a tagged `msgspec.Struct`; it may travel with *buffers*, raw memory that no hop
copies unless it has to. Three carriers keep this contract: `inprocess` (same process), `zeromq`
(sockets), and `zeromq` with `shared_memory` under it (same host).

Rule 1. A channel belongs to one thread at a time; a server's `Request` may be answered from any.
Rule 2. Every request is answered exactly once: by `reply` or by `fail`.
Rule 3. A request that was sent is either answered, or `receive` raises `UnavailableError` because
        the peer is gone. The channel never waits for a peer that is not alive, and never resends
        on its own: only the caller knows whether a request may be repeated.
Rule 4. What is under way is bounded by the caller: a server sends buffers only in answer to a
        request, so the number of unanswered requests is the sender's credit. A server drops
        answers beyond a bound, with an `UnavailableError` in their place.
Rule 5. Channels and servers belong to the process that made them. A forked child gets
        `FailedPreconditionError` from those of its parent, and makes its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

__all__ = ["Buffer", "Channel", "Handler", "Reply", "Request", "TransportServer"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Raw memory. Buffers received from a peer are writable memoryviews, aligned to 64 bytes when they
are 64 bytes or longer and came through shared memory. A buffer that was given to `send` or `reply`
must not change afterwards, and what is writable is given away: peers in one process get that very
memory. Give a read-only view (`memoryview.toreadonly`) of what is kept, as of a cache."""


class Reply(NamedTuple):
    """What came back for one request."""

    request_id: int
    """The number that `Channel.send` returned for the request."""
    message: msgspec.Struct | Exception
    """The answer, or the error that the peer's handler answered with."""
    buffers: Sequence[Buffer]
    """Raw memory that came with it, valid for as long as any view of it is held."""


class Channel(ABC):
    """The calling end of a connection to one server."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the peer listens, as "host:port"."""

    @abstractmethod
    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        """Send a request without waiting; return its ticket."""

    @abstractmethod
    def receive(self, timeout: float) -> Reply | None:
        """Return the next answer to any unanswered request, or None when `timeout` seconds passed.

        Raises:
            UnavailableError: The peer is gone (`num_refused` is true), or has been silent for as
                long as this channel waits. All unanswered requests are forgotten; the channel
                connects again by itself on the next `send`.
            UnauthenticatedError: The peer did not let this channel in; otherwise the same.
        """

    @abstractmethod
    def call(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, timeout: float
    ) -> tuple[msgspec.Struct, Sequence[Buffer]]:
        """Send a request and wait for its answer; no other request may be unanswered.

        Raises:
            DeadlineExceededError: No answer in `timeout` seconds (an answer that comes later is
                dropped).
            UnavailableError: The peer cannot be reached, or is gone.
            HeadraceError: What the peer's handler answered with.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; unanswered requests are forgotten. May be called twice."""

    # --- for an `ChannelPoller`, which waits on many channels
    # ---------------------------------------

    @property
    @abstractmethod
    def has_pending(self) -> bool:
        """Whether `receive` would return or raise at once, whatever its sockets say."""

    @abstractmethod
    def sockets(self) -> Sequence[Any]:
        """Return the ZeroMQ sockets that become readable when something arrives, if any."""

    @abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        """Have `wakeup` called, on any thread, when something arrives but not by a socket."""


class Request(ABC):
    """One request as the server's handler sees it."""

    message: msgspec.Struct
    buffers: Sequence[Buffer]
    peer: str
    """Who asks: stable for the life of the peer's channel."""
    role: Literal["worker", "client"] | None
    """What the peer's key says it is; None where the server checks no keys, and for peers in the
    server's own process."""

    def allocate(self, size: int) -> memoryview | None:
        """Return memory in which to make a buffer of that size; None: there is none.

        What is made there is sent without a copy, if it is the first that `reply` gets and what
        goes with it is small. It must not be written, or read, after it.
        """
        return None

    @abstractmethod
    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        """Answer, from any thread; does not block. Does nothing once the server is closed.

        Args:
            message: The answer.
            buffers: What goes with it.
            borrowed: Whether the buffers may change as soon as this returns. Those that went into
                shared memory were copied anyway; the others are copied here.
        """

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Answer with an error; one of `headrace.errors` arrives as the same class."""


Handler: TypeAlias = Callable[[Sequence[Request]], None]
"""Called on the server's one thread with all requests in hand, in order of arrival. Must not block;
what takes time is answered later, from another thread. An exception fails the whole batch."""


class TransportServer(ABC):
    """The answering end: an address, one thread, one handler."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where it listens, as "host:port"."""

    @property
    def num_refused(self) -> int:
        """How many connections ended before they began: wrong keys, or no words of ours."""
        return 0

    def is_connected(self, peer: str) -> bool:
        """Whether a peer (`Request.peer`) that has asked something is still connected."""
        return False

    def seconds_since_data(self, peer: str) -> float | None:
        """Return the seconds since anything arrived from a peer's process, pings included.

        None: the peer is not connected, or this system does not tell.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop listening and join the thread. May be called twice."""
