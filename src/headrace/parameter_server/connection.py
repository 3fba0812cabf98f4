"""Asking parameter servers: many at a time, from any thread, with patience.

    servers = Servers(["host1:2222", "host2:2222"])
    (step, _), (_, [rows]) = servers.ask_all([Ask(0, Count("steps")), Ask(1, Gather("w"), [ids])])

Each thread has channels of its own: nothing is handed from one thread to another, and what a thread
copies into shared memory keeps no other one waiting. What is asked of one server at a time is one
request; the servers work at the same time.

Rule 1. A server that cannot be reached is asked again until `timeout` seconds have passed; after 10
        s a warning says which it is.
Rule 2. What may have been carried out is repeated only if that does no harm: it changes nothing, or
        it has a key, or twice is as good as once (`may_be_repeated`). What never reached the server
        is always asked again.
Rule 3. What a thread asks of a server is carried out in that order, also where it does not wait
        for each answer (`begin_all`), and where something has to be asked again.
Rule 4. A server that was started again has lost what it held. That is reported once, before
        anything else is asked of it, to the log and to those who restore it or asked for it
        (`lives`). Who then misses a shard waits for it as for the server.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from numpy.typing import NDArray

from headrace.arguments import check_seconds, check_strings
from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.parameter_server.lives import Leaders, Lives, Patience
from headrace.parameter_server.messages import (
    ArrayForm,
    CarriedOut,
    CarryOut,
    Elsewhere,
    OutOfTurn,
    Reborn,
    ServerReply,
    ServerStatus,
    Status,
    buffer_of,
    contiguous,
    form_of,
    read_arrays,
)
from headrace.parameter_server.operations import (
    Answer,
    Assign,
    AssignIds,
    Count,
    Keyed,
    Lookup,
    Operation,
    Scatter,
    Settle,
)
from headrace.parameter_server.origin import finish, in_closure, under_way
from headrace.parameter_server.seats import PATIENCE, Acknowledged
from headrace.transport import zeromq
from headrace.transport.channel import Channel, Reply
from headrace.transport.security import Security

__all__ = [
    "NOTHING_HERE",
    "Answered",
    "Ask",
    "Servers",
    "UnderWay",
    "may_be_repeated",
]


_LARGEST_REQUEST = 16 << 30

_NO_KEY = (
    "a function that a coordinator scheduled writes on a thread that it started, and would write "
    "it again if it ran again. Write on the function's own thread, or start the other one with "
    "contextvars.copy_context().run; to one variable only one thread may write"
)

_FORKED = (
    "this process was forked from the one that made the strategy, to which variables and tables "
    "belong: read and write there, and pass values to processes that it starts, best with "
    "`subprocess` or the spawn method of multiprocessing"
)

_FORKED_IN_FUNCTION = (
    "this process was forked inside a function that a coordinator scheduled, and asks parameter "
    "servers: what it writes would not be told apart from what the function writes. Read and write "
    "in the function itself, and pass values to processes that it starts"
)


class Servers:
    """The parameter servers of a cluster, as those see them who ask.

    Args:
        addresses: Where they listen, by index.
        security: Keys of a client.
        timeout: Seconds for which a server that cannot be reached is asked again.
        of_worker: Whether scheduled functions ask: what may not be repeated must have a key then.
        replication: How many of the servers have what one of them has: 1 or 2.

    Raises:
        ValueError: There is none, or an address is not "host:port".
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        security: Security | None = None,
        timeout: float = 120.0,
        of_worker: bool = False,
        replication: int = 1,
    ) -> None:
        check_strings("addresses", addresses)
        check_seconds("timeout", timeout)
        if not addresses:
            raise ValueError("`addresses` must name a parameter server, but is empty")
        self.addresses = tuple(addresses)
        self.timeout = float(timeout)
        self.replication = replication
        #: Which server is asked for which store.
        self.leaders = Leaders(self.addresses, replication)
        self._of_worker = of_worker
        self._security = security
        #: Which lives of the servers are known.
        self.lives = Lives(len(addresses), self.name_of)
        self._lines = threading.local()
        #: Whose channel each is.
        self._owners: weakref.WeakKeyDictionary[Channel, int] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._closed = threading.Event()

    def __len__(self) -> int:
        return len(self.addresses)

    def ask(self, server: int, operation: Operation, *arrays: NDArray[Any]) -> Answered:
        """Ask one thing of one server; see `ask_all`."""
        return self.ask_all([Ask(server, operation, arrays)])[0]

    def ask_all(self, asks: Sequence[Ask]) -> list[Answered]:
        """Ask things of several servers at a time; return the answers in the order of the asks.

        What one server is asked is carried out in the order in which it stands. The arrays of an
        answer belong to whoever asked.

        Raises:
            UnavailableError: A server could not be reached in time, or was lost while it carried
                out what may not be repeated.
            HeadraceError: What a server answered with; the other servers carried out theirs.
            FailedPreconditionError: A function writes on a thread that it started, or who asks is
                in a process that was forked.
        """
        return self.begin_all(asks).finish()

    def begin_all(self, asks: Sequence[Ask]) -> UnderWay:
        """Ask as `ask_all` does, and return before the answers are here.

        Whoever asks finishes it, on this thread. What is asked meanwhile is carried out after it:
        by the same channels, which keep the order, or once it is finished.

        Raises:
            UnavailableError, FailedPreconditionError: As of `ask_all`.
        """
        self._check_process()
        if self._of_worker:
            for _, operation, _ in asks:
                if not may_be_repeated(operation):
                    raise FailedPreconditionError(_NO_KEY)
        by_server: dict[int, list[int]] = {}
        for position, ask in enumerate(asks):
            by_server.setdefault(ask.server, []).append(position)
        earlier = under_way()
        if not all(one.is_on_its_way(self) for one in earlier):
            finish(earlier)
        last = {call.server: call for one in earlier for call in one.calls if call.came is None}
        calls = []
        for server, positions in by_server.items():
            calls.append(Call(self, server, [asks[position] for position in positions]))
        for call in calls:
            call.begin(last.get(call.server))
        return UnderWay(calls, list(by_server.values()))

    def greet(self) -> None:
        """Wait until all servers answer, and ask nothing.

        Raises:
            UnavailableError: One did not answer in time.
        """
        self.ask_each(Settle(0))

    def ask_each(self, operation: Operation) -> None:
        """Ask all servers the same, whose answers say nothing.

        Raises:
            UnavailableError: One did not answer in time.
        """
        self.ask_all([Ask(server, operation) for server in range(len(self))])

    def status(self, server: int, timeout: float = 5.0) -> ServerStatus:
        """Ask a server what it has done.

        Raises:
            UnavailableError: It cannot be reached.
            DeadlineExceededError: It did not answer in time.
        """
        channel = self.connect(server)
        try:
            answer, _ = channel.call(Status(), timeout=timeout)
        finally:
            channel.close()
        assert isinstance(answer, ServerStatus)
        return answer

    def close(self) -> None:
        """Ask nothing more; whoever waits gets CancelledError. May be called twice."""
        self._closed.set()
        # Threads that are at work close their own channels (`check_open`).
        self._lines = threading.local()
        alive = {thread.ident for thread in threading.enumerate()}
        self._close_channels({owner for owner in self._owners.values() if owner not in alive})
        self._close_channels({threading.get_ident()})

    def _close_channels(self, owners: set[int]) -> None:
        for channel, owner in list(self._owners.items()):
            if owner in owners:
                channel.close()

    # --- for calls ----------------------------------------------------------------------------

    def name_of(self, server: int) -> str:
        """Return what a server is called in messages."""
        return f"parameter server {server} at {self.addresses[server]}"

    def line(self, store: int, server: int) -> Line:
        """Return this thread's line to a server that it asks for a store."""
        self.check_open()
        mine: dict[tuple[int, int], Line] | None = getattr(self._lines, "mine", None)
        if mine is None:
            mine = self._lines.mine = {}
        found = mine.get((store, server))
        if found is None:
            found = mine[store, server] = Line(self.connect(server))
            self._owners[found.channel] = threading.get_ident()
            self.check_open()  # `close` may not have seen it
        return found

    def connect(self, server: int) -> Channel:
        """Return a new channel to a server; whoever asks for it closes it."""
        self._check_process()
        return zeromq.connect(
            self.addresses[server],
            reply_type=ServerReply,
            security=self._security,
            # A server that stands still is waited for as long as one that is gone; where another
            # one has the same, for half of that at most, so that there is time to ask it.
            patience=min(PATIENCE, self.timeout / 2) if self.leaders.are_two else self.timeout,
            request_bytes=_LARGEST_REQUEST,
        )

    def acknowledged(self) -> tuple[Acknowledged, ...]:
        """Return what is known to be acknowledged of replicated stores, for other processes."""
        return self.lives.acknowledged() if self.leaders.are_two else ()

    def check_open(self) -> None:
        """Raise CancelledError if nothing is to be asked any more."""
        if self._closed.is_set():
            self._close_channels({threading.get_ident()})
            raise CancelledError("the connection to the parameter servers was closed")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise FailedPreconditionError(_FORKED_IN_FUNCTION if self._of_worker else _FORKED)

    def is_elsewhere(self, store: int, server: int, message: Elsewhere) -> None:
        """Take note that a server does not lead a store, and have it begin where nobody has it."""
        self.leaders.is_elsewhere(store, server, is_vacant=message.is_vacant)
        if message.outdated_at >= 0:
            writes = self.lives.writes(store)
            were = (
                f"{writes} were acknowledged" if writes else "some that were acknowledged it lacks"
            )
            other = store + (store + 1) % len(self) - server
            self.lives.is_outdated(
                store,
                f"{self.name_of(server)} had {message.outdated_at} updates of store {store}, and "
                f"{were}: it stood still or was cut off while {self.name_of(other)} led",
            )
        if (beginning := self.leaders.beginning(store)) is not None:
            self.line(store, store).channel.send(beginning)

    def patience(self, server: int, task: str, began: float | None = None) -> Patience:
        """Return how one waits for a server that was asked to do something."""
        return Patience(
            self.name_of(server),
            task,
            self.timeout,
            self.pause,
            began,
            lambda began_again: self.lives.why_lost(server, began_again=began_again),
        )

    def pause(self, seconds: float) -> None:
        """Wait; raise CancelledError if nothing is to be asked any more."""
        self._closed.wait(seconds)
        self.check_open()


