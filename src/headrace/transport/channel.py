"""Interface of channels and servers: requests and replies between two processes.

A *message* is a tagged `msgspec.Struct`; it may be sent with *buffers*, raw memory that is copied
only if necessary. Three transports implement this interface: `inprocess` (same process), `zeromq`
(sockets), and `zeromq` with `shared_memory` (same host).

Rule 1. A channel is used by one thread at a time; a server may answer a `Request` from any thread.
Rule 2. Every request is answered exactly once: by `reply` or by `fail`.
Rule 3. A request that was sent is either answered, or `receive` raises `UnavailableError` because
        the peer is lost. A channel never waits for a peer that is not alive, and never resends on
        its own: only the caller knows whether a request may be repeated.
Rule 4. The caller bounds the data in flight: a server sends buffers only in reply to a request, so
        the number of unanswered requests is its credit. A server drops replies beyond a limit, and
        sends an `UnavailableError` in their place.
Rule 5. Channels and servers belong to the process that created them. In a forked child, those of
        the parent raise `FailedPreconditionError`; the child must create its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

__all__ = ["Buffer", "Channel", "Handler", "Reply", "Request", "TransportServer"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Raw memory. Received buffers are writable memoryviews, aligned to 64 bytes if they are 64 bytes
or longer and came through shared memory. A buffer passed to `send` or `reply` must not change
afterwards, and a writable one is given away: peers in the same process get that very memory. Pass a
read-only view (`memoryview.toreadonly`) of memory that the sender keeps, such as a cache.
"""


class Reply(NamedTuple):
    """Reply to one request."""

    request_id: int
    """The number that `Channel.send` returned for the request."""
    message: msgspec.Struct | Exception
    """The reply, or the error of the peer's handler."""
    buffers: Sequence[Buffer]
    """Buffers of the reply, valid as long as any view of them is held."""


class Channel(ABC):
    """The client's end of a connection to one server."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address of the server, as "host:port"."""

    @abstractmethod
    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        """Send a request without waiting; return its request id."""

    @abstractmethod
    def receive(self, timeout: float) -> Reply | None:
        """Return the next reply to any unanswered request, or None after `timeout` seconds.

        Raises:
            UnavailableError: If the peer is lost (`refused` is then true) or was silent for longer
                than the channel's timeout. All unanswered requests are dropped; the channel
                reconnects on the next `send`.
            UnauthenticatedError: If the peer rejected this channel; otherwise the same.
        """

    @abstractmethod
    def call(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, timeout: float
    ) -> tuple[msgspec.Struct, Sequence[Buffer]]:
        """Send a request and wait for its reply; no other request may be unanswered.

        Raises:
            DeadlineExceededError: If there was no reply in `timeout` seconds; a later one is
                dropped.
            UnavailableError: If the peer is unreachable or lost.
            HeadraceError: The error of the peer's handler.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; unanswered requests are dropped. Idempotent."""

    # --- for a `ChannelPoller`, which waits on many channels --------------------------------------

    @property
    @abstractmethod
    def has_pending(self) -> bool:
        """Whether `receive` would return or raise at once, independently of its sockets."""

    @abstractmethod
    def sockets(self) -> Sequence[Any]:
        """Return the ZeroMQ sockets, if any, that become readable when something arrives."""

    @abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        """Set a function called, on any thread, when something arrives other than on a socket."""


class Request(ABC):
    """One request, as the server's handler sees it."""

    message: msgspec.Struct
    buffers: Sequence[Buffer]
    peer: str
    """Name of the peer's channel, constant for its lifetime."""
    role: Literal["worker", "client"] | None
    """Role that belongs to the peer's key; None if the server checks no keys, and for peers in the
    server's own process.
    """

    def allocate(self, size: int) -> memoryview | None:
        """Return memory in which to build a buffer of that size, or None.

        The buffer is sent without a copy if it is the first one passed to `reply` and the others
        are small. It must not be written or read after that.
        """
        return None

    @abstractmethod
    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        """Send the reply, from any thread, without blocking; does nothing if the server is closed.

        Args:
            message: The reply.
            buffers: Buffers of the reply.
            borrowed: Whether the buffers may change as soon as this returns. Those placed in shared
                memory were copied anyway; the others are copied here.
        """

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Reply with an error; a class of `headrace.errors` arrives as the same class."""


Handler: TypeAlias = Callable[[Sequence[Request]], None]
"""Called on the server's only thread with all pending requests, in arrival order. Must not block;
slow requests are answered later, from another thread. An exception fails the whole batch.
"""


class TransportServer(ABC):
    """The server's end: an address, one thread, one handler."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address of the server, as "host:port"."""

    @property
    def num_refused(self) -> int:
        """Number of connections that failed the handshake: wrong keys or a foreign protocol."""
        return 0

    def is_connected(self, peer: str) -> bool:
        """Return whether a peer (`Request.peer`) that sent a request is still connected."""
        return False

    def seconds_since_data(self, peer: str) -> float | None:
        """Return the seconds since data of any kind, including pings, arrived from a peer.

        None is returned if the peer is not connected, or the operating system does not support it.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop listening and join the thread. Idempotent."""
