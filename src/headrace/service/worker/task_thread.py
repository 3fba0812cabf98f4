"""The thread that reads a task's iterator, independent of where the elements go."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.execution.assigned_iterators import count_started_splits
from headrace.execution.iterator import ElementIterator, State
from headrace.service.worker.producer_channel import ResultSink
from headrace.service.worker.task_iterator import count_complete_splits

__all__ = ["TaskThread"]

_log = logging.getLogger(__name__)

SinkT = TypeVar("SinkT", bound=ResultSink)


class TaskThread(ABC, Generic[SinkT]):
    """Reads one task on a separate thread.

    Args:
        name: Name of the task, for the thread and the log.
        open_plan: Creates the iterator, given `flush`.
        sink: Receiver of the output.
    """

    def __init__(
        self, name: str, open_plan: Callable[[Callable[[], None]], ElementIterator], sink: SinkT
    ) -> None:
        self._name = name
        # Dropped after its call, because it holds the plan.
        self._open_plan: Callable[[Callable[[], None]], ElementIterator] | None = open_plan
        self._sink = sink
        #: Held while output is passed on and counted, because a thread of the plan may call
        #: `flush`.
        self._put_lock = threading.Lock()
        #: Ends of the splits that are complete with the counted output, and of those with elements
        #: in it.
        self._done_to = self._delivered_end = 0
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: If the system cannot start another thread.
        """
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """Identifier of the thread; None before `start`."""
        return self._thread.ident

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds; user functions cannot be interrupted."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))

    @abstractmethod
    def flush(self) -> None:
        """Pass on buffered output before a wait for splits; any thread may call this."""

    @abstractmethod
    def _produce(self) -> str | None:
        """Read everything; return why the task failed, or None."""

    @abstractmethod
    def _fail(self, error: BaseException) -> str:
        """Return why the task failed, after an error that `_produce` did not handle."""

    def _run(self) -> None:
        failure: str | None = None
        try:
            failure = self._produce()
        except BaseException as error:
            # Such errors are bugs in Headrace or errors on closing; clients must receive them.
            failure = self._fail(error)
        finally:
            try:
                self._sink.end(failure)
            except BaseException:
                _log.exception("%s could not report its end", self._name)

    def _open_iterator(self) -> ElementIterator:
        open_plan, self._open_plan = self._open_plan, None
        assert open_plan is not None
        return open_plan(self.flush)

    def _count_splits(self, state: State, started_end: int) -> None:
        """Count the splits that are complete at a state, and those that were started before it."""
        num_started = count_started_splits(state)
        self._done_to = count_complete_splits(state, self._done_to)
        self._delivered_end = max(
            self._delivered_end, self._done_to, started_end if num_started is None else num_started
        )
