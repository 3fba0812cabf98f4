"""What is asked of servers at a time: one request to each, and its answer, whenever it comes.

    under_way = UnderWay(calls, positions)      # each call was begun: it is sent
    under_way.finish() -> answers               # waits, and asks again as long as that makes sense

Calls that one thread begins go by one line to each server, which keeps their order: so one may be
begun while others are under way. Who waits for one hands on what comes for others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from headrace.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.parameter_server.leaders import Leaders
from headrace.parameter_server.lives import Lives
from headrace.parameter_server.messages import (
    ArrayForm,
    CarriedOut,
    CarryOut,
    Elsewhere,
    OutOfTurn,
    Reborn,
    buffer_of,
    contiguous,
    form_of,
    read_arrays,
)
from headrace.parameter_server.operations import Answer, Operation
from headrace.parameter_server.origin import finish, in_closure, under_way
from headrace.parameter_server.patience import Patience
from headrace.parameter_server.repeating import may_be_repeated
from headrace.transport.channel import Channel, Reply

__all__ = ["NOTHING_HERE", "Answered", "Ask", "Call", "Line", "UnderWay"]

NOTHING_HERE = "it has nothing of what it is asked for"
"""What a server says that does not lead the store that it is asked for."""


_SLICE_SECONDS = 1.0


class Ask(NamedTuple):
    """One operation for one server."""

    server: int
    operation: Operation
    arrays: Sequence[NDArray[Any]] = ()


Answered = tuple[Answer, list[NDArray[Any]]]


class _Servers(Protocol):
    lives: Lives
    leaders: Leaders

    def line(self, store: int, server: int) -> Line: ...

    def check_open(self) -> None: ...

    def patience(self, server: int, task: str, began: float | None = None) -> Patience: ...

    def is_elsewhere(self, store: int, server: int, message: Elsewhere) -> None: ...

    def name_of(self, server: int) -> str: ...


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

    def is_on_its_way(self, servers: _Servers) -> bool:
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

    def __init__(self, servers: _Servers, server: int, asks: Sequence[Ask]) -> None:
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

    def is_on_its_way(self, servers: _Servers) -> bool:
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
