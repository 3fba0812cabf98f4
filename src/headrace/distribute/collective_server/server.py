"""Server of collectives: a port in the process of the first worker, with its sessions.

One port serves all strategies that this process creates for the same cluster, one after another or
concurrently. The strategies that the workers create together share a *session*. A worker without a
session joins the one that has not started.

Rule 1. A request is held until its collective has a result. If a newer request replaces it, it is
        answered with an error, which only an interrupted or reconnected worker could receive.
Rule 2. The handler does not block. It sums arrays when the last contribution arrives.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from headrace.distribute.collective_server.messages import (
    AwaitSessionFailure,
    CollectiveRequest,
    CollectiveResult,
    Contribute,
    Done,
    GetMissingWorkers,
    LeaveSession,
    MissingWorkers,
    RetryContribution,
    decode_arrays,
    encode_arrays,
    encode_error,
)
from headrace.distribute.collective_server.state import (
    CollectiveOutcome,
    CollectiveState,
    CollectiveValue,
    Contribution,
    RankAnswer,
    RetryAfter,
    combine,
)
from headrace.errors import HeadraceError, InvalidArgumentError, UnavailableError
from headrace.forks import call_in_children
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Buffer, Handler, Reply, Request
from headrace.transport.envelope import flat_views
from headrace.transport.limits import ServerLimits
from headrace.transport.request_tracking import RequestTrackingChannel
from headrace.transport.security import Security

__all__ = [
    "MAX_MESSAGE_BYTES",
    "CollectiveServer",
    "LocalServerChannel",
    "acquire_server",
]

MAX_MESSAGE_BYTES = 1 << 40
"""Message size limit: workers are one program, bound only by their memory."""
_ANY_INTERFACE = "0.0.0.0"
_IDLE_TIMEOUT = 86_400.0
"""Seconds; a paused worker keeps its connection, since other workers have their own timeouts. So a
lost connection belongs to a process that ended."""


class _CollectiveSession:
    """One session and its waiting requests."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name = name
        self.state = CollectiveState(names, combine)
        #: Held requests, by rank and number of the collective.
        self.held_requests: dict[tuple[int, int], Request] = {}
        #: Open requests for the session's failure by rank. They are sent in advance, since the
        #: first worker may have ended when another worker would ask.
        self.listeners: dict[int, Request] = {}
        #: Rank by the connection through which it last sent a request.
        self.peers: dict[str, int] = {}
        #: Latest attempt of each worker's strategy.
        self.attempts: dict[tuple[int, str], int] = {}

    @property
    def is_forming(self) -> bool:
        """Whether it has neither started nor failed."""
        return not self.state.has_started and self.state.failure is None


class CollectiveServer(LifeCycle):
    """Server at the address of a cluster's first worker, while a session is open.

    Args:
        address: "host:port" of the first worker.
        names: Names of the workers by rank, for errors.
        security: Server keys; required unless the address is loopback.
    """

    def __init__(self, address: str, names: Sequence[str], security: Security | None) -> None:
        super().__init__()
        self._address = address
        self._security = security
        self._sessions = _SessionTable(names)

    def _open(self) -> None:
        host, port = addresses.split(self._address)
        # A name that leads here only from outside, such as a load balancer or a container's
        # host, is not an interface to listen on.
        listen_host = host if addresses.is_local_host(host) else _ANY_INTERFACE
        server = zeromq.serve(
            self._sessions.handle,
            request_type=CollectiveRequest,
            host=listen_host,
            port=port,
            security=self._security,
            limits=ServerLimits(
                request_bytes=MAX_MESSAGE_BYTES,
                pending_reply_bytes=MAX_MESSAGE_BYTES,
                total_pending_reply_bytes=MAX_MESSAGE_BYTES,
                keepalive_timeout=_IDLE_TIMEOUT,
            ),
            on_disconnect=self._sessions.disconnected,
        )
        self._on_stop(server.close)

    def local_channel(self) -> LocalServerChannel:
        """Return a channel for the worker of this process."""
        return LocalServerChannel(self._address, self._sessions.handle)


