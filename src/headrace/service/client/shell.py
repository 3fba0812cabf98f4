"""The client's shell around its session: one lock, one I/O thread.

    I/O thread   inbox -> session (what happened) ; session -> channels (what is to be sent)
    consumer     takes what was delivered, says what is used up, and waits for more

Rule 1. The session is used under the lock alone; its `failure` and what was `lost` are read without
        it, once it is over. Channels and the inbox belong to the thread; others only wake it.
Rule 2. Deliveries are appended by the thread and taken by the consumer, the first one last of all:
        it stays until whoever takes it has put it elsewhere.
Rule 3. An interruption may come at any instant of the consumer's. The lock is one of C, which is
        never left locked; what rings may be lost, so it says only that it is time to look.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from headrace.counts import count_skipped
from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.service.client.actions import Actions, Delivery
from headrace.service.client.round_session import RoundSession
from headrace.service.client.session import Session
from headrace.service.client.targets import Target
from headrace.service.client.wires import Line, TaskEvent, Verdict, Wires
from headrace.service.messages import (
    ClientUpdate,
    CloseIteration,
    Elements,
    IterationOpened,
    LostUnits,
    SettleTask,
    TaskAddress,
)
from headrace.threads import start_thread
from headrace.transport.channel import Channel, Reply
from headrace.transport.envelope import decode_error
from headrace.transport.inbox import Inbox

__all__ = ["Shell"]

InHand: TypeAlias = Callable[[], tuple[Delivery, int] | None]

_log = logging.getLogger(__name__)

_SHORT_WAIT = 0.05
"""Seconds of a consumer's wait after which the I/O thread is to look at it."""
_LONGEST_WAIT = 5.0


