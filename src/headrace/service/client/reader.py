"""The reader: one thread between a session and its sockets, and what the consumer takes from it.

    I/O thread   inbox -> session (what happened) ; session -> channels (what is to be sent)
    read()       takes what was delivered, in pieces of the size that is asked for

Elements are used up, and acknowledged, when the consumer asks for those after them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.metrics import count_delivered
from headrace.plan.source import Position
from headrace.service.client.session import Actions, Delivery, Session
from headrace.service.client.wires import TaskEvent, Verdict, Wires
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import (
    ClientUpdate,
    CloseIteration,
    Elements,
    IterationOpened,
    LostUnits,
    OpenIteration,
    ReportUnreachable,
    SettleTask,
    TaskAddress,
)
from headrace.transport import inprocess
from headrace.transport.channel import Channel, Reply
from headrace.transport.envelope import decode_error
from headrace.transport.inbox import Inbox
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["RemoteReader"]

_log = logging.getLogger(__name__)

_CALL_SECONDS = 2.0
_CLOSE_SECONDS = 0.5
_OPEN_PATIENCE = RetryPolicy(deadline=60.0)
_OPEN_WARNING_SECONDS = 5.0
_LONGEST_WAIT = 5.0
_RANGES_SHOWN = 5


class RemoteReader:
    """Reads one iteration over the data service (`plan.source.Reader`).

    Args:
        opening: What to open.
        dispatcher: The dispatcher's address, for messages.
        dial: Opens a connection to the dispatcher, for one call at a time.
        connect_dispatcher: Opens a channel to the dispatcher.
        connect: Opens a channel to a worker's address.
        max_outstanding_requests: Requests and unused answers that may be outstanding.
        wait_timeout: Seconds without anybody who could deliver, after which reading fails.
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
        connect_dispatcher: Callable[[], Channel],
        connect: Callable[[str], Channel],
        max_outstanding_requests: int,
        wait_timeout: float = 3600.0,
        local_only: bool = False,
    ) -> None:
        self._opening = opening
        self._dispatcher = dispatcher
        self._connect_dispatcher = connect_dispatcher
        self._connect = connect
        self._local_only = local_only
        self._pid = os.getpid()
        self._changed = threading.Condition()
        #: Used under `_changed` alone.
        self._session = Session(
            opening.client_id,
            dispatcher,
            max_outstanding_requests,
            time.monotonic(),
            wait_timeout=wait_timeout,
        )
        self._results: deque[Delivery] = deque()
        self._current: tuple[Delivery, Chunk] | None = None
        self._offset = 0
        self._received = 0
        self.delivered: dict[str, int] = {}
        self._closing = False
        self._reported_lost = False
        with dial() as stub:
            opened = self._open(stub)
        if opened.finished and opened.finished_by:
            _log.warning(
                "job %r has no elements left in pass %s: %s. A job's pass is read once; choose "
                "another job_name to read it again",
                opened.job_name,
                opening.pass_number,
                opened.finished_by,
            )
        tasks, finished = self._readable(opened.tasks, opened.finished)
        opened = msgspec.structs.replace(opened, tasks=tasks, finished=finished)
        self._session.opened(opened, time.monotonic())
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="headrace-client", daemon=True)
        self._thread.start()

    # --- the consumer -------------------------------------------------------------------------

    def read(self, limit: int) -> Chunk | None:
        self._check_process()
        while True:
            if self._current is not None:
                delivery, chunk = self._current
                if self._offset < chunk.size:
                    return self._slice(delivery, chunk, limit)
                self._use_up(delivery)
                self._current = None
            result = self._next_result()
            if result is None:
                self._end()
                return None
            if isinstance(result.payload, Exception):
                self._use_up(result)
                raise result.payload
            try:
                chunk = wire.decode(result.payload)
            except HeadraceError:
                self._use_up(result)
                raise
            self._current, self._offset = (result, chunk), 0

    def _slice(self, delivery: Delivery, whole: Chunk, limit: int) -> Chunk:
        part = whole.slice(self._offset, self._offset + limit)
        self._offset += part.size
        self._received += part.size
        count_delivered(part.size)
        address = delivery.task.worker_address
        self.delivered[address] = self.delivered.get(address, 0) + part.size
        return part

    def _use_up(self, delivery: Delivery) -> None:
        with self._changed:
            self._session.used_up(delivery.task.task_id, delivery.number)
        self._inbox.wake()

    def _next_result(self) -> Delivery | None:
        with self._changed:
            if not self._results and not self._session.is_over:
                self._session.waiting(time.monotonic())
                self._inbox.wake()
                while not (self._results or self._session.is_over or self._closing):
                    # In slices, so that a thread that died is noticed.
                    self._changed.wait(_LONGEST_WAIT)
                    if not self._thread.is_alive():
                        break
                self._session.waiting(None)
            return self._results.popleft() if self._results else None

    def _end(self) -> None:
        failure = self._session.failure
        if failure is not None:
            # Nothing more can come. Closed here, for the consumer may keep the error, and the
            # error keeps the consumer's frames and with them the iterator.
            self.close()
            raise failure.with_traceback(None)
        if not self._reported_lost:
            self._reported_lost = True
            _warn_of_loss(self._session.lost)

    def get_position(self) -> Position:
        return {"pass": list(self._opening.pass_number), "received": self._received}

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, has delivered so far."""
        return dict(self.delivered)

    @property
    def lost(self) -> tuple[LostUnits, ...]:
        """What was lost with workers; known at the end of the iteration."""
        return self._session.lost

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # the parent's, before a fork
        with self._changed:
            self._closing = True
            self._results.clear()
            self._changed.notify_all()
        self._inbox.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._current = None

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "an iterator over the data service belongs to the process that opened it; iterate "
                "over the dataset in the forked process (or start it with the spawn method)"
            )

    # --- the I/O thread -----------------------------------------------------------------------

    def _run(self) -> None:
        wires = Wires(self._inbox, self._connect_dispatcher, self._connect)
        try:
            while not self._closing:
                with self._changed:
                    actions = self._session.act(time.monotonic())
                    if self._session.is_over:
                        self._changed.notify_all()
                self._do(actions, wires)
                self._take(wires.wait(min(actions.wake_in, _LONGEST_WAIT)))
        except BaseException as error:
            _log.exception("reading from the dispatcher at %s failed", self._dispatcher)
            self._fail(HeadraceError(f"reading failed by an error of its own: {error!r}"))
        finally:
            wires.close(CloseIteration(client_id=self._opening.client_id))

    def _do(self, actions: Actions, wires: Wires) -> None:
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for task_id in actions.drops:
            wires.drop(task_id)
        for task, number, message in actions.asks:
            try:
                wires.ask(task, number, message)
            except UnavailableError as error:
                with self._changed:
                    self._session.disconnected(task.task_id, error, time.monotonic())
            except (HeadraceError, ValueError) as error:
                # A worker that cannot be read this way is the trouble of that worker alone, unless
                # the user chose the way.
                with self._changed:
                    self._unreadable(task, error)
        for request in actions.calls:
            wires.call(request)

    def _unreadable(self, task: TaskAddress, error: Exception) -> None:
        if isinstance(error, FailedPreconditionError):
            self._session.fail(error)
        else:
            problem = UnavailableError(f"{task.worker_address!r} is no address to read: {error}")
            self._session.disconnected(task.task_id, problem, time.monotonic())

    def _take(self, events: list[TaskEvent | Verdict]) -> None:
        now = time.monotonic()
        with self._changed:
            before = len(self._results)
            for event in events:
                if isinstance(event, Verdict):
                    self._take_verdict(event, now)
                else:
                    self._take_answer(event, now)
            if len(self._results) > before or self._session.is_over:
                self._changed.notify_all()

    def _take_answer(self, event: TaskEvent, now: float) -> None:
        task_id, number, what = event
        if isinstance(what, UnavailableError):
            self._session.disconnected(task_id, what, now)
        elif isinstance(what, Reply):
            answer = what.message
            if not isinstance(answer, Elements | Exception):
                answer = HeadraceError(f"the worker answered with {type(answer).__name__}")
            payload = _error_of(answer) or what.buffers
            self._results += self._session.answered(task_id, number, answer, payload, now)
        else:
            self._session.fail(what)

    def _take_verdict(self, event: Verdict, now: float) -> None:
        session, asked = self._session, event.asked
        answer = event.what.message if isinstance(event.what, Reply) else event.what
        if isinstance(answer, ClientUpdate):
            tasks, finished = self._readable(answer.tasks, answer.finished)
            session.updated(msgspec.structs.replace(answer, tasks=tasks, finished=finished), now)
        elif isinstance(answer, UnavailableError):
            _log.debug("the dispatcher at %s: %s; reading on", self._dispatcher, answer)
            session.unheard(now)
        elif isinstance(asked, SettleTask):
            session.settled(asked.task_id)
        elif isinstance(asked, ReportUnreachable):
            session.reported(asked.task_id)
        elif isinstance(answer, NotFoundError):
            session.fail(
                FailedPreconditionError(
                    f"the dispatcher at {self._dispatcher} does not know this reader any more "
                    f"({answer}): it was restarted without `fault_tolerant_mode`, or this process "
                    "was not heard from for too long. Iterate over the dataset again; give the "
                    "dispatcher a `work_dir` and `fault_tolerant_mode=True` so that it survives "
                    "restarts"
                )
            )
        elif isinstance(answer, HeadraceError):
            session.fail(answer)

    def _fail(self, error: HeadraceError) -> None:
        with self._changed:
            self._session.fail(error)
            self._changed.notify_all()

    # --- opening ------------------------------------------------------------------------------

    def _open(self, stub: DispatcherStub) -> IterationOpened:
        began, warned = time.monotonic(), False

        def ask(timeout: float) -> IterationOpened:
            nonlocal warned
            waited = time.monotonic() - began
            if waited >= _OPEN_WARNING_SECONDS and not warned:
                warned = True
                _log.warning(
                    "the dispatcher at %s has not answered for %.0f s: is it running, and is this "
                    "its address? Trying for %.0f s in all",
                    self._dispatcher,
                    waited,
                    _OPEN_PATIENCE.deadline,
                )
            return stub.open_iteration(self._opening, timeout=timeout)

        opened = retry(
            ask,
            _OPEN_PATIENCE,
            whom=f"the dispatcher at {self._dispatcher}",
            attempt_timeout=_CALL_SECONDS,
        )
        local = any(inprocess.is_local(task.worker_address) for task in opened.tasks)
        if self._local_only and not opened.finished and not local:
            raise FailedPreconditionError(
                "Local reads require local workers, but no local worker is found. Run a "
                '`WorkerServer` in this process, or use target_workers="AUTO"'
            )
        return opened

    def _readable(
        self, tasks: tuple[TaskAddress, ...], finished: bool
    ) -> tuple[tuple[TaskAddress, ...], bool]:
        """Leave out the workers that this client does not read."""
        if not self._local_only:
            return tasks, finished
        tasks = tuple(task for task in tasks if inprocess.is_local(task.worker_address))
        return tasks, finished or not tasks


def _error_of(answer: Elements | Exception) -> Exception | None:
    """Return the error that stands in an element's place, if one came."""
    if not isinstance(answer, Elements) or answer.error is None:
        return None
    try:
        return decode_error(answer.error)
    except msgspec.DecodeError as error:
        return HeadraceError(f"the worker sent an error that cannot be read: {error}")


def _warn_of_loss(lost: tuple[LostUnits, ...]) -> None:
    """Say what an epoch lost: how many, with which worker, which places."""
    if not lost:
        return
    count = sum(each.count for each in lost)
    parts = []
    for each in lost:
        ranges = [f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in each.units]
        shown = ", ".join(ranges[:_RANGES_SHOWN])
        more = len(ranges) - _RANGES_SHOWN
        shown += f" and {more} more ranges" if more > 0 else ""
        if each.given_up:
            how = f"given up: every worker that read them died, the last at {each.worker_address}"
        else:
            how = f"with the worker at {each.worker_address}"
        parts.append(f"{each.count} {how} (positions {shown})")
    _log.warning(
        "this pass lost up to %d positions of the dataset with workers that died: %s",
        count,
        "; ".join(parts),
    )