class _SessionTable:
    """Sessions of one server, under one lock. The last contributor's thread sends the answers."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        #: Distinguishes this process of the first worker from its predecessor.
        self._id = secrets.token_hex(8)
        self._sessions: dict[str, _CollectiveSession] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        #: Deferred calls; see `_run_or_defer`.
        self._deferred: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def handle(self, requests: Sequence[Request]) -> None:
        """Answer requests, or hold them (`channel.Handler`)."""
        self._run_or_defer(partial(self._handle_all, requests))

    def disconnected(self, peer: str) -> None:
        """Handle the end of a connection."""
        self._run_or_defer(partial(self._handle_disconnect, peer))

    def _run_or_defer(self, call: Callable[[], None]) -> None:
        """Run a call, or defer it if a finalizer requests it while this thread runs another one.

        A dropped strategy leaves whenever it is garbage collected.
        """
        with self._lock:
            self._deferred.append(call)
            if self._is_busy:
                return
            try:
                self._is_busy = True
                while self._deferred:
                    self._deferred.popleft()()
            finally:
                self._is_busy = False

    def _handle_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self._handle(request)
            except (HeadraceError, ValueError, TypeError) as error:
                request.fail(error)

    def _handle_disconnect(self, peer: str) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            rank = session.peers.pop(peer, None)
            if rank is not None and rank not in session.peers.values():
                self._answer(session, session.state.disconnected(rank, now))

    def _handle(self, request: Request) -> None:
        message = request.message
        assert isinstance(
            message, Contribute | GetMissingWorkers | LeaveSession | AwaitSessionFailure
        )
        if not 0 <= message.rank < len(self._names):
            raise InvalidArgumentError(
                f"a worker has rank {message.rank}, but the cluster of {self._names[0]} has "
                f"{len(self._names)} workers: {', '.join(self._names)}; give every worker the "
                "same cluster"
            )
        if isinstance(message, Contribute):
            self._on_contribute(request, message)
        elif isinstance(message, GetMissingWorkers):
            self._on_get_missing(request, message)
        elif isinstance(message, LeaveSession):
            self._on_leave(request, message)
        else:
            self._on_await_failure(request, message)

    def _on_contribute(self, request: Request, message: Contribute) -> None:
        session = self._find_session(message) or self._forming_session()
        if message.session_id not in ("", session.name):
            request.reply(
                encode_error(
                    UnavailableError(
                        f"{self._names[0]} was restarted, or its strategy was closed, while "
                        "other workers continued: restart all workers together from a saved state"
                    )
                )
            )
            return
        key = message.rank, message.process_id
        if message.attempt < session.attempts.get(key, 0):
            # Sent through an abandoned connection, and handled after a newer request: no client
            # receives the answer.
            request.reply(
                encode_error(UnavailableError("a newer attempt of this contribution has arrived"))
            )
            return
        session.attempts[key] = message.attempt
        session.peers = {peer: rank for peer, rank in session.peers.items() if rank != message.rank}
        session.peers[request.peer] = message.rank
        value = CollectiveValue(message.flag, decode_arrays(message.arrays, request.buffers))
        previous = session.held_requests.pop((message.rank, message.number), None)
        if previous is not None:
            reason = (
                "replaced by a contribution of another process or strategy of "
                f"{self._names[message.rank]}"
            )
            previous.reply(encode_error(UnavailableError(reason)))
        session.held_requests[message.rank, message.number] = request
        answers = session.state.contribute(
            message.rank,
            message.process_id,
            message.number,
            message.acknowledged,
            Contribution(message.description, message.kind, value),
            time.monotonic(),
        )
        self._answer(session, answers)

    def _on_get_missing(self, request: Request, message: GetMissingWorkers) -> None:
        session = self._find_session(message)
        now = time.monotonic()
        descriptions = (
            [] if session is None else session.state.describe_missing(message.number, now)
        )
        if (
            descriptions
            and session is not None
            and session.is_forming
            and self._is_rank_taken(message.rank)
        ):
            descriptions.append(
                f"{self._names[message.rank]} already takes part in a running session (is this a "
                "second process of that task?)"
            )
        request.reply(MissingWorkers(descriptions=tuple(descriptions)))
        if session is not None and message.ends_session:
            self._answer(
                session, session.state.fail_missing(message.number, message.waited, descriptions)
            )

    def _is_rank_taken(self, rank: int) -> bool:
        """Return whether a rank takes part in a session that has started and has not failed."""
        return any(
            session.state.has_started
            and session.state.failure is None
            and rank in session.peers.values()
            for session in self._sessions.values()
        )

    def _on_leave(self, request: Request, message: LeaveSession) -> None:
        session = self._find_session(message)
        if session is not None:
            self._answer(session, session.state.leave(message.rank, message.process_id))
            if session.state.is_empty:
                del self._sessions[session.name]
        request.reply(Done())

    def _on_await_failure(self, request: Request, message: AwaitSessionFailure) -> None:
        session = self._find_session(message)
        if session is not None:
            session.listeners[message.rank] = request
            self._answer(session, ())

    def _find_session(
        self, message: Contribute | GetMissingWorkers | LeaveSession | AwaitSessionFailure
    ) -> _CollectiveSession | None:
        """Return the session of a worker, or None."""
        if message.session_id:
            return self._sessions.get(message.session_id)
        for session in self._sessions.values():
            if session.state.has_worker(message.rank, message.process_id):
                return session
        return None

    def _forming_session(self) -> _CollectiveSession:
        for session in self._sessions.values():
            if session.is_forming:
                return session
        session = _CollectiveSession(f"{self._id}-{next(self._numbers)}", self._names)
        self._sessions[session.name] = session
        return session

    def _answer(self, session: _CollectiveSession, answers: Sequence[RankAnswer]) -> None:
        for rank, number, answer in answers:
            request = session.held_requests.pop((rank, number), None)
            if request is None:
                continue
            if isinstance(answer, RetryAfter):
                request.reply(RetryContribution(seconds=answer.seconds))
            elif isinstance(answer, CollectiveOutcome):
                flag, arrays = answer.value
                heads, buffers = encode_arrays(arrays)
                request.reply(
                    CollectiveResult(session_id=session.name, flag=flag, arrays=heads), buffers
                )
            else:
                request.reply(encode_error(answer))
        if session.state.failure is not None:
            failure = encode_error(session.state.failure)
            while session.listeners:
                session.listeners.popitem()[1].reply(failure)


_servers: dict[str, tuple[CollectiveServer, int]] = {}
"""Servers of this process by address, with the number of sessions that use each."""
_servers_lock = threading.RLock()


def acquire_server(
    address: str, names: Sequence[str], security: Security | None
) -> tuple[CollectiveServer, _ServerReference]:
    """Return this process's server at an address, and the function that releases it."""
    with _servers_lock:
        server, users = _servers.get(address, (None, 0))
        if server is None:
            server = CollectiveServer(address, names, security)
            server.start()
        _servers[address] = server, users + 1
    return server, _ServerReference(address, server)


