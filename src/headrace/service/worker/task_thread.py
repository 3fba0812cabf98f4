"""The thread that reads a task's iterator, whatever becomes of the elements."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.execution.dealt import begun_units
from headrace.execution.iterator import ElementIterator, State
from headrace.service.worker.feed import Outlet
from headrace.service.worker.opening import units_whole

__all__ = ["TaskThread"]

_log = logging.getLogger(__name__)

OutletT = TypeVar("OutletT", bound=Outlet)


class TaskThread(ABC, Generic[OutletT]):
    """Reads one task on a thread of its own.

    Args:
        name: Of the task, for the thread and the log.
        open_plan: Makes the iterator, given `hand_over`.
        outlet: Who hears what was made.
    """

    def __init__(
        self, name: str, open_plan: Callable[[Callable[[], None]], ElementIterator], outlet: OutletT
    ) -> None:
        self._name = name
        # Given up as soon as it was called: it holds the plan.
        self._open_plan: Callable[[Callable[[], None]], ElementIterator] | None = open_plan
        self._outlet = outlet
        #: Held while something is put and counted: a thread of the plan may hand over, too.
        self._hand = threading.Lock()
        #: Units that are whole with what was counted, and those of which something was.
        self._units = self._touched = 0
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: The system has no thread left.
        """
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """Identifier of the thread; None before `start`."""
        return self._thread.ident

    def join(self, timeout: float) -> None:
        """Wait so many seconds for the thread: a function of the user's cannot be interrupted."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))

    @abstractmethod
    def hand_over(self) -> None:
        """Put what is in hand, before units are waited for; any thread may call this."""

    @abstractmethod
    def _produce(self) -> str | None:
        """Read everything; return why the task failed, if it did."""

    @abstractmethod
    def _give_up(self, error: BaseException) -> str:
        """Return why the task failed, after an error that escaped."""

    def _run(self) -> None:
        failure: str | None = None
        try:
            failure = self._produce()
        except BaseException as error:
            # What escaped was ours, or came while things were closed; the clients must hear of it.
            failure = self._give_up(error)
        finally:
            try:
                self._outlet.end(failure)
            except BaseException:
                _log.exception("%s cannot be ended", self._name)

    def _open(self) -> ElementIterator:
        open_plan, self._open_plan = self._open_plan, None
        assert open_plan is not None
        return open_plan(self.hand_over)

    def _count(self, state: State, begun_at_most: int) -> None:
        """Count the units that are whole at a state, and those that were begun before it."""
        begun = begun_units(state)
        self._units = units_whole(state, self._units)
        self._touched = max(self._touched, self._units, begun_at_most if begun is None else begun)
