"""Transport within one process: messages are passed by reference, through queues.

A writable buffer is passed on as it is; a read-only one is copied, because received buffers must be
writable and the sender keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, get_args

import msgspec

from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
    describe_error,
)
from headrace.transport.channel import Buffer, Channel, Handler, Reply, Request, TransportServer
from headrace.transport.envelope import copy_views, decode_error, encode_error, flat_views
from headrace.transport.request_tracking import RequestTrackingChannel

__all__ = ["connect", "is_in_process", "serve"]

_log = logging.getLogger(__name__)
_servers: dict[str, InProcessServer] = {}
_servers_lock = threading.Lock()
_numbers = itertools.count(1)


def serve(
    handler: Handler, *, request_type: Any, host: str = "inprocess", port: int = 0
) -> TransportServer:
    """Answer requests of this process with `handler`.

    Args:
        handler: See `channel.Handler`.
        request_type: Message types that it accepts: a `msgspec.Struct` class or a union of them.
        host: First half of the address; any name.
        port: Second half; 0 chooses a free number.

    Raises:
        OSError: If the address is in use.
    """
    with _servers_lock:
        if port == 0:
            port = next(n for n in _numbers if f"{host}:{n}" not in _servers)
        address = f"{host}:{port}"
        if address in _servers:
            raise OSError(
                errno.EADDRINUSE,
                f"port {port} on {host} is in use by another server in this process",
            )
        server = InProcessServer(handler, request_type, address)
        try:
            server.start()
            _servers[address] = server
        except BaseException:
            server.stop_thread()
            raise
    return server


def connect(address: str) -> Channel:
    """Open a channel to the server of this process at `address`, which need not exist yet."""
    return InProcessChannel(address)


def is_in_process(address: str) -> bool:
    """Return whether a server of this process answers at `address` without sockets."""
    return address in _servers


class InProcessServer(TransportServer):
    """A thread that takes requests from a queue."""

    def __init__(self, handler: Handler, request_type: Any, address: str) -> None:
        self._handler = handler
        self._types: tuple[type, ...] = get_args(request_type) or (request_type,)
        self._address = address
        self._inbox: SimpleQueue[_InProcessRequest | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._forked = False
        #: Reply queues of open channels by peer; each gets a None when the server closes.
        self._listeners: dict[str, SimpleQueue[Reply | None]] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-server-{address}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def address(self) -> str:
        return self._address

    @property
    def closed(self) -> bool:
        return self._closed

    def attach(self, peer: str, outbox: SimpleQueue[Reply | None]) -> bool:
        """Register a channel; return False if the server is closed."""
        with self._lock:
            if not self._closed:
                self._listeners[peer] = outbox
            return not self._closed

    def detach(self, peer: str) -> None:
        with self._lock:
            self._listeners.pop(peer, None)

    def mark_forked_closed(self) -> None:
        """Mark as closed, without a thread to join; called in a newly forked process."""
        self._closed = self._forked = True

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy of a server of the parent."""
        return self._forked

    def take(self, request: _InProcessRequest) -> None:
        self._inbox.put(request)

    def deliver(self, peer: str, reply: Reply) -> None:
        """Pass a reply to the channel that waits for it, if it still does."""
        outbox = self._listeners.get(peer)
        if outbox is not None:
            outbox.put(reply)

    def _run(self) -> None:
        while (first := self._inbox.get()) is not None:
            batch = [first, *itertools.islice(self._take_batch(), 255)]
            try:
                self._answer(batch)
            except BaseException:
                _log.exception("error in server %s, which continues", self._address)

    def _answer(self, batch: list[_InProcessRequest]) -> None:
        known = [request for request in batch if self._understands(request)]
        if not known:
            return
        try:
            self._handler(known)
        except BaseException as error:
            _log.debug("the handler of %s failed", self._address, exc_info=True)
            for request in known:
                request.fail(error if isinstance(error, Exception) else _as_cancelled(error))

    def _take_batch(self) -> Iterator[_InProcessRequest]:
        with contextlib.suppress(Empty):
            while (request := self._inbox.get_nowait()) is not None:
                yield request
            self._inbox.put(None)

    def _understands(self, request: _InProcessRequest) -> bool:
        if isinstance(request.message, self._types):
            return True
        request.fail(
            FailedPreconditionError(
                f"server {self._address} does not support the request "
                f"{type(request.message).__name__}"
            )
        )
        return False

    def close(self) -> None:
        if self._forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            listeners = list(self._listeners.values())
            self._listeners.clear()
        with _servers_lock:
            if _servers.get(self._address) is self:
                del _servers[self._address]
        self.stop_thread()
        for outbox in listeners:
            outbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop_thread(self) -> None:
        """End the thread, even if its start was interrupted."""
        self._closed = True
        self._inbox.put(None)