class _ServerReference:
    """Releases a server; the last reference closes it."""

    def __init__(self, address: str, server: CollectiveServer) -> None:
        self._address, self._server = address, server
        self._is_held = [True]

    def __call__(self) -> None:
        try:
            self._is_held.pop()
        except IndexError:
            return
        with _servers_lock:
            found, users = _servers.get(self._address, (None, 0))
            if found is not self._server:  # a forked child does not own the parent's servers
                return
            if users > 1:
                _servers[self._address] = self._server, users - 1
                return
            del _servers[self._address]
            self._server.stop()


def _after_fork_in_child() -> None:
    global _servers_lock
    _servers_lock = threading.RLock()
    _servers.clear()


call_in_children(_after_fork_in_child)


# --- Channel for the worker of the server's process: no socket ------------------------------------
#
# A contribution is handled on the thread that sends it; the result arrives through a queue, from
# the thread of the last contributor.

_LOCAL_PEER = "own"
"""Peer of requests sent through this channel."""


class LocalServerChannel(RequestTrackingChannel):
    """Channel to a handler in this process.

    The handler gets buffers as read-only views; the caller must not change them before the answer.
    Read-only buffers of an answer are copied, since other workers get them, too.

    Args:
        address: Address for errors.
        handler: Answers requests, at once or later.
    """

    def __init__(self, address: str, handler: Handler) -> None:
        super().__init__(address)
        self._handler = handler
        self._tickets = itertools.count(1)
        self._answers: SimpleQueue[Reply] = SimpleQueue()

    def send(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> int:
        self._check_usable()
        ticket = next(self._tickets)
        self._unanswered.add(ticket)
        views = [view.toreadonly() for view in flat_views(buffers)]
        self._handler([_LocalRequest(ticket, message, views, self._answers.put)])
        return ticket

    def receive(self, timeout: float) -> Reply | None:
        self._check_usable()
        try:
            reply = self._answers.get(timeout=timeout) if timeout > 0 else self._answers.get(False)
        except Empty:
            return None
        self._unanswered.discard(reply.request_id)
        return reply

    def close(self) -> None:
        self._closed = True
        self._unanswered.clear()

    @property
    def has_pending(self) -> bool:
        return not self._answers.empty()

    def sockets(self) -> Sequence[Any]:
        return ()

    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        return


class _LocalRequest(Request):
    __slots__ = ("_put", "_ticket", "buffers", "message", "peer", "role")

    def __init__(
        self,
        ticket: int,
        message: msgspec.Struct,
        buffers: Sequence[Buffer],
        put: Callable[[Reply], None],
    ) -> None:
        self._ticket = ticket
        self._put = put
        self.message = message
        self.buffers = buffers
        self.peer = _LOCAL_PEER
        self.role = None

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        views = flat_views(buffers)
        copied = [
            memoryview(bytearray(each)) if borrowed or each.readonly else each for each in views
        ]
        self._put(Reply(self._ticket, message, copied))

    def fail(self, error: Exception) -> None:
        self._put(Reply(self._ticket, error, ()))