# --------------------------------------------------------------------------------------------------
# What is asked of servers at a time: one request to each, and its answer, whenever it comes

#     under_way = UnderWay(calls, positions)    each call was begun: it is sent
#     under_way.finish() -> answers             waits, and asks again as long as that makes sense
#
# Calls that one thread begins go by one line to each server, which keeps their order: so one may be
# begun while others are under way. Who waits for one hands on what comes for others.

NOTHING_HERE = "it has nothing of what it is asked for"
"""What a server says that does not lead the store that it is asked for."""
_SLICE_SECONDS = 1.0


class Ask(NamedTuple):
    """One operation for one server."""

    server: int
    operation: Operation
    arrays: Sequence[NDArray[Any]] = ()


Answered = tuple[Answer, list[NDArray[Any]]]


class UnderWay:
    """What several servers are asked at a time, and have perhaps not answered yet.

    Args:
        calls: One for each server; they were begun.
        positions: Where each of its answers stands among all.
    """

    def __init__(self, calls: list[Call], positions: list[list[int]]) -> None:
        self.calls = calls
        self._positions = positions

    def finish(self) -> list[Answered]:
        """Wait for the answers, and ask again as long as that makes sense.

        Raises:
            HeadraceError: As of `Servers.ask_all`.
        """
        answers: list[Any] = [None] * sum(map(len, self._positions))
        failed: Exception | None = None
        now = time.monotonic()
        for call in self.calls:
            call.began = now  # before, nobody waited
        for call, positions in zip(self.calls, self._positions, strict=True):
            try:
                for position, answer in zip(positions, call.finish(), strict=True):
                    answers[position] = answer
            except Exception as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback holds this frame, which would hold it
        return answers

    def is_on_its_way(self, servers: Servers) -> bool:
        """Whether what is sent now by the same servers' channels comes after it."""
        return all(call.is_on_its_way(servers) for call in self.calls)


