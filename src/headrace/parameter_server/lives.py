"""The lives of parameter servers, as one process sees them: known, over, and what follows.

    met("a") -> met("b")     the server was started again: it is reported, restored if somebody
                             does that here (`recover_with`), and those who asked are told

Rule 1. That happens once for each life, on the thread that finds out, in the context of no closure.
Rule 2. Other threads ask that server nothing until it is done.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable

from headrace.errors import describe_error

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
        self._lives = [""] * count
        self._writes = [0] * count
        self._came_back: set[int] = set()
        self._callbacks: list[Callable[[int], object]] = []
        self._recover: Callable[[int, int], object] | None = None
        #: Which thread sees to a server that came back, and what others wait for.
        self._busy: dict[int, tuple[int, threading.Event]] = {}

    def known(self, server: int) -> str:
        """Return which life of a server is known; "": none yet."""
        return self._lives[server]

    def writes(self, server: int) -> int:
        """Return how many writes a server has carried out, as far as is known."""
        return self._writes[server]

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

    def met(self, server: int, life: str, writes: int = 0) -> None:
        """Take note of the life of a server that answered."""
        if self._lives[server] == life:
            self._writes[server] = max(self._writes[server], writes)
            return
        with self._lock:
            before = self._lives[server]
            if before == life:
                return
            lost, self._writes[server] = self._writes[server], writes
            done = threading.Event()
            if before:
                self._came_back.add(server)
                self._busy[server] = (threading.get_ident(), done)
            self._lives[server] = life
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
            "%s was started again, and has lost the variables and tables that it held; %s",
            self._name_of(server),
            "they are restored now" if recover else "restore a checkpoint, or make them again",
        )
        if recover is not None:
            try:
                recover(server, lost)
            except Exception as error:
                _log.error("%s was not restored: %s", self._name_of(server), describe_error(error))
        for callback in list(self._callbacks):
            callback(server)
