"""ZeroMQ server: a ROUTER socket and the only thread that uses it.

Rule 1. Only `close` ends the thread: an exception of a handler becomes a reply, and any other
        failure (out of memory or descriptors) is logged, and the thread continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from headrace.errors import FailedPreconditionError, HeadraceError, describe_error
from headrace.forks import register_fork_sensitive
from headrace.open_files import check_available
from headrace.transport.arena import Arena, ArenaBudget
from headrace.transport.authenticator import Authenticator
from headrace.transport.channel import Handler, TransportServer
from headrace.transport.context import FILES_PER_CONTEXT, shared_context, start_frame_collector
from headrace.transport.descriptors import raise_file_limit, seconds_since_data
from headrace.transport.envelope import (
    CLOSING,
    EMPTY_BODY,
    REPLY,
    REQUEST,
    ReplyHeader,
    RequestHeader,
    decode_request_header,
    encode,
    join_frames,
    receive_buffers,
)
from headrace.transport.limits import ServerLimits
from headrace.transport.request_errors import RequestErrorLog
from headrace.transport.security import Security
from headrace.transport.shared_memory import (
    MemoryReport,
    SharedMemoryOptions,
    current_process_identity,
)
from headrace.transport.zeromq_binding import bind
from headrace.transport.zeromq_peers import Peer, Peers
from headrace.transport.zeromq_reply_writer import QueuedReply, ReplyWriter
from headrace.transport.zeromq_request import ZeroMQRequest
from headrace.versions import WIRE_FORMAT, own_versions

__all__ = ["ZeroMQServer"]

_log = logging.getLogger(__name__)

_BATCH = 512
_ZERO_COPY_BYTES = 64 << 10
_SWEEP_SECONDS = 3.0
_AFTER_ERROR_SECONDS = 0.05
_LINGER_MS = 200
_HEADER_BYTES = 4 << 10
# Plain integers: combining pyzmq's enumerations takes longer than sending a message.
_NOW = int(zmq.DONTWAIT)
_STATE = int(zmq.EVENTS)
_IN = int(zmq.POLLIN)
_MORE_TO_COME = int(zmq.RCVMORE)


class ZeroMQServer(TransportServer):
    """Reads all pending requests, calls the handler, and writes all pending replies."""

    def __init__(
        self,
        handler: Handler,
        *,
        request_type: Any,
        host: str,
        port: int,
        security: Security | None,
        shared_memory: SharedMemoryOptions,
        limits: ServerLimits,
        on_disconnect: Callable[[str], None] | None = None,
    ) -> None:
        raise_file_limit()
        check_available(FILES_PER_CONTEXT)
        start_frame_collector()
        self._handler = handler
        self._decode = msgspec.msgpack.Decoder(request_type).decode
        self._limits = limits
        self._memory_options = shared_memory
        self._arena_budget = ArenaBudget(shared_memory.server_bytes)
        self._identity = current_process_identity()
        self._replies: deque[QueuedReply] = deque()
        self._error_log = RequestErrorLog()
        self._closing = False
        self._forked = False
        self._close_lock = threading.Lock()
        #: The thread that pops this closes the sockets: the server's thread, or the creator if
        #: creation failed before.
        self._close_token = [True]
        self._wake_lock = threading.Lock()
        self._wake_sent = False
        self._wake_read = self._wake_write = -1
        self._own_context = security is not None
        self._context = zmq.Context() if self._own_context else shared_context.acquire(self)
        self._authenticator: Authenticator | None = None
        self._peers: Peers | None = None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._set_options()
            if security is not None:
                self._authenticator = Authenticator(self._context, self._router, security)
            self._peers = Peers(
                self._router,
                self._authenticator.role_of if self._authenticator else _no_role,
                on_disconnect,
            )
            self._reply_writer = ReplyWriter(self._router, limits)
            self._address = bind(self._router, host, port)
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            self._thread = threading.Thread(
                target=self._run, name=f"headrace-server-{self._address}", daemon=True
            )
            register_fork_sensitive(self)
            self._thread.start()
        except BaseException:
            if self._claim_close():
                self._close_everything()
            else:
                self.close()  # the thread runs, although its start was interrupted
            raise

    def _claim_close(self) -> bool:
        """Claim the right to close the sockets; return False if another thread has it."""
        try:
            self._close_token.pop()  # one list operation: two threads cannot both succeed
        except IndexError:
            return False
        return True

    def _set_options(self) -> None:
        router = self._router
        router.linger = _LINGER_MS
        # `ReplyWriter` limits the bytes instead: at a high-water mark, a ROUTER would silently drop
        # replies.
        router.sndhwm = router.rcvhwm = 0
        router.maxmsgsize = self._limits.request_bytes + _HEADER_BYTES
        router.copy_threshold = _ZERO_COPY_BYTES
        router.ipv6 = True
        # A client that was stopped for a while (by a debugger) keeps its connection; an unreachable
        # one is dropped. The interval is long, as channels send heartbeats of their own.
        interval = min(self._limits.keepalive_interval, self._limits.keepalive_timeout)
        router.heartbeat_ivl = math.ceil(interval * 1000)
        router.heartbeat_timeout = math.ceil(self._limits.keepalive_timeout * 1000)
        router.handshake_ivl = 5_000
        router.backlog = 1024

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_refused(self) -> int:
        return 0 if self._peers is None else self._peers.num_refused

    @property
    def arenas(self) -> list[Arena]:
        """Arenas of the channels that have one now."""
        assert self._peers is not None
        return [arena for peer in self._peers if (arena := peer.arena) is not None]

    def is_connected(self, peer: str) -> bool:
        return self._peers is not None and self._peers.find_by_channel(peer) is not None

    def seconds_since_data(self, peer: str) -> float | None:
        found = None if self._peers is None else self._peers.find_by_channel(peer)
        if found is None or found.descriptor is None:
            return None
        return seconds_since_data(found.descriptor)

    # --- called from any thread ---------------------------------------------------------------

    def post(self, answer: QueuedReply) -> None:
        """Queue a reply for the thread to write."""
        if self._forked:
            raise FailedPreconditionError(
                f"server {self._address} was started before a fork and replies only in the "
                "parent process"
            )
        self._replies.append(answer)
        if not self._wake_sent and threading.get_ident() != self._thread.ident:
            self._wake()

    def _wake(self) -> None:
        # Set before the byte is written, and cleared after it is read and before the replies are
        # taken, so that no reply is missed.
        with self._wake_lock:
            if self._wake_write >= 0:
                self._wake_sent = True
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"!")

    def close(self) -> None:
        if self._forked:
            return
        with self._close_lock:
            self._closing = True
            self._wake()
            if threading.current_thread() is self._thread:
                return
            self._thread.join()

    def after_fork_in_child(self) -> None:
        """Close the copies of port and connections in a forked process, which has no thread."""
        self._forked = True
        self._replies.clear()
        if self._peers is not None:
            self._peers.close_in_child()
        for number in (self._wake_read, self._wake_write):
            if number >= 0:
                os.close(number)
        self._wake_read = self._wake_write = -1

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._claim_close():
            return
        assert self._peers is not None
        poller = zmq.Poller()
        for source in (self._router, self._peers.monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        next_sweep = time.monotonic() + _SWEEP_SECONDS
        try:
            while not self._closing:
                try:
                    next_sweep = self._run_once(poller, self._peers, next_sweep)
                except zmq.ContextTerminated:
                    break
                except BaseException:
                    _log.exception("error in server %s, which continues", self._address)
                    # A shortage of memory or descriptors may be over in a moment.
                    time.sleep(_AFTER_ERROR_SECONDS)
            with contextlib.suppress(zmq.ZMQError):
                self._write_replies()
        finally:
            self._replies.clear()
            self._close_everything()

    def _run_once(self, poller: zmq.Poller, peers: Peers, next_sweep: float) -> float:
        """Handle all pending input and output; return the time of the next sweep."""
        ready = dict(poller.poll(int(_SWEEP_SECONDS * 1000)))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._wake_sent = False
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.authenticate_next()
        if self._router in ready:
            self._read_requests(peers)
        if peers.monitor in ready:
            peers.read_monitor()
        peers.report_disconnects()
        self._write_replies()
        now = time.monotonic()
        if now < next_sweep:
            return next_sweep
        self._sweep_peers(peers)
        return now + _SWEEP_SECONDS

    def _read_requests(self, peers: Peers) -> None:
        batch: list[ZeroMQRequest] = []
        router = self._router
        try:
            for number in range(_BATCH):
                # Checked first: a receive without messages raises an exception, which takes longer.
                if number and not int(router.getsockopt(_STATE)) & _IN:
                    break
                try:
                    route = router.recv(_NOW)
                except zmq.Again:
                    break
                try:
                    request = self._read_request(route, peers)
                except BaseException:
                    # The rest of this message must not be read as the next one.
                    while router.getsockopt(_MORE_TO_COME):
                        router.recv(copy=False)
                    raise
                if peers.has_unreported_disconnects:
                    # Before a new connection of the same channel is handled.
                    self._handle(batch)
                    batch = []
                    peers.report_disconnects()
                if request is not None:
                    batch.append(request)
        finally:
            self._handle(batch)

    def _handle(self, batch: list[ZeroMQRequest]) -> None:
        if not batch:
            return
        try:
            self._handler(batch)
        except BaseException as error:
            self._error_log.log_failure(self._address, error)
            failure = (
                error
                if isinstance(error, Exception)
                else HeadraceError(f"the handler failed with {describe_error(error)}")
            )
            for request in batch:
                request.fail(failure)

    def _read_request(self, route: bytes, peers: Peers) -> ZeroMQRequest | None:
        router = self._router
        peer = peers.find(route)
        # A ROUTER always has one frame after the routing id.
        first = router.recv(copy=False)
        if peer is None:
            peer = peers.add(route, first)
        buffers = receive_buffers(router, first)
        if peer is None:
            return None
        try:
            header: RequestHeader = decode_request_header(first.buffer)
            size = len(first)
            for buffer in buffers:
                size += buffer.nbytes
            if header.location is not None:
                size += sum(header.location.lengths)
            if size <= self._limits.request_bytes + _HEADER_BYTES:
                buffers = join_frames(buffers, header.frame_counts)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            _log.debug(
                "dropped a message of %d bytes from %r that is not a request", len(first), route
            )
            return None
        if header.kind == CLOSING:
            peers.remove(peer)
        elif header.report is not None:
            self._apply_memory_report(peer, header.report)
        if header.kind != REQUEST:
            return None
        request = ZeroMQRequest(self.post, peer, header.request_id, buffers)
        if size > self._limits.request_bytes + _HEADER_BYTES:
            message = (
                f"a request of {size:,} bytes exceeds the limit of "
                f"{self._limits.request_bytes:,} of server {self._address}"
            )
            self._error_log.log_refusal(message)
            request.fail(FailedPreconditionError(message))
            return None
        if header.wire_format != WIRE_FORMAT:
            message = (
                f"server {self._address} ({own_versions()}) supports wire format "
                f"{WIRE_FORMAT}, but the request has wire format {header.wire_format}: run "
                "the same version of Headrace on both sides"
            )
            self._error_log.log_refusal(message)
            request.fail(FailedPreconditionError(message))
            return None
        try:
            request.message = self._decode(header.body)
            shared_buffers = peer.read_memory(
                header.offer, header.retired_segments, header.location
            )
            if shared_buffers is not None:
                request.buffers = shared_buffers
        except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
            request.fail(
                FailedPreconditionError(
                    f"server {self._address} does not support this request ({error}); is this "
                    "the right address, and do both sides run the same version?"
                )
            )
            return None
        if peer.is_disconnected:
            peers.record_late_request(peer)
        return request

    def _apply_memory_report(self, peer: Peer, report: MemoryReport) -> None:
        if peer.arena is not None:
            peer.arena.apply_report(report)
        elif (
            report.identity is not None
            and not peer.is_disconnected
            and self._identity is not None
            and self._identity.shares_memory_with(report.identity)
        ):
            arena = Arena(report.identity, self._memory_options, self._arena_budget)
            peer.share_memory(arena, self._identity)

    def _sweep_peers(self, peers: Peers) -> None:
        self._reply_writer.cut_stalled_peers(peers)
        for peer in peers:
            arena = peer.arena
            if arena is None:
                continue
            if not arena.identity.is_alive():
                peer.disconnect()
                continue
            retired, report = arena.retire_overdue(), peer.take_report()
            if retired or report is not None:
                header = ReplyHeader(0, REPLY, EMPTY_BODY, retired_segments=retired, report=report)
                self._replies.append(QueuedReply(peer, 0, encode(header), ()))

    def _write_replies(self) -> None:
        answers = self._replies
        write = self._reply_writer.write
        while answers:
            write(answers.popleft())

    def _close_everything(self) -> None:
        with self._wake_lock:
            for number in (self._wake_read, self._wake_write):
                if number >= 0:
                    os.close(number)
            self._wake_read = self._wake_write = -1
        if self._peers is not None:
            self._peers.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._router.close()
        if self._own_context:
            self._context.term()
        else:
            shared_context.release(self)


def _no_role(key: bytes) -> None:
    return None
