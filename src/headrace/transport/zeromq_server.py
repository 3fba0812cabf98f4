"""The answering end over ZeroMQ: a ROUTER socket and the one thread that touches it.

Rule 1. Nothing but `close` ends the thread: whatever a handler raises is an answer, and whatever
        else goes wrong (no memory, no descriptor) is logged, and the thread goes on.
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
from headrace.forks import stays_with_parent
from headrace.open_files import check_room
from headrace.transport.admission import Admission
from headrace.transport.arena import Arena, ArenaBudget
from headrace.transport.channel import Handler, Server
from headrace.transport.complaints import Complaints
from headrace.transport.context import ENOUGH_FILES, shared_context, start_collector
from headrace.transport.descriptors import raise_file_limit, seconds_since_data
from headrace.transport.envelope import (
    GOODBYE,
    NOTHING,
    REPLY,
    REQUEST,
    ReplyHeader,
    RequestHeader,
    decode_request_header,
    encode,
    join,
    receive_buffers,
)
from headrace.transport.limits import ServerLimits
from headrace.transport.security import Security
from headrace.transport.shared_memory import MemoryReport, SharedMemoryOptions, this_process
from headrace.transport.zeromq_binding import bind
from headrace.transport.zeromq_outbox import Answer, Outbox
from headrace.transport.zeromq_peers import Peer, Peers
from headrace.transport.zeromq_request import ZeroMQRequest
from headrace.versions import WIRE_FORMAT, own_versions

__all__ = ["ZeroMQServer"]

_log = logging.getLogger(__name__)

_BATCH = 512
_ZERO_COPY_BYTES = 64 << 10
_SWEEP_SECONDS = 3.0
_AFTER_ERROR_SECONDS = 0.05
_LINGER_MS = 200
_HEADER_ROOM = 4 << 10
# Plain numbers: pyzmq's enumerations take longer to combine than a message to send.
_NOW = int(zmq.DONTWAIT)
_STATE = int(zmq.EVENTS)
_IN = int(zmq.POLLIN)
_MORE_TO_COME = int(zmq.RCVMORE)


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
        limits: ServerLimits,
        gone: Callable[[str], None] | None = None,
    ) -> None:
        raise_file_limit()
        check_room(ENOUGH_FILES)
        start_collector()
        self._handler = handler
        self._decode = msgspec.msgpack.Decoder(request_type).decode
        self._limits = limits
        self._memory_options = shared_memory
        self._memory = ArenaBudget(shared_memory.server_bytes)
        self._identity = this_process()
        self._answers: deque[Answer] = deque()
        self._complaints = Complaints()
        self._closing = False
        self._forked = False
        self._close_lock = threading.Lock()
        #: Who takes this closes the sockets: the thread, or who made it if that failed before.
        self._to_close = [True]
        self._wake_lock = threading.Lock()
        self._wake_sent = False
        self._wake_read = self._wake_write = -1
        self._own_context = security is not None
        self._context = zmq.Context() if self._own_context else shared_context.borrow(self)
        self._admission: Admission | None = None
        self._peers: Peers | None = None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._set_options()
            if security is not None:
                self._admission = Admission(self._context, self._router, security)
            self._peers = Peers(
                self._router, self._admission.role_of if self._admission else _no_role, gone
            )
            self._outbox = Outbox(self._router, limits)
            self._address = bind(self._router, host, port)
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            self._thread = threading.Thread(
                target=self._run, name=f"headrace-server-{self._address}", daemon=True
            )
            stays_with_parent(self)
            self._thread.start()
        except BaseException:
            if self._is_taken_over():
                self._close_everything()
            else:
                self.close()  # the thread runs, though its start was interrupted
            raise

    def _is_taken_over(self) -> bool:
        """Take over who closes the sockets; False: somebody has, and nobody else may touch them."""
        try:
            self._to_close.pop()  # One list operation: two threads cannot both succeed.
        except IndexError:
            return False
        return True

    def _set_options(self) -> None:
        router = self._router
        router.linger = _LINGER_MS
        # Bounded in bytes instead, by the outbox; a high-water mark would make a ROUTER drop
        # answers without a word.
        router.sndhwm = router.rcvhwm = 0
        router.maxmsgsize = self._limits.request_bytes + _HEADER_ROOM
        router.copy_threshold = _ZERO_COPY_BYTES
        router.ipv6 = True
        # A client that was stopped for a while (a debugger) keeps its connection; one that is
        # unreachable is forgotten. Seldom: channels send signs of life of their own.
        interval = min(self._limits.ping_seconds, self._limits.silence_seconds)
        router.heartbeat_ivl = math.ceil(interval * 1000)
        router.heartbeat_timeout = math.ceil(self._limits.silence_seconds * 1000)
        router.handshake_ivl = 5_000
        router.backlog = 1024

    @property
    def address(self) -> str:
        return self._address

    @property
    def refused(self) -> int:
        return 0 if self._peers is None else self._peers.refused

    @property
    def arenas(self) -> list[Arena]:
        """The memory of the channels that have some now."""
        assert self._peers is not None
        return [arena for peer in self._peers if (arena := peer.arena) is not None]

    def is_connected(self, peer: str) -> bool:
        return self._peers is not None and self._peers.of_channel(peer) is not None

    def silence(self, peer: str) -> float | None:
        found = None if self._peers is None else self._peers.of_channel(peer)
        if found is None or found.descriptor is None:
            return None
        return seconds_since_data(found.descriptor)

    # --- called from any thread ---------------------------------------------------------------

    def post(self, answer: Answer) -> None:
        """Give the thread something to write."""
        if self._forked:
            raise FailedPreconditionError(
                f"the server at {self._address} was started before a fork; it answers in the "
                "process that started it"
            )
        self._answers.append(answer)
        if not self._wake_sent and threading.get_ident() != self._thread.ident:
            self._wake()

    def _wake(self) -> None:
        # Set before the byte is written, cleared after it is read and before the answers are
        # taken, so that none is left.
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

    def leave_to_parent(self) -> None:
        """Close the child's copies of the port and the connections; there is no thread here."""
        self._forked = True
        self._answers.clear()
        if self._peers is not None:
            self._peers.close_in_child()
        for number in (self._wake_read, self._wake_write):
            if number >= 0:
                os.close(number)
        self._wake_read = self._wake_write = -1

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._is_taken_over():
            return
        assert self._peers is not None
        poller = zmq.Poller()
        for source in (self._router, self._peers.monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        if self._admission is not None:
            poller.register(self._admission.socket, zmq.POLLIN)
        next_sweep = time.monotonic() + _SWEEP_SECONDS
        try:
            while not self._closing:
                try:
                    next_sweep = self._turn(poller, self._peers, next_sweep)
                except zmq.ContextTerminated:
                    break
                except BaseException:
                    _log.exception("the server at %s goes on after an error", self._address)
                    # What is short now (memory, descriptors) may not be in a moment.
                    time.sleep(_AFTER_ERROR_SECONDS)
            with contextlib.suppress(zmq.ZMQError):
                self._write_answers()
        finally:
            self._answers.clear()
            self._close_everything()

    def _turn(self, poller: zmq.Poller, peers: Peers, next_sweep: float) -> float:
        """Do what is due; return when the next sweep is."""
        ready = dict(poller.poll(int(_SWEEP_SECONDS * 1000)))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._wake_sent = False
        if self._admission is not None and self._admission.socket in ready:
            self._admission.decide()
        if self._router in ready:
            self._take_requests(peers)
        if peers.monitor in ready:
            peers.read_news()
        peers.report_departures()
        self._write_answers()
        now = time.monotonic()
        if now < next_sweep:
            return next_sweep
        self._sweep(peers)
        return now + _SWEEP_SECONDS

    def _take_requests(self, peers: Peers) -> None:
        batch: list[ZeroMQRequest] = []
        router = self._router
        try:
            for number in range(_BATCH):
                # Asked for first: the exception of a socket without messages takes longer.
                if number and not int(router.getsockopt(_STATE)) & _IN:
                    break
                try:
                    route = router.recv(_NOW)
                except zmq.Again:
                    break
                try:
                    request = self._read_request(route, peers)
                except BaseException:
                    # The rest of this message must not be taken for the next one.
                    while router.getsockopt(_MORE_TO_COME):
                        router.recv(copy=False)
                    raise
                if peers.has_departures:
                    # Before a new connection of the same channel is heard.
                    self._handle(batch)
                    batch = []
                    peers.report_departures()
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
            self._complaints.failed(self._address, error)
            failure = (
                error
                if isinstance(error, Exception)
                else HeadraceError(f"the handler was stopped by {describe_error(error)}")
            )
            for request in batch:
                request.fail(failure)

    def _read_request(self, route: bytes, peers: Peers) -> ZeroMQRequest | None:
        router = self._router
        peer = peers.find(route)
        # A ROUTER always has one frame after the routing id.
        first = router.recv(copy=False)
        if peer is None:
            peer = peers.meet(route, first)
        buffers = receive_buffers(router, first)
        if peer is None:
            return None
        try:
            header: RequestHeader = decode_request_header(first.buffer)
            size = len(first)
            for buffer in buffers:
                size += buffer.nbytes
            if header.placement is not None:
                size += sum(header.placement.lengths)
            if size <= self._limits.request_bytes + _HEADER_ROOM:
                buffers = join(buffers, header.pieces)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            _log.debug("dropped what is no request, %d bytes from %r", len(first), route)
            return None
        if header.kind == GOODBYE:
            peers.forget(peer)
        elif header.report is not None:
            self._hear(peer, header.report)
        if header.kind != REQUEST:
            return None
        request = ZeroMQRequest(self.post, peer, header.ticket, buffers)
        if size > self._limits.request_bytes + _HEADER_ROOM:
            words = (
                f"a request of {size:,} bytes is larger than the {self._limits.request_bytes:,} "
                f"that the server at {self._address} takes"
            )
            self._complaints.refused(words)
            request.fail(FailedPreconditionError(words))
            return None
        if header.wire != WIRE_FORMAT:
            words = (
                f"the server at {self._address} ({own_versions()}) reads wire format "
                f"{WIRE_FORMAT}, and a request came in wire format {header.wire}: run the same "
                "version of Headrace on both sides"
            )
            self._complaints.refused(words)
            request.fail(FailedPreconditionError(words))
            return None
        try:
            request.message = self._decode(header.body)
            placed = peer.read_memory(header.offer, header.retired, header.placement)
            if placed is not None:
                request.buffers = placed
        except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
            request.fail(
                FailedPreconditionError(
                    f"the server at {self._address} does not understand this request ({error}); "
                    "is this its address, and do both ends run the same version?"
                )
            )
            return None
        if peer.gone:
            peers.came_late(peer)
        return request

    def _hear(self, peer: Peer, report: MemoryReport) -> None:
        if peer.arena is not None:
            peer.arena.hear(report)
        elif (
            report.identity is not None
            and not peer.gone
            and self._identity is not None
            and self._identity.shares_memory_with(report.identity)
        ):
            arena = Arena(report.identity, self._memory_options, self._memory)
            peer.share(arena, self._identity)

    def _sweep(self, peers: Peers) -> None:
        self._outbox.check(peers)
        for peer in peers:
            arena = peer.arena
            if arena is None:
                continue
            if not arena.identity.is_alive():
                peer.cut()
                continue
            retired, report = arena.retire(), peer.take_report()
            if retired or report is not None:
                header = ReplyHeader(0, REPLY, NOTHING, retired=retired, report=report)
                self._answers.append(Answer(peer, 0, encode(header), ()))

    def _write_answers(self) -> None:
        answers = self._answers
        write = self._outbox.write
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
        if self._admission is not None:
            self._admission.close()
        self._router.close()
        if self._own_context:
            self._context.term()
        else:
            shared_context.give_back(self)


def _no_role(key: bytes) -> None:
    return None
