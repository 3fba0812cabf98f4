"""The task set: all tasks of a worker, from the first request for one to its end.

A task that is asked for and not known is looked up at the dispatcher, on a thread of its own; the
requests wait meanwhile. A finished task is remembered by number, so that a late request gets its
end; a deleted one, so that a late request gets an explanation.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import TypeVar

from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.execution.build import start
from headrace.execution.iterator import ElementIterator
from headrace.plan.serialize import load_plan
from headrace.rewrites.optimize import optimize
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import (
    Elements,
    FinishTask,
    GetElements,
    GetPlan,
    GetSplit,
    GetTask,
    SplitGranted,
    TaskDefinition,
)
from headrace.service.worker.split_feed import SplitFeed
from headrace.service.worker.task_runner import TaskRunner
from headrace.transport.channel import Request
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["TaskSet"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_SECONDS = 1.0
_REMEMBERED = 10_000
_KEPT_FINISHED = 32


class TaskSet:
    """The tasks of one worker.

    Args:
        worker_id: Who the worker is to the dispatcher.
        connect: Opens a connection to the dispatcher, for the thread that calls it.
        dispatcher_timeout: Seconds for which a task waits for a dispatcher that does not answer.
    """

    def __init__(
        self, worker_id: str, connect: Callable[[], DispatcherStub], dispatcher_timeout: float
    ) -> None:
        self.worker_id = worker_id
        self._connect = connect
        self._dispatcher_timeout = dispatcher_timeout
        self._lock = threading.Lock()
        self._runners: dict[int, TaskRunner] = {}
        #: Tasks that are being looked up, with the requests that wait.
        self._parked: dict[int, list[Request]] = {}
        #: How tasks that are gone ended: True finished, False deleted.
        self._gone: dict[int, bool] = {}
        #: Connections that nobody uses now.
        self._idle_stubs: list[DispatcherStub] = []
        #: Finished, and the dispatcher does not know yet.
        self._untold: dict[int, FinishTask] = {}
        self._to_look_up: SimpleQueue[int | None] = SimpleQueue()
        self._closed = threading.Event()
        self._starter = threading.Thread(
            target=self._start_tasks, name="headrace-task-starter", daemon=True
        )
        self._starter.start()

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of the tasks that are not finished."""
        with self._lock:
            return tuple(
                task_id for task_id, runner in self._runners.items() if not runner.finished
            )

    def take(self, request: Request) -> None:
        """Answer a `GetElements` now or later. Does not wait."""
        message = request.message
        assert isinstance(message, GetElements)
        task_id = message.task_id
        with self._lock:
            runner = self._runners.get(task_id)
            gone = self._gone.get(task_id) if runner is None else None
            closed = self._closed.is_set()
            if runner is None and gone is None and not closed:
                if task_id not in self._parked:
                    self._to_look_up.put(task_id)
                self._parked.setdefault(task_id, []).append(request)
        if runner is not None:
            runner.take(request)
        elif gone or closed:
            if closed:
                request.fail(CancelledError("the worker stops"))
            else:
                request.reply(Elements(first=0, count=0, end=True))
        elif gone is not None:
            request.fail(_deleted(task_id))

    def delete(self, task_ids: Iterable[int]) -> None:
        """Call tasks off, because the dispatcher says so."""
        for task_id in task_ids:
            with self._lock:
                runner = self._runners.pop(task_id, None)
                parked = self._parked.pop(task_id, [])
                self._untold.pop(task_id, None)
                self._remember(task_id, finished=runner is not None and runner.finished)
            if runner is not None:
                runner.close(wait=False)
            for request in parked:
                request.fail(_deleted(task_id))

    def tell_finished(self, ask: Callable[[FinishTask], object]) -> None:
        """Tell the dispatcher of tasks that finished while it could not be reached."""
        for task_id, message in list(self._untold.items()):
            with contextlib.suppress(NotFoundError, FailedPreconditionError):
                ask(message)
            self._untold.pop(task_id, None)

    def close(self) -> None:
        """Call all tasks off and join their threads. May be called twice."""
        self._closed.set()
        self._to_look_up.put(None)
        with self._lock:
            runners, self._runners = list(self._runners.values()), {}
            parked = list(itertools.chain.from_iterable(self._parked.values()))
            self._parked.clear()
        for request in parked:
            request.fail(CancelledError("the worker stops"))
        for runner in runners:
            runner.close(wait=False)
        for runner in runners:
            runner.close()
        if threading.current_thread() is not self._starter:
            self._starter.join()
        with self._lock:
            idle, self._idle_stubs = self._idle_stubs, []
        for stub in idle:
            stub.close()

    # --- the starting thread ------------------------------------------------------------------

    def _start_tasks(self) -> None:
        while (task_id := self._to_look_up.get()) is not None:
            try:
                with self._connected() as stub:
                    self._start_task(task_id, stub)
            except Exception as error:
                self._fail_parked(task_id, error)

    def _start_task(self, task_id: int, stub: DispatcherStub) -> None:
        lookup = GetTask(worker_id=self.worker_id, task_id=task_id)
        definition = self._patiently(lambda timeout: stub.get_task(lookup, timeout=timeout))
        wanted = GetPlan(dataset_id=definition.dataset_id)
        plan = self._patiently(lambda timeout: stub.get_plan(wanted, timeout=10 * timeout)).plan
        stopped = threading.Event()
        with self._lock:
            if self._closed.is_set() or task_id not in self._parked:
                return
            runner = TaskRunner(
                task_id,
                lambda held: self._build(definition, plan, stopped, held),
                lambda: self._finish(task_id),
                stopped,
            )
            self._runners[task_id] = runner
            parked = self._parked.pop(task_id)
            finished = [number for number, other in self._runners.items() if other.finished]
            for number in finished[:-_KEPT_FINISHED]:
                del self._runners[number]
                self._remember(number, finished=True)
            # Under the lock: a client's next request must not overtake those that waited, or its
            # answers would be numbered in another order than its elements.
            for request in parked:
                runner.take(request)

    def _fail_parked(self, task_id: int, error: Exception) -> None:
        with self._lock:
            parked = self._parked.pop(task_id, [])
        if isinstance(error, NotFoundError):
            error = _deleted(task_id)
        elif not isinstance(error, HeadraceError):
            _log.error("task %d cannot be started", task_id, exc_info=error)
        for request in parked:
            request.fail(error)

    # --- a task's thread ----------------------------------------------------------------------

    def _build(
        self, definition: TaskDefinition, plan: bytes, stopped: threading.Event, held: ExitStack
    ) -> ElementIterator:
        node = optimize(load_plan(plan))
        # The same on all workers, so that they shuffle alike; another in the next repetition.
        epoch = definition.repetition
        if definition.processing_mode != ShardingPolicy.DYNAMIC:
            return start(node, epoch=epoch)
        stub = held.enter_context(self._connected())

        def ask(request: GetSplit) -> SplitGranted:
            return self._patiently(
                lambda timeout: stub.get_split(request, timeout=timeout), stopped
            )

        feed = SplitFeed(definition.task_id, ask, stopped)
        return start(node, epoch=epoch, splits=feed)

    def _finish(self, task_id: int) -> None:
        message = FinishTask(worker_id=self.worker_id, task_id=task_id)
        try:
            with self._connected() as stub:
                stub.finish_task(message, timeout=_ASK_SECONDS)
        except (UnavailableError, DeadlineExceededError):
            # The clients need not wait for it: the heartbeat tells it later.
            self._untold[task_id] = message
        except HeadraceError as error:
            _log.debug("task %d finished: %s", task_id, error)

    @contextmanager
    def _connected(self) -> Iterator[DispatcherStub]:
        """Lend a connection to the dispatcher to the calling thread; a used one where there is."""
        with self._lock:
            stub = self._idle_stubs.pop() if self._idle_stubs else None
        stub = stub or self._connect()
        try:
            yield stub
        finally:
            with self._lock:
                keep = not self._closed.is_set()
                if keep:
                    self._idle_stubs.append(stub)
            if not keep:
                stub.close()

    def _patiently(self, ask: Callable[[float], T], stopped: threading.Event | None = None) -> T:
        """Ask the dispatcher until it answers, for as long as the worker bears it."""
        given_up = stopped or self._closed
        return retry(
            ask,
            RetryPolicy(deadline=self._dispatcher_timeout, max_delay=1.0),
            whom="the worker's dispatcher",
            attempt_timeout=_ASK_SECONDS,
            stop=lambda seconds: given_up.wait(seconds) or self._closed.is_set(),
        )

    def _remember(self, task_id: int, *, finished: bool) -> None:
        self._gone[task_id] = finished
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]


def _deleted(task_id: int) -> CancelledError:
    return CancelledError(f"task {task_id} is not on this worker, or has been deleted")
