"""What the coordinator tells parameter servers, on a thread of its own: their answers take a while.

What waits at a time is told at once, in its order: a worker is fenced before its closures settle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from headrace.coordinator.decided import Round
from headrace.coordinator.packing import unpack
from headrace.parameter_server.acknowledged import Acknowledged

__all__ = ["Hears", "NoServers", "ServerTalk", "Servers", "Talk"]


class Servers(Protocol):
    """The parameter servers, as far as closures are concerned. Other calls wait for all of them."""

    def acknowledged(self) -> tuple[Acknowledged, ...]:
        """Return what is known to be acknowledged, for workers; returns at once."""

    def learn(self, acknowledged: Sequence[Acknowledged]) -> None:
        """Take note of what a worker knows to be acknowledged; returns at once."""

    def settle(self, closures: Sequence[int], below: int) -> None:
        """Have them forget the keys of closures that have ended, and of all below a number."""

    def fence(self, worker: int) -> None:
        """Have them refuse the writes of a life of a worker."""

    def push_round(self, last: int, closures: Sequence[Any]) -> None:
        """Push the mean of what closures took as steps; `last` is the last of them."""


class Hears(Protocol):
    """Who wants to know when servers have been told, and with which error they could not be."""

    def low(self) -> int:
        """Return below which number all closures are over."""

    def fenced(self, session: int, error: Exception | None) -> None:
        """Take note that servers refuse the writes of a life of a worker."""

    def settled(self, closures: Sequence[int], error: Exception | None) -> None:
        """Take note that servers have forgotten keys."""

    def pushed(self, error: Exception | None) -> None:
        """Take note that the mean of a round is on the servers."""


class Talk(Protocol):
    """What a coordinator has servers told through."""

    def tell(self, sessions: list[int], closures: list[int], complete: Round | None) -> None:
        """Have servers told, soon: lives to fence, closures to settle, a round to push."""

    def end(self) -> None:
        """Have nothing more told."""


class NoServers:
    """Where there are no servers: what they would be told is done as soon as it is decided.

    Args:
        hears: Who wants to know.
    """

    def __init__(self, hears: Hears) -> None:
        self._hears = hears

    def tell(self, sessions: list[int], closures: list[int], complete: Round | None) -> None:
        """Report all of it as done."""
        for session in sessions:
            self._hears.fenced(session, None)
        if closures:
            self._hears.settled(closures, None)
        if complete is not None:
            self._hears.pushed(None)

    def end(self) -> None:
        """Do nothing: nothing is under way."""


class ServerTalk:
    """Tells servers what is to be settled and fenced, until `end`.

    Args:
        servers: Who is told.
        hears: Who wants to know.
    """

    def __init__(self, servers: Servers, hears: Hears) -> None:
        self._servers = servers
        self._hears = hears
        #: Lives to be fenced, after that closures to be settled, and a round; None: the end.
        self._jobs: SimpleQueue[tuple[list[int], list[int], Round | None] | None] = SimpleQueue()

    def tell(self, sessions: list[int], closures: list[int], complete: Round | None) -> None:
        """Have servers told, soon: lives to fence, closures to settle, a round to push."""
        if sessions or closures or complete is not None:
            self._jobs.put((sessions, closures, complete))

    def end(self) -> None:
        """End `run`, as soon as servers have answered what they were told."""
        self._jobs.put(None)

    def run(self) -> None:
        """Tell servers what is to be told; to be called on a thread of its own."""
        is_last = False
        while not is_last and (job := self._jobs.get()) is not None:
            sessions, closures, complete = list(job[0]), list(job[1]), job[2]
            while not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    is_last = True
                    break
                sessions += more[0]
                closures += more[1]
                complete = complete or more[2]  # there is one at a time
            for session in sessions:
                self._hears.fenced(session, _error_of(partial(self._servers.fence, session)))
            if closures:
                below = self._hears.low()
                error = _error_of(partial(self._servers.settle, closures, below))
                self._hears.settled(closures, error)
            if complete is not None:
                self._hears.pushed(_error_of(partial(self._push, complete)))

    def _push(self, complete: Round) -> None:
        self._servers.push_round(complete.last, [unpack(steps) for steps in complete.steps])


def _error_of(tell: Callable[[], None]) -> Exception | None:
    try:
        tell()
    except Exception as error:
        return error
    return None