class Shell:
    """Runs a session from `begin` to `close`.

    Args:
        session: Used here alone from now on.
        dispatcher: The dispatcher's address, for messages.
        connect_dispatcher: Opens a channel to the dispatcher; called on the I/O thread.
        connect: Opens a channel to the worker that has a task; as well.
        settles: Whether to say at the end what was used, since others read the rest.
        target: Chooses what to read.
    """

    def __init__(
        self,
        session: Session | RoundSession,
        *,
        dispatcher: str,
        connect_dispatcher: Callable[[], Channel],
        connect: Callable[[TaskAddress], Channel],
        settles: bool,
        target: Target,
    ) -> None:
        self._session = session
        self._dispatcher = dispatcher
        self.line = Line(connect_dispatcher)
        self._connect = connect
        self._target = target
        self._settles = settles
        self._lock = threading.RLock()
        self._deliveries: deque[Delivery] = deque()
        #: What the consumer waits for.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Since when the consumer has waited.
        self._waits_since: float | None = None
        #: How often those who waited were sent away.
        self._turns = 0
        self._closing = False
        #: The I/O thread's, which looks before it waits for the first time.
        self._inbox: Inbox | None = None
        #: Taken by the thread when it begins; released when it is over.
        self._begun, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._thread: threading.Thread | None = None

    @property
    def failure(self) -> HeadraceError | None:
        """Why nothing can be read any more, if that is the case."""
        return self._session.failure

    @property
    def lost(self) -> tuple[LostUnits, ...]:
        """What was lost with workers; known at the end of the iteration."""
        return self._session.lost

    @property
    def skipped(self) -> int:
        """Elements that were gone when this client came for them."""
        return self._session.skipped

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    # --- life -----------------------------------------------------------------------------------

    def opened(self, reply: IterationOpened) -> None:
        """Take what there is to read of what the dispatcher answered to `OpenIteration`."""
        with self._lock:
            self._session.passed_over = self._target.passed_over
            self._session.opened(reply, time.monotonic())

    def begin(self, in_hand: InHand) -> None:
        """Start the thread, unless that was done.

        Where an interruption leaves that open, it is started twice, and one ends at once.

        Args:
            in_hand: Returns what the consumer has begun to use, and how many of its elements; asked
                at the end. The thread holds it, and what it belongs to: a reader that is open
                stays, whoever drops it.
        """
        if not self._begun.locked():
            start_thread(
                threading.Thread(
                    target=self._run, args=(in_hand,), name="headrace-client", daemon=True
                )
            )

    def close(self, in_hand: InHand, *, is_known: bool) -> None:
        """Deliver nothing more; wait until the thread has said goodbye and is over.

        Args:
            in_hand: As for `begin`.
            is_known: Whether the dispatcher may know this client.
        """
        with self._lock:
            self._closing = True
            self._deliveries.clear()
        if not is_known:
            return
        self.begin(in_hand)
        self._ring()
        self._wake()
        if self._thread is not threading.current_thread():
            with self._over:
                pass

    # --- the consumer ---------------------------------------------------------------------------

    def first(self) -> Delivery | None:
        """Return the next delivery, which stays where it is; None: no more come."""
        if not self._deliveries:
            self._wait(lambda: bool(self._deliveries) or self._session.is_over)
        return self._deliveries[0] if self._deliveries else None

    @property
    def arrived(self) -> int:
        """How many elements the first delivery has; 0: there is none, or it is an error."""
        try:
            return self._deliveries[0].count
        except IndexError:
            return 0

    def take(self, delivery: Delivery) -> None:
        """Take the first delivery, if it is this one."""
        if self._deliveries and self._deliveries[0] is delivery:
            self._deliveries.popleft()

    def use_up(self, delivery: Delivery) -> None:
        """Take note that nothing of a delivery is left. May be said twice."""
        with self._lock:
            is_urgent = self._session.used_up(delivery.task.task_id, delivery.number)
        if is_urgent:
            self._wake()

    def delivered(self) -> list[Delivery]:
        """Return all that was delivered so far, without waiting, as used up."""
        found = []
        is_urgent = False
        with self._lock:
            while self._deliveries:
                delivery = self._deliveries.popleft()
                found.append(delivery)
                said = self._session.used_up(delivery.task.task_id, delivery.number)
                is_urgent = is_urgent or said
        if is_urgent:
            self._wake()
        return found

    def await_delivery(self) -> bool:
        """Wait until something is delivered, or given up; False: no more comes."""
        with self._lock:
            known, helpers = self._session.given_up, self._session.helpers
        self._wait(
            lambda: (
                bool(self._deliveries)
                or self._session.is_over
                or self._session.given_up is not known
                or self._session.helpers != helpers
            ),
            goes_on=True,
        )
        with self._lock:
            return not self._closing and (bool(self._deliveries) or not self._session.is_over)

    def survey(self) -> tuple[set[int], tuple[tuple[int, int], ...], frozenset[int]]:
        """Return the tasks that are being read, units that are dealt no more, and helpers."""
        with self._lock:
            return self._session.reading, self._session.given_up, self._session.helpers

    def allow(self, task_ids: set[int] | None, wanted: int | None) -> None:
        """Ask none but these tasks for more from now on; None: any.

        Args:
            task_ids: The tasks.
            wanted: The unit that the consumer waits for; None: none.
        """
        with self._lock:
            changed = self._session.allow(task_ids, wanted, time.monotonic())
        if changed:
            self._wake()

    def renew_lease(self) -> bool:
        """Wait, after a long pause of this process, until the dispatcher knows this client again.

        Returns:
            Whether what was delivered may be used; else `failure` says why not.
        """
        with self._lock:
            if self._session.may_use(time.monotonic()):
                return True
        self._wait(lambda: self._session.may_use(time.monotonic()))
        return self._session.failure is None

    def send_away(self) -> None:
        """Let whoever waits here, on another thread, wait no more."""
        self._turns += 1
        self._ring()

    def wait_no_more(self) -> None:
        """Take note that what `await_delivery` was for is here."""
        with self._lock:
            if self._waits_since is not None:
                self._session.waited(time.monotonic() - self._waits_since)
                self._waits_since = None

    def _wait(self, is_over: Callable[[], bool], *, goes_on: bool = False) -> None:
        """Wait for the I/O thread, until something is the case, the thread ends, or `close`.

        Args:
            is_over: Says whether it is.
            goes_on: Whether the consumer may have to wait for more after that: then this counts as
                one wait, until `wait_no_more`.

        Raises:
            CancelledError: Whoever waits was sent away.
        """
        turn = self._turns
        with self._lock:
            if is_over():
                return
            if self._waits_since is None:
                self._waits_since = time.monotonic()
                self._session.waiting(self._waits_since)
        try:
            self._wait_until(is_over, turn)
        except BaseException:
            self.wait_no_more()
            raise
        if not goes_on or self._turns != turn:
            self.wait_no_more()
        if self._turns != turn:
            raise CancelledError("the iterator was interrupted")

    def _wait_until(self, is_over: Callable[[], bool], turn: int) -> None:
        """Wait until something is the case, or whoever waits was sent away after `turn`."""
        # What is asked for comes soon, as a rule: the I/O thread need not look twice for it.
        slice_ = _SHORT_WAIT
        while not self._closing and self._turns == turn:
            # In slices, so that a thread that died is noticed.
            try:
                self._bell.get(timeout=slice_)
            except queue.Empty:
                slice_ = _LONGEST_WAIT
                self._wake()
            if not self._over.locked():
                break
            with self._lock:
                if is_over():
                    break

    def _wake(self) -> None:
        """Let the I/O thread look."""
        if self._inbox is not None:
            self._inbox.wake()

    def _ring(self) -> None:
        """Let the consumer look, if it waits."""
        if self._bell.empty():
            self._bell.put(None)

    # --- the I/O thread -------------------------------------------------------------------------

    def _run(self, in_hand: InHand) -> None:
        if not self._begun.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            self._read_on(in_hand)
        except BaseException as error:
            _log.exception("reading from the dispatcher at %s failed", self._dispatcher)
            with self._lock:
                self._session.fail(
                    HeadraceError(f"reading failed by an error of its own: {error!r}")
                )
        finally:
            self._over.release()
            self._ring()

    def _read_on(self, in_hand: InHand) -> None:
        self._inbox = Inbox()
        wires = Wires(self._inbox, self.line.take, self._connect)
        try:
            while not self._closing:
                with self._lock:
                    actions = self._session.act(time.monotonic())
                    is_over = self._session.is_over
                if is_over:
                    self._ring()
                self._do(actions, wires)
                self._take(wires.wait(min(actions.wake_in, _LONGEST_WAIT)))
        finally:
            self._say_the_rest()
            goodbye = CloseIteration(client_id=self._session.client_id)
            wires.close(self._last_words(in_hand), goodbye)

    def _say_the_rest(self) -> None:
        """Log what the session found at the very end, where the consumer closed at once."""
        with self._lock:
            warnings = self._session.act(time.monotonic()).warnings if self._session.is_over else []
        for warning in warnings:
            _log.warning("%s", warning)

    def _last_words(self, in_hand: InHand) -> list[SettleTask]:
        """Return what is to be said of what was used, where others are to read the rest."""
        if not self._settles:
            return []
        with self._lock:
            held = in_hand()
            begun = None if held is None else (held[0].task.task_id, held[0].number, held[1])
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

    # --- what came ------------------------------------------------------------------------------

    def _take(self, events: list[TaskEvent | Verdict]) -> None:
        now = time.monotonic()
        with self._lock:
            before = len(self._deliveries)
            had_verdict = any(isinstance(event, Verdict) for event in events)
            for event in events:
                if isinstance(event, Verdict):
                    self._take_verdict(event, now)
                else:
                    self._take_answer(event, now)
            self._deliveries += self._session.due(now)
            is_over = self._session.is_over
        # Also where nothing came: who waits to be known again must hear that it is.
        if len(self._deliveries) > before or is_over or had_verdict:
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
            if what.buffers:
                self._session.measured(task_id, what.buffers, now)
            skipped = self._session.skipped
            self._deliveries += self._session.answered(task_id, number, answer, payload, now)
            if self._session.skipped > skipped:
                count_skipped(self._session.skipped - skipped)
        else:
            self._session.fail(what)

    def _take_verdict(self, event: Verdict, now: float) -> None:
        answer: Any = event.what.message if isinstance(event.what, Reply) else event.what
        if isinstance(answer, UnavailableError):
            _log.debug("the dispatcher at %s: %s; reading on", self._dispatcher, answer)
        if isinstance(answer, ClientUpdate):
            heard, answer = answer, self._target.of(answer)
            self._session.passed_over = self._target.passed_over
            if self._target.is_local:
                answer = self._local_part(heard, answer)
        self._session.heard(event.asked, answer, now)

    def _local_part(self, update: ClientUpdate, local: ClientUpdate) -> ClientUpdate:
        """Leave out the tasks of other processes, which end as soon as those of this one do.

        What a worker of this process left unfinished is waited for: another one here may take its
        place. A copy of the dataset ends with its worker.
        """
        if update.same:
            return update
        reading, gone = self._session.unended
        shards = [each for each in gone if each.shard is not None]
        if update.finished:
            if shards:
                self._session.fail(UnavailableError(f"{_stopped(shards)}: iterate again"))
        elif local.finished and (reading or (gone and not self._target.is_copy)):
            # To be looked at again, though the dispatcher has nothing new to say of it.
            return msgspec.structs.replace(local, finished=False, version=-1)
        elif local.finished and gone:
            _log.warning("%s: the rest of its copy is missing", _stopped(gone))
        return local


def _stopped(tasks: Sequence[TaskAddress]) -> str:
    where = " and ".join(sorted({task.worker_address for task in tasks}))
    return (
        f"the worker at {where} in this process stopped before it had given all that it was to "
        'give, and only workers of this process are read (target_workers="LOCAL", or "AUTO" with '
        "a static policy)"
    )


def _error_of(answer: Elements | Exception) -> Exception | None:
    """Return the error that stands in an element's place, if one came."""
    if not isinstance(answer, Elements) or answer.error is None:
        return None
    try:
        return decode_error(answer.error)
    except msgspec.DecodeError as error:
        return HeadraceError(f"the worker sent an error that cannot be read: {error}")
