"""The life of a coordinator's shell: until it is closed, nobody holds it, or the program ends."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable

from headrace.coordinator.closure import Closure, Phase
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.shell import Shell
from headrace.serving.life_cycle import LifeCycle

__all__ = ["RunningShell"]

_log = logging.getLogger(__name__)


class RunningShell(LifeCycle):
    """The coordinator's threads; they end when nobody holds it, or with the program."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self._shell = shell

    def _open(self) -> None:
        self._keep(self._shell.close)
        # Registered now, so that it is called before servers of this program are closed: those that
        # are here already, and have registered themselves.
        atexit.register(at_exit := _AtExit(self))
        self._keep(lambda: atexit.unregister(at_exit))
        self._shell.open()

    def keep(self, close: Callable[[], object]) -> None:
        """Have `close` called at the end."""
        self._keep(close)

    def end_with_program(self) -> None:
        """Say what nobody waited for, and stop."""
        if os.getpid() != self._process:
            return
        queue = self._shell.core.queue
        with self._shell.lock:
            left, failure = len(_left(queue)), queue.failure
        if left:
            _log.warning(
                "the program ends while %d functions that were scheduled are not over: they are "
                "called off; coordinator.join() waits for them",
                left,
            )
        if failure is not None:
            _log.warning(
                "the program ends before schedule() or join() raised this error of a function: %s",
                failure.error,
            )
        self.stop()


def _left(queue: ClosureQueue) -> list[Closure]:
    """Return closures whose end would make a difference: no longer where servers forget keys."""
    return [
        closure
        for closure in queue.unsettled.values()
        if closure.phase is not Phase.SETTLING or closure.steps is not None
    ]


class _AtExit:
    """Ends a coordinator at the end of the program, and does not keep it until then."""

    def __init__(self, running: RunningShell) -> None:
        self._running = weakref.ref(running)

    def __call__(self) -> None:
        running = self._running()
        if running is not None:
            running.end_with_program()
