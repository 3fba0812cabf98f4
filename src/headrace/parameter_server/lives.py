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
from collections.abc import Callable, Sequence

from headrace.errors import describe_error
from headrace.parameter_server.acknowledged import START, Acknowledged, Position

__all__ = ["Lives"]

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
        """Have `callback(server)` called when a server turns out to have been started again."""
        self._callbacks.append(callback)

    def recover_with(self, recover: Callable[[int, int], object] | None) -> None:
        """Have `recover(server, writes)` called before that; the latest one that was given is.

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
