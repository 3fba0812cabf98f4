"""The place where workers meet: a port in the process of the first worker, and its halls.

One port serves all strategies that are made in that process for the same cluster, one after another
or at the same time. Those that the workers make together have a hall of their own, a *session*. Who
comes for the first time goes into the lobby: the session that has not begun.

Rule 1. A request is held until its meeting has a result. Where another comes in its place, it is
        answered with an error: that is for one who came before and is not waited for any more.
Rule 2. The handler does not wait. It adds arrays up, where the last contribution to a sum came.
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

from headrace.distribute.meeting.hall import (
    Brought,
    ComeAgain,
    Contribution,
    Due,
    Hall,
    Outcome,
    combine,
)
from headrace.distribute.meeting.messages import (
    Again,
    Contribute,
    Done,
    Lack,
    Lacking,
    Leave,
    Listen,
    MemberRequest,
    Result,
    decode,
    encode,
    failed,
)
from headrace.errors import HeadraceError, InvalidArgumentError, UnavailableError
from headrace.forks import in_each_child
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Buffer, Handler, Reply, Request
from headrace.transport.envelope import flat_views
from headrace.transport.limits import ServerLimits
from headrace.transport.request_tracking import RequestTrackingChannel
from headrace.transport.security import Security

__all__ = [
    "LARGEST_BYTES",
    "MeetingPlace",
    "OwnEnd",
    "place_at",
]

LARGEST_BYTES = 1 << 40
"""What workers may send each other: they are one program, and bound by their own memory."""
_EVERYWHERE = "0.0.0.0"
_SILENCE_SECONDS = 86_400.0
"""A worker that stands still keeps its connection: how long others wait for it is their business,
so a connection that is lost belongs to a process that ended."""


class _Session:
    """One hall, and who waits in it."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name = name
        self.hall = Hall(names, combine)
        #: Requests that are held, by rank and number of the meeting.
        self.held: dict[tuple[int, int], Request] = {}
        #: Requests of those who want to hear of its end, though they may not wait just then: the
        #: first worker may have ended by the time they ask.
        self.listeners: dict[int, Request] = {}
        #: Through which connection each rank came last.
        self.peers: dict[str, int] = {}
        #: The latest attempt of each worker's strategy.
        self.attempts: dict[tuple[int, str], int] = {}

    @property
    def is_lobby(self) -> bool:
        """Whether it has not begun, and may."""
        return not self.hall.has_begun and self.hall.failure is None


class MeetingPlace(LifeCycle):
    """Listens where the first worker of a cluster does, for as long as a session is open.

    Args:
        address: "host:port" of the first worker.
        names: Of the workers, by rank, for errors.
        security: The keys of a server; required where the address is not loopback.
    """

    def __init__(self, address: str, names: Sequence[str], security: Security | None) -> None:
        super().__init__()
        self._address = address
        self._security = security
        self._meetings = _Meetings(names)

    def _open(self) -> None:
        host, port = addresses.split(self._address)
        # A name that leads here from elsewhere only (a balancer, a container's host) is no
        # interface to listen at.
        own = host if addresses.is_local_host(host) else _EVERYWHERE
        server = zeromq.serve(
            self._meetings.handle,
            request_type=MemberRequest,
            host=own,
            port=port,
            security=self._security,
            limits=ServerLimits(
                request_bytes=LARGEST_BYTES,
                pending_reply_bytes=LARGEST_BYTES,
                total_pending_reply_bytes=LARGEST_BYTES,
                keepalive_timeout=_SILENCE_SECONDS,
            ),
            on_disconnect=self._meetings.gone,
        )
        self._keep(server.close)

    def own_end(self) -> OwnEnd:
        """Return the way here for the worker of this process."""
        return OwnEnd(self._address, self._meetings.handle)


