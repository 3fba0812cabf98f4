"""The lives of parameter servers, as one process sees them: known, over, and what follows.

With replicas a server stands here for the store of its number, wherever that is.

    met("a") -> met("b")     the server was started again: it is reported, restored if somebody
                             does that here (`recover_with`), and those who asked are told

Rule 1. That happens once for each life, on the thread that finds out, in the context of no closure.
Rule 2. Other threads ask that server nothing until it is done.
Rule 3. What is known to be acknowledged of contents only grows; whoever learns it from another
        process (`learn`) knows it as well as from an answer.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headrace.errors import (
    DataLossError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
    describe_error,
)
from headrace.parameter_server.messages import CarryOut, Lead, RestoreShards, SaveShards
from headrace.parameter_server.seats import START, Acknowledged, Position
from headrace.waiting import Backoff, WaitWarnings

__all__ = ["Leaders", "Lives", "Patience"]


_log = logging.getLogger(__name__)

_SLICE_SECONDS = 1.0


class Lives:
    """Which lives of how many servers are known.

    Args:
        count: Of servers.
        name_of: What a server is called.
    """

    def __init__(self, count: int, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._lock = threading.Lock()
        #: A record is replaced whole, under the lock, and read without it.
        self._known = [Acknowledged()] * count
        #: Why the contents that are known are not served by who has some: these, and the reason.
        self._outdated: dict[int, tuple[str, str]] = {}
        #: Why the contents before them were lost, where it was not that a server was started again.
        self._losses: dict[int, str] = {}
        self._came_back: set[int] = set()
        self._callbacks: list[Callable[[int], object]] = []
        self._recover: Callable[[int, int], object] | None = None
        #: Which thread sees to a server that came back, and what others wait for.
        self._busy: dict[int, tuple[int, threading.Event]] = {}

    def known(self, server: int) -> str:
        """Return which life of a server is known; "": none yet."""
        return self._known[server].life

    def writes(self, server: int) -> int:
        """Return how many writes a server has carried out, as far as is known."""
        return self._known[server].writes

    def seen(self, server: int, life: str) -> Position:
        """Return up to where operations on these contents are known to be acknowledged."""
        known = self._known[server]
        return known.position if known.life == life else START

    def acknowledged(self) -> tuple[Acknowledged, ...]:
        """Return what is known to be acknowledged, by server."""
        return tuple(self._known)

    def learn(self, acknowledged: Sequence[Acknowledged]) -> None:
        """Take note of what another process knows to be acknowledged, by server.

        What it knows of other contents than this process is left out: the servers say which are
        there now.
        """
        with self._lock:
            for server, (known, other) in enumerate(zip(self._known, acknowledged, strict=False)):
                if known.life in ("", other.life):
                    self._known[server] = other.joined(known)

    def why_lost(self, server: int, *, began_again: bool) -> str:
        """Return why contents are lost, where it is not that a server was started again; or "".

        Args:
            server: Its number.
            began_again: Whether those before the contents that are there now are meant; else those
                that this process knows, which nobody serves.
        """
        if began_again:
            return self._losses.get(server, "")
        return self._outdated.get(server, ("", ""))[1]

    def is_outdated(self, server: int, words: str) -> None:
        """Take note, once, that what a server had of the contents that are known is outdated."""
        with self._lock:
            life = self._known[server].life
            if self._outdated.get(server, (None, ""))[0] == life:
                return
            self._outdated[server] = life, words
        _log.warning("%s", words)

    def came_back(self, server: int) -> bool:
        """Whether a server was started again since it was first asked."""
        return server in self._came_back

    def on_return(self, callback: Callable[[int], object]) -> None:
        """Have `callback(server)` called when a server turns out to have been started again.

        It is called on the thread that noticed, but in no closure, before anybody here asks the
        server anything else; it may restore what the server held.
        """
        self._callbacks.append(callback)

    def recover_with(self, recover: Callable[[int, int], object] | None) -> None:
        """Have `recover(server, writes)` called before those; the latest one that was given is.

        `writes` is how many writes the life before had carried out, as far as is known.
        """
        self._recover = recover

    def stop_recovering(self, recover: Callable[[int, int], object]) -> None:
        """Have it called no more, if it is the latest."""
        if self._recover == recover:
            self._recover = None

    def met(self, server: int, life: str, writes: int = 0, position: Position = START) -> None:
        """Take note of the life of a server that answered, and of what it has acknowledged."""
        now = Acknowledged(life, writes, position)
        if now == self._known[server] and server not in self._outdated:
            return
        with self._lock:
            known = self._known[server]
            before, lost = known.life, known.writes
            self._known[server] = now.joined(known) if before == life else now
            whose, words = self._outdated.pop(server, ("", ""))
            if before == life:
                return
            done = threading.Event()
            if before:
                self._came_back.add(server)
                self._busy[server] = (threading.get_ident(), done)
                self._losses[server] = words if whose == before else ""
        if not before:
            return
        try:
            # What is written then is not the write of the closure that found out.
            contextvars.Context().run(self._restored, server, lost)
        finally:
            with self._lock:
                if self._busy.get(server, (0, None))[1] is done:
                    del self._busy[server]
            done.set()

    def wait(self, server: int, check: Callable[[], object]) -> None:
        """Wait until a server that came back was seen to.

        Args:
            server: Its number.
            check: Called now and then; raises if nobody is to wait any more.
        """
        while (busy := self._busy.get(server)) is not None and busy[0] != threading.get_ident():
            busy[1].wait(_SLICE_SECONDS)
            check()

    def _restored(self, server: int, lost: int) -> None:
        recover = self._recover
        _log.warning(
            "%s; %s",
            self._losses.get(server)
            or f"{self._name_of(server)} was started again, and has lost the variables and tables "
            "that it held",
            "they are restored now"
            if recover
            else (
                "nothing in this process restores them: a CheckpointManager of the coordinator "
                "does, where there is one; else restore a checkpoint, or make them again"
            ),
        )
        if recover is not None:
            try:
                recover(server, lost)
            except Exception as error:
                _log.error("%s was not restored: %s", self._name_of(server), describe_error(error))
        for callback in list(self._callbacks):
            callback(server)


# --- which server is asked for which store, where each store is on two of them --------------------

# Rule 1. Store k is on servers k and k + 1. The first that answers for it is asked on; when it is
#         gone, or says that it does not lead, the other one is.
# Rule 2. The other one hears when the first was found gone or empty: only then may it take over.
# Rule 3. Where both are found empty, the store begins empty, or is restored.

A = TypeVar("A", CarryOut, SaveShards | RestoreShards)


class _Placed(NamedTuple):
    """Where a store is looked for.

    Attributes:
        place: 0 for the first server that may have it, 1 for the second.
        gone: Whether each of the two was found gone or empty, since one has answered.
        vacant: Whether each of the two was found empty.
    """

    place: int = 0
    gone: tuple[bool, bool] = (False, False)
    vacant: tuple[bool, bool] = (False, False)


class Leaders:
    """Where each store is looked for; without replicas, store k is on server k alone.

    Args:
        addresses: Of the servers.
        replication: How many servers have each store.
    """

    def __init__(self, addresses: tuple[str, ...], replication: int) -> None:
        self._addresses = addresses
        self.are_two = replication == 2
        #: A record is replaced whole: threads that find the same out do no harm to each other.
        self._placed = [_Placed()] * len(addresses)

    def server_of(self, store: int) -> int:
        """Return which server is to be asked for a store."""
        return (store + self._placed[store].place) % len(self._addresses)

    def to_store(self, message: A, store: int, seen: Position = START) -> A:
        """Return a message as the server that is asked for the store is to get it.

        Args:
            message: What is asked.
            store: Its number.
            seen: Up to where operations on the contents that it is meant for are acknowledged.
        """
        if not self.are_two:
            return message
        place, gone, _ = self._placed[store]
        return msgspec.structs.replace(message, store=store, insists=gone[1 - place], seen=seen)

    def answered(self, store: int, server: int) -> None:
        """Take note that a server has answered for a store."""
        if self.are_two:
            self._placed[store] = _Placed(place=int(server != store))

    def is_gone(self, store: int, server: int) -> None:
        """Take note that a server could not be reached; the other one is asked next."""
        self._not_here(store, server, is_gone=True, is_vacant=False)

    def is_elsewhere(self, store: int, server: int, *, is_vacant: bool) -> None:
        """Take note that a server does not lead a store; the other one is asked next."""
        self._not_here(store, server, is_gone=is_vacant, is_vacant=is_vacant)

    def _not_here(self, store: int, server: int, *, is_gone: bool, is_vacant: bool) -> None:
        if self.are_two:
            place = int(server != store)
            _, gone, vacant = self._placed[store]
            self._placed[store] = _Placed(
                1 - place, _with(gone, place, is_gone), _with(vacant, place, is_vacant)
            )

    def beginning(self, store: int) -> Lead | None:
        """Return what has a store begin empty, for its first server, where both have nothing."""
        placed = self._placed[store]
        if placed.vacant != (True, True):
            return None
        self._placed[store] = _Placed()
        second = (store + 1) % len(self._addresses)
        return Lead(store=store, seats=(self._addresses[store], self._addresses[second]))


def _with(of_both: tuple[bool, bool], place: int, value: bool) -> tuple[bool, bool]:
    return (value, of_both[1]) if place == 0 else (of_both[0], value)


# --------------------------------------------------------------------------------------------------
# Waiting for one parameter server: with a word after ten seconds, then each minute, and an end


class Patience:
    """That of one who asked a server for something.

    Args:
        server: What the server is called.
        task: What it was asked to do, for words.
        seconds: So long it may be away, or without what it held.
        pause: Waits for some seconds; raises if nobody is to wait any more.
        began: When the waiting began, by the monotonic clock; None: now.
        why_lost: Returns why what the server held is lost, where it was not started again; else "".
            It takes whether the server has begun again with nothing.
    """

    def __init__(
        self,
        server: str,
        task: str,
        seconds: float,
        pause: Callable[[float], object],
        began: float | None,
        why_lost: Callable[[bool], str],
    ) -> None:
        self._why_lost = why_lost
        self._server = server
        self._task = task
        self._seconds = seconds
        self._pause = pause
        self._began = time.monotonic() if began is None else began
        self._warnings = WaitWarnings()
        self._backoff = Backoff(0.02, longest=1.0, factor=1.3, jitter=0.2)

    def say(self, what: str) -> None:
        """Log what the server does, where that has lasted."""
        waited = time.monotonic() - self._began
        if self._warnings.is_due(waited):
            _log.warning(
                "%s %s for %.0f s; it was asked to %s",
                self._server,
                what,
                waited,
                self._task,
            )

    def wait(self, error: HeadraceError) -> None:
        """Wait before the next try.

        Args:
            error: What the last try ended with.

        Raises:
            DataLossError: Nobody has restored in time what the server held.
            UnavailableError: It could not be reached in time.
        """
        pause = next(self._backoff)
        if time.monotonic() + pause > self._began + self._seconds:
            began_again = isinstance(error, NotFoundError)
            why_lost = self._why_lost(began_again)
            if began_again:
                raise DataLossError(
                    f"{why_lost or f'{self._server} was started again'}, and in "
                    f"{self._seconds:g} s nobody restored what it held: {error}. Restore a "
                    "checkpoint; an `hr.CheckpointManager` that is there while training does so by "
                    "itself"
                ) from error
            if why_lost:
                raise DataLossError(
                    f"{why_lost}, and in {self._seconds:g} s the other server has not come back "
                    f"({error}). Start it again: if it still has them, nothing is lost; if it "
                    "ended, restore a checkpoint then, which an `hr.CheckpointManager` that is "
                    "there while training does by itself"
                ) from error
            raise UnavailableError(
                f"{self._server} did not answer for {self._seconds:g} s: is it running, and is "
                f"this its address? The last try: {error}"
            ) from error
        self.say(f"cannot do what it is asked ({error})")
        self._pause(pause)
