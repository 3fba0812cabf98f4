"""The reader: one thread between a session and its sockets, and what the consumer takes from it.

    I/O thread   inbox -> session (what happened) ; session -> channels (what is to be sent)
    read()       takes what was delivered, in pieces of the size that is asked for

Elements are used up, and acknowledged, when the consumer asks for those after them. They are kept
here until they cannot be asked for again (`keeping`). An interruption may come at any instruction
of the consumer's: `read` may be left anywhere, and `go_back` finds its way from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.metrics import count_delivered
from headrace.plan.source import Position
from headrace.service.client.keeping import Given, Keeper, Kept
from headrace.service.client.losses import describe_loss
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
        keeper: Knows the readers that may be opened again after an interruption.

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
        keeper: Keeper | None = None,
    ) -> None:
        self._opening = opening
        self._dispatcher = dispatcher
        self._connect_dispatcher = connect_dispatcher
        self._connect = connect
        self._local_only = local_only
        self._pid = os.getpid()
        # Of C, so that an interruption never leaves it locked.
        self._lock = threading.RLock()
        #: What the consumer waits for.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Used under `_lock` alone.
        self._session = Session(
            opening.client_id,
            dispatcher,
            max_outstanding_requests,
            time.monotonic(),
            wait_timeout=wait_timeout,
        )
        self._results: deque[Delivery] = deque()
        self.name, self.pass_number = opening.client_id, opening.pass_number
        self._keeper = keeper
        self._keeps = keeper is not None and keeper.is_watched
        self._kept = Kept()
        #: What is to be given again.
        self._again: list[Given] = []
        #: How often it was left, to be opened again.
        self._turns = 0
        self._is_at_end = False
        self._current: Given | None = None
        #: Elements and errors that were given, and the most that ever were.
        self._received = self._counted = 0
        self.delivered: dict[str, int] = {}
        self._closing = False
        self._reported_lost = False
        self._dial = dial
        #: Whether the dispatcher may know this client, and whether it said what there is to read.
        self._is_joining = self._is_open = False
        #: The I/O thread's, which looks before it waits for the first time.
        self._inbox: Inbox | None = None
        #: Taken by the thread when it begins; released when it is over.
        self._begun, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._thread: threading.Thread | None = None
        if keeper is not None:
            keeper.add(self)

    # --- the consumer -------------------------------------------------------------------------

    def read(self, limit: int) -> Chunk | None:
        self._check_process()
        self._begin()
        while True:
            given = self._current
            if given is not None:
                self._renew_lease()
                if self._received < given.stop:
                    return self._give(given, limit)
                self._use_up(given.delivery)
                self._current = None
            given = self._next_given()
            if given is None:
                self._end()
                self._is_at_end = True
                return None
            self._current = given

    def _begin(self) -> None:
        """Open, and start the thread, unless that was done: who does not read asks for nothing.

        Where an interruption leaves that open, it is started twice, and one ends at once.
        """
        if not self._is_open and not self._closing:
            self._join()
        if not self._begun.locked():
            threading.Thread(target=self._run, name="headrace-client", daemon=True).start()

    def _join(self) -> None:
        """Open the iteration: here, so that after an interruption it is the same client again."""
        self._is_joining = True
        with self._dial() as stub:
            opened = self._open(stub)
        if opened.finished and opened.finished_by:
            _log.warning(
                "job %r has no elements left in pass %s: %s. A job's pass is read once; choose "
                "another job_name to read it again",
                opened.job_name,
                self._opening.pass_number,
                opened.finished_by,
            )
        tasks, finished = self._readable(opened.tasks, opened.finished)
        opened = msgspec.structs.replace(opened, tasks=tasks, finished=finished)
        self._session.opened(opened, time.monotonic())
        self._is_open = True

    def _next_given(self) -> Given | None:
        """Return what comes next: again, after an interruption, or for the first time."""
        if self._again:
            return self._again.pop(0)
        result = self._next_result()
        if result is None:
            return None
        content = _content(result)
        size = 1 if isinstance(content, Exception) else content.size
        given = Given(result, content, self._received, size, _bytes_of(result))
        if not self._keeps:
            self._kept.forget(self._received)
        # Kept first, so that an interruption here loses nothing: `go_back` sees that it is there.
        self._kept.add(given)
        self._results.popleft()
        return given

    def _give(self, given: Given, limit: int) -> Chunk:
        if isinstance(given.content, Exception):
            self._received = given.stop
            raise given.content.with_traceback(None)
        start = self._received - given.start
        part = given.content.slice(start, start + limit)
        self._received += part.size
        new = self._received - max(self._counted, self._received - part.size)
        if new > 0:
            self._counted = self._received
            count_delivered(new)
            address = given.delivery.task.worker_address
            self.delivered[address] = self.delivered.get(address, 0) + new
        return part

    # --- keeping --------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether much is kept that may be asked for again."""
        return self._keeps and self._kept.is_full

    def forget(self, before: int) -> None:
        """Forget what was given before so many elements and errors."""
        self._kept.forget(before)

    def go_back(self, place: int) -> bool:
        """Give again what came after `place`; False: it is closed, or that was forgotten."""
        since = self._kept.since(place) if self._is_at_end or not self._closing else None
        last = self._kept.last
        if since is None or (last is None and place != self._received):
            return False
        if last is not None and self._results and self._results[0] is last.delivery:
            self._results.popleft()
        if self._current is not None:
            # It is acknowledged, and kept here.
            self._use_up(self._current.delivery)
            self._current = None
        self._again, self._received = since, place
        return True

    def _renew_lease(self) -> None:
        """Wait, after a long pause of this process, until the dispatcher knows it again.

        Raises:
            FailedPreconditionError: It counted as gone: what was delivered may be with others.
        """
        with self._lock:
            may_use = self._session.may_use(time.monotonic())
        if not may_use:
            self._wait(lambda: self._session.may_use(time.monotonic()))
            if self._session.failure is not None:
                self._end()

    def _use_up(self, delivery: Delivery) -> None:
        with self._lock:
            self._session.used_up(delivery.task.task_id, delivery.number)
        self._wake()

    def _next_result(self) -> Delivery | None:
        """Return the next delivery, which stays where it is; None: there is none."""
        if not self._results:
            self._wait(lambda: bool(self._results) or self._session.is_over)
        return self._results[0] if self._results else None

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for the I/O thread.

        Raises:
            CancelledError: The reader was left, from another thread.
        """
        turn = self._turns
        with self._lock:
            if is_over():
                return
            self._session.waiting(time.monotonic())
        self._wake()
        while not (is_over() or self._closing) and self._turns == turn:
            # In slices, so that a thread that died is noticed. What rings may be lost by an
            # interruption, so it says nothing but that it is time to look.
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=_LONGEST_WAIT)
            if not self._over.locked():
                break
        with self._lock:
            self._session.waiting(None)
        if self._turns != turn:
            raise CancelledError("the iterator was interrupted")

    def _wake(self) -> None:
        """Let the I/O thread look."""
        if self._inbox is not None:
            self._inbox.wake()

    def _ring(self) -> None:
        """Let the consumer look, if it waits."""
        if self._bell.empty():
            self._bell.put(None)

    def _end(self) -> None:
        failure = self._session.failure
        if failure is not None:
            # Nothing more can come. Closed here, for the consumer may keep the error, and the
            # error keeps the consumer's frames and with them the iterator.
            self.close()
            raise failure.with_traceback(None)
        if not self._reported_lost:
            self._reported_lost = True
            for warning in describe_loss(self._session.lost):
                _log.warning("%s", warning)

    def get_position(self) -> Position:
        return {
            "pass": list(self._opening.pass_number),
            "received": self._received,
            "reader": self.name,
        }

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
        if self._is_at_end and self._keeps and self._keeper is not None:
            # The steps above may not have got to its end.
            self._keeper.remember(self)
        elif not self._closing and self._keeper is not None and self._keeper.leave(self):
            # It may be opened again where it was. Who waits here now, on a thread of the steps
            # above, is not who reads on.
            self._turns += 1
            self._ring()
            return
        self.end()

    def end(self) -> None:
        """Close, though it might be opened again."""
        with self._lock:
            self._closing = True
            self._results.clear()
        if not self._is_joining:
            return
        self._begin()
        self._ring()
        self._wake()
        if self._thread is not threading.current_thread():
            with self._over:
                pass
        self._current = None
        self._again = []

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "an iterator over the data service belongs to the process that opened it; iterate "
                "over the dataset in the forked process (or start it with the spawn method)"
            )

    # --- the I/O thread -----------------------------------------------------------------------

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            self._read_on()
        except BaseException as error:
            _log.exception("reading from the dispatcher at %s failed", self._dispatcher)
            self._fail(HeadraceError(f"reading failed by an error of its own: {error!r}"))
        finally:
            self._over.release()
            self._ring()

    def _read_on(self) -> None:
        self._inbox = Inbox()
        wires = Wires(self._inbox, self._connect_dispatcher, self._connect)
        try:
            while not self._closing:
                with self._lock:
                    actions = self._session.act(time.monotonic())
                if self._session.is_over:
                    self._ring()
                self._do(actions, wires)
                self._take(wires.wait(min(actions.wake_in, _LONGEST_WAIT)))
        finally:
            wires.close(self._last_words(), CloseIteration(client_id=self._opening.client_id))

    def _last_words(self) -> list[SettleTask]:
        """Return what is to be said of what was used, where others are to read the rest."""
        if self._opening.job_name is None:
            return []
        with self._lock:
            current = self._current
            begun = None
            if current is not None:
                begun = current.delivery.task.task_id, current.delivery.number
            return self._session.leave(begun)

    def _do(self, actions: Actions, wires: Wires) -> None:
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for task_id in actions.drops:
            wires.drop(task_id)
        for task, number, message in actions.asks:
            try:
                wires.ask(task, number, message)
            except UnavailableError as error:
                with self._lock:
                    self._session.disconnected(task.task_id, error, time.monotonic())
            except (HeadraceError, ValueError) as error:
                # A worker that cannot be read this way is the trouble of that worker alone, unless
                # the user chose the way.
                with self._lock:
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
        with self._lock:
            before = len(self._results)
            had_verdict = any(isinstance(event, Verdict) for event in events)
            for event in events:
                if isinstance(event, Verdict):
                    self._take_verdict(event, now)
                else:
                    self._take_answer(event, now)
        # Also where nothing came: who waits to be known again must hear that it is.
        if len(self._results) > before or self._session.is_over or had_verdict:
            self._ring()

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
        with self._lock:
            self._session.fail(error)
        self._ring()

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
            return stub.call(self._opening, timeout=timeout)

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


def _content(result: Delivery) -> Chunk | Exception:
    if isinstance(result.payload, Exception):
        return result.payload
    try:
        return wire.decode(result.payload)
    except HeadraceError as error:
        return error


def _bytes_of(result: Delivery) -> int:
    if isinstance(result.payload, Exception):
        return 0
    return sum(memoryview(buffer).nbytes for buffer in result.payload)