class _InProcessRequest(Request):
    __slots__ = ("_request_id", "_server", "_unanswered", "buffers", "message", "peer", "role")

    def __init__(
        self,
        server: InProcessServer,
        peer: str,
        request_id: int,
        message: msgspec.Struct,
        buffers: Sequence[Buffer],
    ) -> None:
        self._server = server
        self._request_id = request_id
        self._unanswered = [True]
        self.peer: str = peer
        self.role: None = None
        self.message = message
        self.buffers: Sequence[Buffer] = buffers

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        self._answer(
            message, copy_views(flat_views(buffers)) if borrowed else _as_received(buffers)
        )

    def fail(self, error: Exception) -> None:
        # Through the text form, so that the same errors arrive as over a socket.
        self._answer(decode_error(encode_error(error)), ())

    def _answer(self, message: msgspec.Struct | Exception, buffers: Sequence[Buffer]) -> None:
        try:
            self._unanswered.pop()
        except IndexError:
            return
        if self._server.forked:
            raise FailedPreconditionError(
                f"server {self._server.address} was started before a fork and replies only "
                "in the parent process"
            )
        self._server.deliver(self.peer, Reply(self._request_id, message, buffers))


class _Outbox(SimpleQueue[Reply | None]):
    """Replies of a server to one channel; None when the server closes."""

    def __init__(self, ring: Callable[[], None] | None) -> None:
        super().__init__()
        self.ring = ring

    def put(self, item: Reply | None, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        ring = self.ring
        if ring is not None:
            ring()


class InProcessChannel(RequestTrackingChannel):
    """A queue of replies, attached to one server at a time."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._peer = f"inprocess-{next(_numbers)}"
        self._request_ids = itertools.count(1)
        self._server: InProcessServer | None = None
        self._ring: Callable[[], None] | None = None
        self._inbox = _Outbox(None)

    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        self._check_usable()
        received = _as_received(buffers)
        if self._server is None or (self._server.closed and not self._unanswered):
            self._attach()
        request_id = next(self._request_ids)
        self._unanswered.add(request_id)
        if self._server is not None:
            self._server.take(
                _InProcessRequest(self._server, self._peer, request_id, message, received)
            )
        return request_id

    @property
    def has_pending(self) -> bool:
        return not self._inbox.empty()

    def sockets(self) -> Sequence[Any]:
        return ()

    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        self._ring = self._inbox.ring = wakeup

    def after_fork_in_child(self) -> None:
        """Reject further use: a fork does not copy the server's thread."""
        super().after_fork_in_child()
        self._server = None

    def _attach(self) -> None:
        self._inbox = _Outbox(self._ring)
        server = _servers.get(self._address)
        self._server = server
        if server is None or not server.attach(self._peer, self._inbox):
            self._server = None
            self._inbox.put(None)

    def receive(self, timeout: float) -> Reply | None:
        self._check_usable()
        deadline = time.monotonic() + timeout
        while True:
            try:
                reply = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return None
            if reply is None:
                found = self._server is not None
                self._server = None
                if not self._unanswered:
                    continue
                self._unanswered.clear()
                error = UnavailableError(
                    f"server {self._address} was closed"
                    if found
                    else f"no server in this process listens at {self._address}"
                )
                error.refused = True
                raise error
            if reply.request_id in self._unanswered:
                self._unanswered.discard(reply.request_id)
                return reply

    def close(self) -> None:
        self._closed = True
        self._unanswered.clear()
        if self._server is not None:
            self._server.detach(self._peer)
            self._server = None


def _abandon_servers() -> None:
    # A forked child has the servers' records but not their threads, so it would wait forever.
    global _servers_lock
    _servers_lock = threading.Lock()
    for server in _servers.values():
        server.mark_forked_closed()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_servers)


def _as_received(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    if not buffers:
        return ()
    return [memoryview(bytearray(view)) if view.readonly else view for view in flat_views(buffers)]


def _as_cancelled(error: BaseException) -> HeadraceError:
    return HeadraceError(f"the handler failed with {describe_error(error)}")
