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
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from headrace.arguments import check_seconds, check_strings
from headrace.errors import CancelledError, FailedPreconditionError
from headrace.parameter_server.acknowledged import Acknowledged
from headrace.parameter_server.asking import Answered, Ask, Call, Line, UnderWay
from headrace.parameter_server.leaders import Leaders
from headrace.parameter_server.lives import Lives
from headrace.parameter_server.messages import Elsewhere, ServerReply, ServerStatus, Status
from headrace.parameter_server.operations import Operation, Settle
from headrace.parameter_server.origin import finish, under_way
from headrace.parameter_server.patience import Patience
from headrace.parameter_server.repeating import may_be_repeated
from headrace.parameter_server.seats import PATIENCE
from headrace.transport import zeromq
from headrace.transport.channel import Channel
from headrace.transport.security import Security

__all__ = ["Servers"]

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

    def on_return(self, callback: Callable[[int], object]) -> None:
        """Have `callback(server)` called when a server turns out to have been started again.

        It is called on the thread that noticed, but in no closure, before anybody here asks the
        server anything else; it may restore what the server held.
        """
        self.lives.on_return(callback)

    def close(self) -> None:
        """Ask nothing more; whoever waits gets CancelledError. May be called twice."""
        self._closed.set()
        # Those of other threads that are at work go with the last use of them.
        self._lines = threading.local()
        alive = {thread.ident for thread in threading.enumerate()}
        for channel, owner in list(self._owners.items()):
            if owner == threading.get_ident() or owner not in alive:
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