class Line:
    """A thread's channel to a server, and who waits for answers on it.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.waiting: dict[int, Call] = {}

    def receive(self) -> bool:
        """Hand the next answer to whoever waits for it; False: none has come for a while.

        Where the server is gone, or does not let this process in, all who wait hear it.
        """
        try:
            reply = self.channel.receive(_SLICE_SECONDS)
        except (UnavailableError, UnauthenticatedError) as error:
            waiting, self.waiting = self.waiting, {}
            for call in waiting.values():
                call.came = error.with_traceback(None)  # which holds this frame, and so the calls
            return True
        if reply is None:
            return False
        asked = self.waiting.pop(reply.ticket, None)
        if asked is not None:  # else it is for somebody who gave up, as by Ctrl-C
            asked.came = reply
        return True


class Call:
    """What one server is asked at a time."""

    def __init__(self, servers: Servers, server: int, asks: Sequence[Ask]) -> None:
        self._servers = servers
        self.server = server
        operations: list[Operation] = []
        forms: list[tuple[ArrayForm, ...]] = []
        self._buffers: list[memoryview] = []
        for _, operation, arrays in asks:
            operations.append(operation)
            of_each: list[ArrayForm] = []
            for array in arrays:
                of_each.append(form_of(array))
                self._buffers.append(buffer_of(contiguous(array)))
            forms.append(tuple(of_each))
        self._operations = tuple(operations)
        self._forms = tuple(forms)
        #: The answer, or why there is none; None: not yet.
        self.came: Reply | UnavailableError | UnauthenticatedError | None = None
        #: When whoever waits for it began to.
        self.began = time.monotonic()
        self._patient: Patience | None = None

    def begin(self, after: Call | None = None) -> None:
        """Send it.

        Args:
            after: What is on its way to the same server, and must be carried out before; a server
                that has another life by now, or did not carry that out, refuses this as well.
        """
        servers = self._servers
        servers.lives.wait(self.server, servers.check_open)
        if after is None:
            self._life = servers.lives.known(self.server)
            self._asked = servers.leaders.server_of(self.server)
        else:
            self._life, self._asked = after._life, after._asked
        self._line = servers.line(self.server, self._asked)
        message = CarryOut(self._operations, self._forms, self._life, follows=after is not None)
        self.came = None
        ticket = self._line.channel.send(
            servers.leaders.to_store(
                message, self.server, servers.lives.seen(self.server, self._life)
            ),
            self._buffers,
        )
        self._line.waiting[ticket] = self

    def is_on_its_way(self, servers: Servers) -> bool:
        """Whether what is sent now to the same server comes after it."""
        if isinstance(self.came, Reply):
            return isinstance(self.came.message, CarriedOut)
        return (
            self.came is None
            and servers is self._servers
            and servers.lives.known(self.server) == self._life != ""
            and servers.leaders.server_of(self.server) == self._asked
        )

    def finish(self) -> list[Answered]:
        """Wait for the answer, and ask again as long as that makes sense."""
        servers = self._servers
        while True:
            try:
                reply = self._receive()
                message = reply.message
                if isinstance(message, Exception):
                    try:
                        raise message
                    finally:
                        del message, reply  # its traceback holds this frame, which would hold it
                if isinstance(message, CarriedOut):
                    servers.leaders.answered(self.server, self._asked)
                    # An answer that was not read for a while may be of a life that is over by now.
                    if self._life in ("", servers.lives.known(self.server)):
                        servers.lives.met(
                            self.server, message.life, message.writes, message.position
                        )
                    given = read_arrays(message.arrays, reply.buffers)
                    return list(zip(message.answers, given, strict=True))
                if isinstance(message, Reborn):
                    servers.lives.met(self.server, message.life)
                elif isinstance(message, Elsewhere):
                    servers.is_elsewhere(self.server, self._asked, message)
                elif not isinstance(message, OutOfTurn):
                    raise FailedPreconditionError(
                        f"{servers.name_of(self.server)} answered with "
                        f"{type(message).__name__}; is it of another version of Headrace?"
                    )
            except UnavailableError as error:
                servers.leaders.is_gone(self.server, self._asked)
                if not (self._repeatable() or error.unsent):
                    raise self._unknown(error) from error
                self._patience().wait(error)
            except NotFoundError as error:
                # What a closure names was made before it was scheduled, so it was lost, also where
                # this process meets the server for the first time.
                is_lost = servers.lives.came_back(self.server) or in_closure() is not None
                # What fails changes nothing, so nothing was done where it was all.
                if not ((self._repeatable() or len(self._operations) == 1) and is_lost):
                    raise
                self._patience().wait(error)
            else:
                if isinstance(message, Elsewhere):
                    self._patience().wait(UnavailableError(NOTHING_HERE))
            finish(under_way())  # what was asked before it is done before it, also now
            self.begin()

    def _receive(self) -> Reply:
        """Return the answer; the server is alive, or the channel says that it is not."""
        while self.came is None:
            if not self._line.receive():
                self._servers.check_open()
                self._patience().say("has not answered")
        came, self.came = self.came, None
        if isinstance(came, Exception):
            try:
                raise came
            finally:
                del came  # as above
        return came

    def _repeatable(self) -> bool:
        return all(map(may_be_repeated, self._operations))

    def _patience(self) -> Patience:
        """Return how this call waits, from when it began; most never do."""
        if self._patient is None:
            task = f"carry out {self._names()}"
            self._patient = self._servers.patience(self.server, task, self.began)
        return self._patient

    def _names(self) -> str:
        kinds = dict.fromkeys(type(operation).__name__ for operation in self._operations)
        return ", ".join(kinds)

    def _unknown(self, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"{self._servers.name_of(self.server)} was lost while it carried out {self._names()}: "
            "it may be done or not, so it is not asked again. Read what is there, and decide; in "
            f"functions that a coordinator schedules, writes are repeated safely. {error}"
        )


# --- what may be asked of a server again, where nobody knows whether it was carried out -----------

_KEYED = frozenset(get_args(Keyed))


def may_be_repeated(operation: Operation) -> bool:
    """Whether an operation may be asked again that was perhaps carried out."""
    if type(operation) not in _KEYED or operation.key is not None:  # type: ignore[union-attr]
        return True
    match operation:
        case Assign(how=how):
            return how == "assign"
        case Scatter(how=how):
            return how in ("update", "min", "max")
        case Count(by=by):
            return by == 0
        # An id that is counted once too often is admitted a little earlier.
        case AssignIds() | Lookup():
            return True
    return False
