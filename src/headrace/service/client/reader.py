"""The reader: all tasks of one iteration, in one queue.

    heartbeat thread   dispatcher -> which tasks there are, and whether more will come
    task readers       workers -> chunks, each task in its order       (`task_reader`)
    read()             takes chunks as they come, in pieces of the size that is asked for

Elements are used up, and acknowledged, when the consumer asks for those behind them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from headrace.element.chunk import Chunk
from headrace.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.metrics import count_delivered
from headrace.plan.source import Position
from headrace.service.client.schedule import Budget
from headrace.service.client.task_reader import TaskReader
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import (
    ClientHeartbeat,
    CloseIteration,
    IterationOpened,
    OpenIteration,
    ReportUnreachable,
    TaskAddress,
)
from headrace.transport import inprocess
from headrace.transport.channel import Channel
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["RemoteReader"]

_log = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0
_SOON_SECONDS = 0.02
_CALL_SECONDS = 2.0
_CLOSE_SECONDS = 0.5
_OPEN_PATIENCE = RetryPolicy(deadline=60.0)
_WAIT_SECONDS = 0.5
_NO_WORKER_SECONDS = 5.0


class _Result(NamedTuple):
    task: TaskReader
    number: int
    value: Chunk | Exception


class RemoteReader:
    """Reads one iteration over the data service (`plan.source.Reader`).

    Args:
        opening: What to open.
        dispatcher: The dispatcher's address, for messages.
        dial: Opens a connection to the dispatcher, for the thread that calls it.
        connect: Opens a channel to a worker's address, for the thread that calls it.
        max_outstanding_requests: Requests and unused answers that may be outstanding.
        local_only: Whether to read the workers of this process alone.

    Raises:
        FailedPreconditionError: `local_only`, and there is no worker in this process.
        UnavailableError: The dispatcher did not answer for a minute.
    """

    def __init__(
        self,
        opening: OpenIteration,
        *,
        dispatcher: str,
        dial: Callable[[], DispatcherStub],
        connect: Callable[[str], Channel],
        max_outstanding_requests: int,
        local_only: bool = False,
    ) -> None:
        self._opening = opening
        self._dispatcher = dispatcher
        self._connect = connect
        self._local_only = local_only
        self._budget = Budget(max_outstanding_requests)
        self._changed = threading.Condition()
        self._results: deque[_Result] = deque()
        self._readers: dict[int, TaskReader] = {}
        #: Readers whose threads run.
        self._live: set[TaskReader] = set()
        self._listed: set[int] = set()
        self._unreachable: set[int] = set()
        self._finished = False
        self._fatal: Exception | None = None
        self._current: _Result | None = None
        self._offset = 0
        self._received = 0
        self.delivered: dict[str, int] = {}
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._since = time.monotonic()
        self._warned = False
        # Opened here, kept by the heartbeat thread.
        stub = dial()
        try:
            opened = self._open(stub)
            local = any(inprocess.is_local(task.worker_address) for task in opened.tasks)
            if local_only and not opened.finished and not local:
                raise FailedPreconditionError(
                    "Local reads require local workers, but no local worker is found. Run a "
                    '`WorkerServer` in this process, or use target_workers="AUTO"'
                )
        except BaseException:
            stub.close()
            raise
        self._update(opened.tasks, opened.finished)
        self._heartbeat = threading.Thread(
            target=self._beat, args=(stub,), name="headrace-client-heartbeat", daemon=True
        )
        self._heartbeat.start()

    def read(self, limit: int) -> Chunk | None:
        while True:
            current = self._current
            if current is not None:
                assert isinstance(current.value, Chunk)
                if self._offset < current.value.size:
                    return self._slice(current, current.value, limit)
                self._use_up(current)
                self._current = None
            result = self._next_result()
            if result is None:
                if self._fatal is None:
                    return None
                # Nothing more can come. Closed here, for the consumer may keep the error, and the
                # error keeps the consumer's frames and with them the iterator.
                self.close()
                raise self._fatal.with_traceback(None)
            if isinstance(result.value, Exception):
                self._use_up(result)
                raise result.value
            self._current, self._offset = result, 0

    def _slice(self, current: _Result, whole: Chunk, limit: int) -> Chunk:
        part = whole.slice(self._offset, self._offset + limit)
        self._offset += part.size
        self._received += part.size
        count_delivered(part.size)
        address = current.task.task.worker_address
        self.delivered[address] = self.delivered.get(address, 0) + part.size
        return part

    def _use_up(self, result: _Result) -> None:
        with self._changed:
            result.task.use_up(result.number)
            self._changed.notify_all()

    def _next_result(self) -> _Result | None:
        with self._changed:
            while not self._results:
                over = self._finished and not self._live
                if over or self._fatal is not None or self._closing.is_set():
                    return None
                self._warn_if_nobody_works()
                self._changed.wait(_WAIT_SECONDS)
            return self._results.popleft()

    def _warn_if_nobody_works(self) -> None:
        waited = time.monotonic() - self._since
        if self._live or self._readers or self._warned or waited < _NO_WORKER_SECONDS:
            return
        self._warned = True
        _log.warning(
            "waited %.0f s for elements: no worker has registered with the dispatcher at %s; "
            "start one, for example with `headrace worker --dispatcher %s`",
            waited,
            self._dispatcher,
            self._dispatcher,
        )

    def get_position(self) -> Position:
        return {"repetition": self._opening.repetition, "received": self._received}

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, has delivered so far."""
        return dict(self.delivered)

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        with self._changed:
            readers = list(self._readers.values())
            self._results.clear()
            self._changed.notify_all()
        for reader in readers:
            reader.stop()
        with self._changed:
            self._changed.notify_all()
        self._heartbeat.join()
        with self._changed:
            # The heartbeat may have begun to read another task meanwhile.
            readers = list(self._readers.values())
        for reader in readers:
            reader.stop()
            reader.join()
        self._current = None

    # --- what task readers tell (`TaskWatcher`) -----------------------------------------------

    def deliver(self, task: TaskReader, number: int, result: Chunk | Exception) -> None:
        self._results.append(_Result(task, number, result))
        self._changed.notify_all()

    def is_listed(self, task_id: int) -> bool:
        return task_id in self._listed

    def unreachable(self, task_id: int) -> None:
        with self._changed:
            self._unreachable.add(task_id)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._fatal = error
            self._changed.notify_all()

    def ended(self, task: TaskReader) -> None:
        with self._changed:
            self._live.discard(task)
            self._budget.remove(task.task.task_id)
            self._changed.notify_all()
        self._wake.set()

    # --- the dispatcher -----------------------------------------------------------------------

    def _open(self, stub: DispatcherStub) -> IterationOpened:
        return retry(
            lambda timeout: stub.open_iteration(self._opening, timeout=timeout),
            _OPEN_PATIENCE,
            whom=f"the dispatcher at {self._dispatcher}",
            attempt_timeout=_CALL_SECONDS,
        )

    def _beat(self, stub: DispatcherStub) -> None:
        delay = _SOON_SECONDS
        try:
            while True:
                if self._live and not self._unreachable:
                    delay = _SOON_SECONDS
                    self._wake.wait(_HEARTBEAT_SECONDS)
                elif not self._finished:
                    # Waiting for the dispatcher's verdict: soon, then more and more patiently.
                    self._closing.wait(delay)
                    delay = min(delay * 2, _HEARTBEAT_SECONDS)
                self._wake.clear()
                if self._closing.is_set() or (self._finished and not self._live):
                    break
                self._beat_once(stub)
                if self._fatal is not None:
                    break
            self._closing.wait()
        finally:
            self._say_goodbye(stub)
            stub.close()

    def _beat_once(self, stub: DispatcherStub) -> None:
        with self._changed:
            unreachable = sorted(self._unreachable)
        client_id = self._opening.client_id
        try:
            for task_id in unreachable:
                stub.report_unreachable(
                    ReportUnreachable(client_id=client_id, task_id=task_id), timeout=_CALL_SECONDS
                )
            update = stub.client_heartbeat(
                ClientHeartbeat(client_id=client_id), timeout=_CALL_SECONDS
            )
        except (UnavailableError, DeadlineExceededError) as error:
            _log.debug("the dispatcher at %s: %s; reading on", self._dispatcher, error)
            return
        except NotFoundError as error:
            self.fail(
                FailedPreconditionError(
                    f"the dispatcher at {self._dispatcher} does not know this reader any more "
                    f"({error}): it was restarted without `fault_tolerant_mode`, or this process "
                    "was not heard of for too long. Iterate over the dataset anew; give the "
                    "dispatcher a `work_dir` and `fault_tolerant_mode=True` so that it survives "
                    "restarts"
                )
            )
            return
        except HeadraceError as error:
            self.fail(error)
            return
        with self._changed:
            self._unreachable.difference_update(unreachable)
        self._update(update.tasks, update.finished)

    def _update(self, tasks: tuple[TaskAddress, ...], finished: bool) -> None:
        with self._changed:
            if self._local_only:
                tasks = tuple(t for t in tasks if inprocess.is_local(t.worker_address))
                finished = finished or not tasks
            self._listed = {task.task_id for task in tasks}
            self._finished = finished
            new = [task for task in tasks if task.task_id not in self._readers]
            for task in new:
                reader = TaskReader(
                    task,
                    self._opening.client_id,
                    self._connect,
                    self._budget,
                    self._changed,
                    self,
                )
                self._readers[task.task_id] = reader
                self._live.add(reader)
                reader.start()
            self._changed.notify_all()

    def _say_goodbye(self, stub: DispatcherStub) -> None:
        try:
            stub.close_iteration(
                CloseIteration(client_id=self._opening.client_id), timeout=_CLOSE_SECONDS
            )
        except HeadraceError as error:
            _log.debug("the iteration could not be closed: %s", error)