class _Meetings:
    """The halls of one place, under one lock. It answers from whichever thread brings the last."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        #: Tells this process of the first worker from the one before.
        self._id = secrets.token_hex(8)
        self._sessions: dict[str, _Session] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        #: What is to be done, and whether it is being done: see `_do`.
        self._due: deque[Callable[[], None]] = deque()
        self._is_at_work = False

    def handle(self, requests: Sequence[Request]) -> None:
        """Answer requests, or hold them (`channel.Handler`)."""
        self._do(partial(self._handle_all, requests))

    def gone(self, peer: str) -> None:
        """Take note that a connection has ended."""
        self._do(partial(self._forget, peer))

    def _do(self, work: Callable[[], None]) -> None:
        """Do it; later, where a finalizer wants it in the middle of what this very thread does.

        A dropped strategy leaves whenever its garbage is collected.
        """
        with self._lock:
            self._due.append(work)
            if self._is_at_work:
                return
            try:
                self._is_at_work = True
                while self._due:
                    self._due.popleft()()
            finally:
                self._is_at_work = False

    def _handle_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self._handle(request)
            except (HeadraceError, ValueError, TypeError) as error:
                request.fail(error)

    def _forget(self, peer: str) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            rank = session.peers.pop(peer, None)
            if rank is not None and rank not in session.peers.values():
                self._answer(session, session.hall.gone(rank, now))

    def _handle(self, request: Request) -> None:
        message = request.message
        assert isinstance(message, Contribute | Lack | Leave | Listen)
        if not 0 <= message.rank < len(self._names):
            raise InvalidArgumentError(
                f"a worker says that it is number {message.rank} of those that train together, and "
                f"the first one knows of {len(self._names)}: {', '.join(self._names)}; give all "
                "the same cluster"
            )
        if isinstance(message, Contribute):
            self._contribute(request, message)
        elif isinstance(message, Lack):
            self._lack(request, message)
        elif isinstance(message, Leave):
            self._leave(request, message)
        else:
            self._listen(request, message)

    def _contribute(self, request: Request, message: Contribute) -> None:
        session = self._session_of(message) or self._lobby()
        if message.hall not in ("", session.name):
            request.reply(
                failed(
                    UnavailableError(
                        f"{self._names[0]} was started again, or its strategy was closed, while "
                        "the others went on: workers that train together are all started "
                        "together, and go on from a state that was saved"
                    )
                )
            )
            return
        strategy = message.rank, message.incarnation
        if message.attempt < session.attempts.get(strategy, 0):
            # Through a connection that was given up, after what came through the next: nobody
            # hears the answer.
            request.reply(failed(UnavailableError("it was brought again since")))
            return
        session.attempts[strategy] = message.attempt
        session.peers = {peer: rank for peer, rank in session.peers.items() if rank != message.rank}
        session.peers[request.peer] = message.rank
        brought = Brought(message.flag, decode(message.arrays, request.buffers))
        before = session.held.pop((message.rank, message.number), None)
        if before is not None:
            words = (
                f"another process, or strategy, of {self._names[message.rank]} came in its place"
            )
            before.reply(failed(UnavailableError(words)))
        session.held[message.rank, message.number] = request
        dues = session.hall.contribute(
            message.rank,
            message.incarnation,
            message.number,
            message.done,
            Contribution(message.what, message.kind, brought),
            time.monotonic(),
        )
        self._answer(session, dues)

    def _lack(self, request: Request, message: Lack) -> None:
        session = self._session_of(message)
        now = time.monotonic()
        words = [] if session is None else session.hall.lack(message.number, now)
        if words and session is not None and session.is_lobby and self._is_taken(message.rank):
            words.append(
                f"{self._names[message.rank]} takes part in a session that goes on already (is "
                "this a second process of that task?)"
            )
        request.reply(Lacking(words=tuple(words)))
        if session is not None and message.gives_up:
            self._answer(session, session.hall.give_up(message.number, message.waited, words))

    def _is_taken(self, rank: int) -> bool:
        """Say whether a rank takes part in a session that has begun, and goes on."""
        return any(
            session.hall.has_begun
            and session.hall.failure is None
            and rank in session.peers.values()
            for session in self._sessions.values()
        )

    def _leave(self, request: Request, message: Leave) -> None:
        session = self._session_of(message)
        if session is not None:
            self._answer(session, session.hall.leave(message.rank, message.incarnation))
            if session.hall.is_empty:
                del self._sessions[session.name]
        request.reply(Done())

    def _listen(self, request: Request, message: Listen) -> None:
        session = self._session_of(message)
        if session is not None:
            session.listeners[message.rank] = request
            self._answer(session, ())

    def _session_of(self, message: Contribute | Lack | Leave | Listen) -> _Session | None:
        """Return the session of a worker; None: it is in none."""
        if message.hall:
            return self._sessions.get(message.hall)
        for session in self._sessions.values():
            if session.hall.has(message.rank, message.incarnation):
                return session
        return None

    def _lobby(self) -> _Session:
        for session in self._sessions.values():
            if session.is_lobby:
                return session
        session = _Session(f"{self._id}-{next(self._numbers)}", self._names)
        self._sessions[session.name] = session
        return session

    def _answer(self, session: _Session, dues: Sequence[Due]) -> None:
        for rank, number, answer in dues:
            request = session.held.pop((rank, number), None)
            if request is None:
                continue
            if isinstance(answer, ComeAgain):
                request.reply(Again(seconds=answer.seconds))
            elif isinstance(answer, Outcome):
                flag, arrays = answer.value
                heads, buffers = encode(arrays)
                request.reply(Result(hall=session.name, flag=flag, arrays=heads), buffers)
            else:
                request.reply(failed(answer))
        if session.hall.failure is not None:
            end = failed(session.hall.failure)
            while session.listeners:
                session.listeners.popitem()[1].reply(end)


_places: dict[str, tuple[MeetingPlace, int]] = {}
"""By address: the places of this process, and how many sessions use each."""
_places_lock = threading.RLock()


def place_at(
    address: str, names: Sequence[str], security: Security | None
) -> tuple[MeetingPlace, _Release]:
    """Return the place of this process at an address, and what gives it back."""
    with _places_lock:
        place, users = _places.get(address, (None, 0))
        if place is None:
            place = MeetingPlace(address, names, security)
            place.start()
        _places[address] = place, users + 1
    return place, _Release(address, place)


class _Release:
    """Gives a place back; the last one closes it."""

    def __init__(self, address: str, place: MeetingPlace) -> None:
        self._address, self._place = address, place
        self._is_due = [True]

    def __call__(self) -> None:
        try:
            self._is_due.pop()
        except IndexError:
            return
        with _places_lock:
            found, users = _places.get(self._address, (None, 0))
            if found is not self._place:  # a forked child has none of the parent's
                return
            if users > 1:
                _places[self._address] = self._place, users - 1
                return
            del _places[self._address]
            self._place.stop()


def _leave_to_parent() -> None:
    global _places_lock
    _places_lock = threading.RLock()
    _places.clear()


in_each_child(_leave_to_parent)


# --- The way to the place for the worker in whose process it is: no socket ------------------------
#
# A contribution is handled on the thread that brings it; the answer comes by a queue, from
# whichever thread brought the last one.

_PEER = "own"
"""What requests that come this way have for a peer."""


class OwnEnd(RequestTrackingChannel):
    """A channel to a handler of this process.

    Buffers reach it as read-only views: they stay the caller's, who does not change them before the
    answer. What is read-only in an answer is copied, since others get it, too.

    Args:
        address: For errors.
        handler: Answers requests, some of them later.
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
        self._handler([_OwnRequest(ticket, message, views, self._answers.put)])
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


class _OwnRequest(Request):
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
        self.peer = _PEER
        self.role = None

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        views = flat_views(buffers)
        own = [memoryview(bytearray(each)) if borrowed or each.readonly else each for each in views]
        self._put(Reply(self._ticket, message, own))

    def fail(self, error: Exception) -> None:
        self._put(Reply(self._ticket, error, ()))
