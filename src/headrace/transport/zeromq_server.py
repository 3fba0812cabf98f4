"""The answering end over ZeroMQ: a ROUTER socket and the one thread that touches it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.auth

from headrace.errors import FailedPreconditionError, HeadraceError
from headrace.transport import address as addresses
from headrace.transport.channel import Buffer, Handler, Request, Server
from headrace.transport.context import shared_context
from headrace.transport.envelope import (
    ERROR,
    GOODBYE,
    REPLY,
    REQUEST,
    ReplyHeader,
    RequestHeader,
    cut,
    decode_request_header,
    encode,
    encode_error,
    flat_views,
    join,
    receive_buffers,
)
from headrace.transport.security import AllowList, Security
from headrace.transport.shared_memory import (
    Arena,
    HostIdentity,
    Offer,
    Placement,
    SharedMemoryOptions,
    this_process,
)

__all__ = ["CHANNEL_ID_BYTES", "ZeroMQServer"]

_log = logging.getLogger(__name__)

CHANNEL_ID_BYTES = 17
"""A channel's routing id: one letter and 16 random bytes for the channel, then the number of the
connection."""

_BATCH = 512
_ZERO_COPY_BYTES = 64 << 10
_SWEEP_SECONDS = 3.0
_REBIND_SECONDS = 1.0
_LINGER_MS = 200
# Plain numbers: pyzmq's enumerations take longer to combine than a message to send.
_NOW = int(zmq.DONTWAIT)
_MORE_NOW = int(zmq.DONTWAIT | zmq.SNDMORE)

_Answer = tuple[bytes, bytes, Sequence[memoryview]]


class ZeroMQServer(Server):
    """Reads all requests in hand, calls the handler, writes all answers in hand."""

    def __init__(
        self,
        handler: Handler,
        *,
        request_type: Any,
        host: str,
        port: int,
        security: Security | None,
        shared_memory: SharedMemoryOptions,
    ) -> None:
        self._handler = handler
        self._decode = msgspec.msgpack.Decoder(request_type).decode
        self._memory_options = shared_memory
        self._identity = this_process()
        #: Arenas by channel, with the number of the connection that asked for them.
        self._arenas: dict[str, tuple[bytes, Arena]] = {}
        self._outbox: deque[_Answer] = deque()
        self._closing = False
        self._close_lock = threading.Lock()
        self._wake_lock = threading.Lock()
        self._wake_sent = False
        self._own_context = security is not None
        self._context = zmq.Context() if self._own_context else shared_context.borrow()
        self._authenticator: zmq.auth.Authenticator | None = None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._set_options()
            if security is not None:
                self._check_keys(security)
            self._address = self._bind(host, port)
        except BaseException:
            self._close_sockets()
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-server-{self._address}", daemon=True
        )
        self._thread.start()

    def _set_options(self) -> None:
        router = self._router
        router.linger = _LINGER_MS
        # What is under way is bounded by the channels' unanswered requests; a high-water mark
        # would make a ROUTER drop answers without a word.
        router.sndhwm = router.rcvhwm = 0
        router.copy_threshold = _ZERO_COPY_BYTES
        router.ipv6 = True
        # A client that was stopped for a while (a debugger) keeps its connection; one that is
        # unreachable is forgotten.
        router.heartbeat_ivl = 5_000
        router.heartbeat_timeout = 30_000
        router.handshake_ivl = 5_000
        router.backlog = 1024

    def _check_keys(self, security: Security) -> None:
        security.apply(self._router, "server")
        authenticator = zmq.auth.Authenticator(self._context, log=_log)
        authenticator.configure_curve_callback(
            domain="headrace",
            credentials_provider=AllowList(security.authorized_clients, security.public_key),
        )
        authenticator.start()
        self._authenticator = authenticator

    def _bind_patiently(self, endpoint: str) -> None:
        """Bind; wait a moment for a port that whoever had it before is letting go of.

        ZeroMQ closes sockets a little after it is asked to, in a thread of its own.
        """
        until = time.monotonic() + _REBIND_SECONDS
        while True:
            try:
                self._router.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
            else:
                return
            time.sleep(0.02)

    def _bind(self, host: str, port: int) -> str:
        number = "127.0.0.1" if host == "localhost" else host
        endpoint = f"tcp://{addresses.join(number, port)}" if port else f"tcp://{_any(number)}"
        try:
            self._bind_patiently(endpoint)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(
                    errno.EADDRINUSE,
                    f"port {port} on {host} is in use by another server; "
                    "choose another port, or 0 for one that is free",
                ) from error
            raise OSError(
                error.errno, f"cannot listen at {addresses.join(host, port)}: {error}"
            ) from error
        bound = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return addresses.join(host, int(bound.rpartition(":")[2]))

    @property
    def address(self) -> str:
        return self._address

    @property
    def arenas(self) -> int:
        """How many channels have shared memory now."""
        return len(self._arenas)

    # --- called from any thread ---------------------------------------------------------------

    def post(self, answer: _Answer) -> None:
        """Give the thread something to write."""
        self._outbox.append(answer)
        if not self._wake_sent and threading.get_ident() != self._thread.ident:
            self._wake()

    def _wake(self) -> None:
        # Set before the byte is written, cleared after it is read and before the outbox is
        # emptied, so that no answer is left behind.
        with self._wake_lock:
            if self._wake_write >= 0:
                self._wake_sent = True
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"!")

    def close(self) -> None:
        with self._close_lock:
            self._closing = True
            self._wake()
            if threading.current_thread() is self._thread:
                return
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        zap = None
        if self._authenticator is not None:
            zap = self._authenticator.zap_socket
            poller.register(zap, zmq.POLLIN)
        next_sweep = time.monotonic() + _SWEEP_SECONDS
        try:
            while not self._closing:
                # Arenas of dead clients are the only reason to wake without a request.
                wait = int(_SWEEP_SECONDS * 1000) if self._arenas else None
                try:
                    ready = dict(poller.poll(wait))
                    if self._wake_read in ready:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                        self._wake_sent = False
                    if zap is not None and zap in ready:
                        self._let_in(zap)
                    if self._router in ready:
                        self._take_requests()
                    self._write_answers()
                    if self._arenas and time.monotonic() >= next_sweep:
                        next_sweep = time.monotonic() + _SWEEP_SECONDS
                        self._sweep()
                except zmq.ContextTerminated:
                    break
                except Exception:
                    _log.exception("the server at %s goes on after an error", self._address)
            with contextlib.suppress(zmq.ZMQError):
                self._write_answers()
        finally:
            with self._wake_lock:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1
            self._outbox.clear()
            for _, arena in self._arenas.values():
                arena.close()
            self._arenas.clear()
            self._close_sockets()

    def _let_in(self, zap: zmq.Socket[bytes]) -> None:
        assert self._authenticator is not None
        # The handler is a coroutine that never waits, because our callback is a plain function.
        with contextlib.suppress(StopIteration):
            self._authenticator.handle_zap_message(zap.recv_multipart()).send(None)

    def _take_requests(self) -> None:
        batch: list[_ZeroMQRequest] = []
        router = self._router
        for _ in range(_BATCH):
            try:
                route = router.recv(_NOW)
            except zmq.Again:
                break
            request = self._read_request(route)
            if request is not None:
                batch.append(request)
        if not batch:
            return
        try:
            self._handler(batch)
        except BaseException as error:
            _log.debug("the handler of %s raised", self._address, exc_info=True)
            failure = (
                error
                if isinstance(error, Exception)
                else HeadraceError(f"the handler was stopped by {type(error).__name__}: {error}")
            )
            for request in batch:
                request.fail(failure)

    def _read_request(self, route: bytes) -> _ZeroMQRequest | None:
        router = self._router
        first = router.recv()  # A ROUTER always has one after the routing id.
        buffers = receive_buffers(router)
        try:
            header: RequestHeader = decode_request_header(first)
            buffers = join(buffers, header.pieces)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            _log.debug("dropped what is no request, %d bytes from %r", len(first), route)
            return None
        peer = route[:CHANNEL_ID_BYTES].hex()
        if header.report is not None or header.kind == GOODBYE:
            self._hear(peer, route, header)
        if header.kind != REQUEST:
            return None
        entry = self._arenas.get(peer)
        request = _ZeroMQRequest(
            self, route, peer, header.ticket, buffers, None if entry is None else entry[1]
        )
        try:
            request.message = self._decode(header.body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            request.fail(
                FailedPreconditionError(
                    f"the server at {self._address} does not understand this request ({error}); "
                    "is this its address, and do both ends run the same version?"
                )
            )
            return None
        return request

    def _hear(self, peer: str, route: bytes, header: RequestHeader) -> None:
        entry = self._arenas.get(peer)
        if entry is not None and (header.kind == GOODBYE or entry[0] != route):
            # A new connection of the channel knows nothing of the old one's segments.
            del self._arenas[peer]
            entry[1].close()
            entry = None
        report = header.report
        if report is None:
            return
        if entry is not None:
            entry[1].hear(report)
        elif report.identity is not None and self._can_share(report.identity):
            self._arenas[peer] = (route, Arena(report.identity, self._memory_options))

    def _can_share(self, identity: HostIdentity) -> bool:
        return self._identity is not None and self._identity.shares_memory_with(identity)

    def _sweep(self) -> None:
        for peer, (_, arena) in list(self._arenas.items()):
            if not arena.identity.is_alive():
                del self._arenas[peer]
                arena.close()

    def _write_answers(self) -> None:
        router = self._router
        outbox = self._outbox
        while outbox:
            route, header, buffers = outbox.popleft()
            try:
                router.send(route, _MORE_NOW)
                if not buffers:
                    router.send(header, _NOW)
                    continue
                router.send(header, _MORE_NOW)
                for view in buffers[:-1]:
                    router.send(view, _MORE_NOW, copy=False)
                router.send(buffers[-1], _NOW, copy=False)
            except zmq.ZMQError as error:
                _log.debug("an answer of %s was not sent: %s", self._address, error)

    def _close_sockets(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._router.close()
        if self._own_context:
            self._context.term()
        else:
            shared_context.give_back()


def _any(host: str) -> str:
    return addresses.join(host, 0).removesuffix("0") + "*"


class _ZeroMQRequest(Request):
    __slots__ = (
        "_arena",
        "_route",
        "_server",
        "_ticket",
        "_unanswered",
        "buffers",
        "message",
        "peer",
    )

    def __init__(
        self,
        server: ZeroMQServer,
        route: bytes,
        peer: str,
        ticket: int,
        buffers: Sequence[Buffer],
        arena: Arena | None,
    ) -> None:
        self._server = server
        self._route = route
        self._ticket = ticket
        self._arena = arena
        self._unanswered = [True]
        self.peer = peer
        self.buffers = buffers

    def reply(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        # What cannot be sent raises here, and the request stays open for `fail`.
        body = msgspec.Raw(encode(message))
        views = flat_views(buffers)
        try:
            self._unanswered.pop()  # One list operation: two threads cannot both succeed.
        except IndexError:
            return
        placed: Placement | Offer | None = None
        if views and self._arena is not None:
            placed = self._arena.place(views)
        if isinstance(placed, Placement):
            header = ReplyHeader(self._ticket, REPLY, body, placed)
            views = []
        else:
            views, pieces = cut(views)
            header = ReplyHeader(self._ticket, REPLY, body, None, placed, pieces)
        self._server.post((self._route, encode(header), views))

    def fail(self, error: Exception) -> None:
        try:
            self._unanswered.pop()
        except IndexError:
            return
        header = ReplyHeader(self._ticket, ERROR, msgspec.Raw(encode_error(error)))
        self._server.post((self._route, encode(header), ()))
