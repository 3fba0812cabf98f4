"""The task set: all tasks of a worker, from the first request for one to its end.

A task that is asked for and not known is looked up at the dispatcher, on a thread of its own; the
requests wait meanwhile. Of a task that is over only its number and ticket are remembered: of a
finished one, so that a late request gets its end; of a deleted one, so that it gets an explanation.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.config import ShardingPolicy
from headrace.service.messages import (
    DropClient,
    Elements,
    FailTask,
    FinishTask,
    GetElements,
    GetPlan,
    GetSplit,
    GetTask,
    HandBack,
    SplitGranted,
    TaskDefinition,
)
from headrace.service.worker.connections import Connections
from headrace.service.worker.failure import describe, for_clients
from headrace.service.worker.first_come import Departure
from headrace.service.worker.opening import open_plan
from headrace.service.worker.plans import PlanCache
from headrace.service.worker.task import Task, wrong_ticket
from headrace.transport.channel import Request

__all__ = ["TaskSet", "Undelivered"]

_log = logging.getLogger(__name__)

_REMEMBERED = 10_000


@dataclass(frozen=True)
class _Gone:
    """How a task that is over ended."""

    ticket: str
    """Empty: not known."""
    finished: bool
    """False: deleted."""


@dataclass(frozen=True, kw_only=True)
class Undelivered:
    """What the tasks of a worker had not delivered when it stopped."""

    hand_backs: tuple[HandBack, ...]
    elements: int
    """Elements that were produced and that nobody was given."""
    unacknowledged: int
    """Elements that were sent, and may have arrived."""

    @property
    def units(self) -> int:
        """Number of units in the hand-backs."""
        return sum(stop - start for word in self.hand_backs for start, stop in word.units)


class TaskSet:
    """The tasks of one worker.

    Args:
        worker_id: Who the worker is to the dispatcher.
        dispatcher: Connections to it; closed with the set.
        plans: Where plans are kept.
    """

    def __init__(self, worker_id: str, dispatcher: Connections, plans: PlanCache) -> None:
        self.worker_id = worker_id
        self._dispatcher = dispatcher
        self._plans = plans
        # Reentrant: a task may be over while it is handed its first requests.
        self._lock = threading.RLock()
        self._tasks: dict[int, Task] = {}
        #: Tasks that are being looked up, with the requests that wait.
        self._parked: dict[int, list[Request]] = {}
        #: The last tasks that are over, the oldest first.
        self._gone: dict[int, _Gone] = {}
        #: Over, and the dispatcher does not know yet.
        self._unreported: dict[int, FinishTask | FailTask] = {}
        self._to_look_up: SimpleQueue[int | None] = SimpleQueue()
        self._closed = threading.Event()
        self._draining = False
        self._starter = threading.Thread(
            target=self._start_tasks, name="headrace-task-starter", daemon=True
        )
        self._starter.start()

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of the tasks that are not finished."""
        with self._lock:
            return tuple(task_id for task_id, task in self._tasks.items() if not task.finished)

    @property
    def is_settled(self) -> bool:
        """Whether all tasks are finished and everything acknowledged."""
        with self._lock:
            tasks, parked = list(self._tasks.values()), bool(self._parked)
        return not parked and all(task.is_settled for task in tasks)

    def take(self, request: Request) -> None:
        """Answer a `GetElements` now or later. Does not wait."""
        message = request.message
        assert isinstance(message, GetElements)
        task_id = message.task_id
        with self._lock:
            task = self._tasks.get(task_id)
            gone = self._gone.get(task_id) if task is None else None
            closed = self._closed.is_set()
            if task is None and gone is None and not closed:
                if task_id not in self._parked:
                    self._to_look_up.put(task_id)
                self._parked.setdefault(task_id, []).append(request)
        if task is not None:
            task.take(request)
        elif closed:
            request.fail(_stops())
        elif gone is not None:
            _answer_late(request, message, gone)

    def delete(self, task_ids: Iterable[int]) -> None:
        """Call tasks off, because the dispatcher says so."""
        for task_id in task_ids:
            with self._lock:
                task = self._tasks.pop(task_id, None)
                parked = self._parked.pop(task_id, [])
                self._unreported.pop(task_id, None)
                if task is not None:
                    self._remember(task_id, _Gone(task.ticket, task.finished))
                elif task_id not in self._gone:
                    self._remember(task_id, _Gone("", finished=False))
            if task is not None:
                task.close()
            for request in parked:
                request.fail(_deleted(task_id))

    def tick(self) -> None:
        """Do what is due from time to time."""
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            task.forget_silent()

    def report_finished(self, say: Callable[[FinishTask | FailTask], object]) -> None:
        """Report the tasks that ended while the dispatcher could not be reached."""
        for task_id, message in list(self._unreported.items()):
            with contextlib.suppress(NotFoundError, FailedPreconditionError):
                say(message)
            self._unreported.pop(task_id, None)

    def drop_clients(
        self, departed: Iterable[tuple[int, str]], say: Callable[[DropClient], object]
    ) -> None:
        """Tell the dispatcher what clients that are gone had not acknowledged."""
        for task_id, client_id in departed:
            with self._lock:
                task, gone = self._tasks.get(task_id), self._gone.get(task_id)
            if task is None and gone is None:
                continue  # being looked up, or another one's
            departure = Departure((), ()) if task is None else task.depart(client_id)
            with contextlib.suppress(NotFoundError, FailedPreconditionError):
                say(
                    DropClient(
                        worker_id=self.worker_id,
                        task_id=task_id,
                        ticket=task.ticket if task is not None else gone.ticket if gone else "",
                        client_id=client_id,
                        units=departure.units,
                        lost=departure.lost,
                    )
                )
            if task is not None:
                task.forget(client_id)

    def drain(self) -> None:
        """Take no more units, produce no more copies; deliver what there is."""
        with self._lock:
            self._draining = True
            tasks = list(self._tasks.values())
        for task in tasks:
            task.cut()

    def call_off(self, timeout: float = 0.0) -> Undelivered:
        """Call all tasks off, without waiting for their threads. May be called twice.

        Args:
            timeout: Seconds to wait for requests for units that are under way.
        """
        with self._lock:
            self._closed.set()
            tasks = list(self._tasks.values())
            parked = list(itertools.chain.from_iterable(self._parked.values()))
            self._parked.clear()
        self._to_look_up.put(None)
        for request in parked:
            request.fail(_stops())
        left = [(task, task.close(_stops())) for task in tasks]
        until = time.monotonic() + timeout
        hand_backs = []
        for task, rest in left:
            units = task.units_to_hand_back(rest, max(0.0, until - time.monotonic()))
            if units:
                hand_backs.append(
                    HandBack(
                        worker_id=self.worker_id,
                        task_id=task.task_id,
                        ticket=task.ticket,
                        units=units,
                    )
                )
        return Undelivered(
            hand_backs=tuple(hand_backs),
            elements=sum(rest.elements for _, rest in left),
            unacknowledged=sum(rest.unacknowledged for _, rest in left),
        )

    def close(self, timeout: float = 1.0) -> None:
        """Call all tasks off and wait so many seconds for their threads. May be called twice."""
        until = time.monotonic() + timeout
        self.call_off()
        with self._lock:
            tasks, self._tasks = list(self._tasks.values()), {}
        self._dispatcher.close()
        for task in tasks:
            task.join(until - time.monotonic())
        if threading.current_thread() is not self._starter:
            self._starter.join(max(0.0, until - time.monotonic()))

    # --- the starting thread ------------------------------------------------------------------

    def _start_tasks(self) -> None:
        while (task_id := self._to_look_up.get()) is not None:
            try:
                self._start_task(task_id)
            except BaseException as error:
                # Nothing may end this thread: no task could be started any more.
                self._fail_parked(task_id, error)

    def _start_task(self, task_id: int) -> None:
        lookup = GetTask(worker_id=self.worker_id, task_id=task_id)
        definition = self._dispatcher.patiently(
            lambda stub, timeout: stub.call(lookup, timeout=timeout)
        )
        try:
            plan = self._plans.get(
                definition.digest,
                lambda offset: self._dispatcher.patiently(
                    lambda stub, timeout: stub.call(
                        GetPlan(digest=definition.digest, offset=offset), timeout=10 * timeout
                    )
                ),
            )
            task = self._make(definition, plan)
            del plan
            self._run(task)
        except (UnavailableError, CancelledError, NotFoundError):
            raise
        except BaseException as error:
            with self._lock:
                self._tasks.pop(task_id, None)
                self._remember(task_id, _Gone(definition.ticket, finished=True))
            self._report(definition, f"it cannot be started: {describe(error)}")
            raise

    def _run(self, task: Task) -> None:
        """Start a task, and hand it the requests that waited for it."""
        with self._lock:
            if self._closed.is_set() or task.task_id not in self._parked:
                return
            if self._draining:
                task.cut()
            task.start()
            self._tasks[task.task_id] = task
            # Under the lock: a client's next request must not overtake those that waited, or its
            # answers would be numbered in another order than its elements.
            for request in self._parked.pop(task.task_id):
                task.take(request)

    def _make(self, definition: TaskDefinition, plan: bytes) -> Task:
        dealt = definition.processing_mode == ShardingPolicy.DYNAMIC
        seed = definition.seed if dealt else _copy_seed(definition.seed, self.worker_id)

        def ask(number: int, want: int, done: int) -> SplitGranted:
            request = GetSplit(
                worker_id=self.worker_id,
                task_id=definition.task_id,
                ticket=definition.ticket,
                number=number,
                want=want,
                done=done,
            )
            return self._dispatcher.patiently(
                lambda stub, timeout: stub.call(request, timeout=timeout), self._closed
            )

        return Task(
            definition,
            lambda feed: open_plan(plan, definition, seed, feed),
            ask if dealt else None,
            lambda failure: self._report(definition, failure),
            lambda: self._bury(definition.task_id),
        )

    def _fail_parked(self, task_id: int, error: BaseException) -> None:
        with self._lock:
            parked = self._parked.pop(task_id, [])
        if isinstance(error, NotFoundError):
            said: Exception = _deleted(task_id)
        else:
            said = for_clients(error)
        if not isinstance(error, HeadraceError):
            _log.error("task %d cannot be started", task_id, exc_info=error)
        for request in parked:
            request.fail(said)

    # --- a task's thread ----------------------------------------------------------------------

    def _report(self, definition: TaskDefinition, failure: str | None) -> None:
        """Tell the dispatcher that a task is over; later, if it does not answer now."""
        task_id, ticket = definition.task_id, definition.ticket
        message: FinishTask | FailTask
        if failure is None:
            message = FinishTask(worker_id=self.worker_id, task_id=task_id, ticket=ticket)
        else:
            message = FailTask(
                worker_id=self.worker_id, task_id=task_id, ticket=ticket, reason=failure
            )
        try:
            self._dispatcher.once(lambda stub, t: stub.call(message, timeout=t))
        except (UnavailableError, DeadlineExceededError):
            # The clients need not wait for it: the heartbeat reports it later.
            self._unreported[task_id] = message
        except (NotFoundError, FailedPreconditionError) as error:
            _log.debug("task %d ended: %s", task_id, error)
        except BaseException:
            self._unreported[task_id] = message
            _log.exception("the end of task %d cannot be reported now", task_id)

    def _bury(self, task_id: int) -> None:
        """Keep of a task that is finished and settled only that it is."""
        with self._lock:
            task = self._tasks.pop(task_id, None)
            if task is not None:
                self._remember(task_id, _Gone(task.ticket, finished=True))

    def _remember(self, task_id: int, gone: _Gone) -> None:
        self._gone[task_id] = gone
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]


def _copy_seed(seed: int, worker_id: str) -> int:
    """Return the seed of a worker's own copy, so that copies are shuffled differently."""
    digest = hashlib.sha256(f"{seed} {worker_id}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 12


def _answer_late(request: Request, message: GetElements, gone: _Gone) -> None:
    if gone.ticket and not hmac.compare_digest(message.ticket.encode(), gone.ticket.encode()):
        request.fail(wrong_ticket(message.task_id))
    elif gone.finished:
        request.reply(Elements(first=0, count=0, end=True))
    else:
        request.fail(_deleted(message.task_id))


def _stops() -> CancelledError:
    return CancelledError("the worker stops")


def _deleted(task_id: int) -> CancelledError:
    return CancelledError(f"task {task_id} is not on this worker, or has been deleted")
