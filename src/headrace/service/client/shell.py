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

import contextlib
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
from headrace.service.client.session import Session
from headrace.service.client.targets import Target
from headrace.service.messages import (
    ClientHeartbeatReply,
    CloseIteration,
    GetElementsReply,
    LostSplits,
    OpenIterationReply,
    ReportDelivery,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.session import RoundSession
from headrace.serving.connections import Answered, Lost
from headrace.serving.session_runner import SessionRunner
from headrace.threads import start_thread
from headrace.transport.channel import Channel
from headrace.transport.envelope import decode_error

__all__ = ["Line", "Shell"]

InHand: TypeAlias = Callable[[], tuple[Delivery, int] | None]

_log = logging.getLogger(__name__)

_SHORT_WAIT = 0.05
"""Seconds of a consumer's wait after which the I/O thread is to look at it."""
_LONGEST_WAIT = 5.0
_GOODBYE_SECONDS = 0.5
_EXPIRY_SECONDS = 30.0
"""Requests to the dispatcher are repeated much earlier, so later answers do not matter."""
_DISPATCHER = "dispatcher"


class Line:
    """The channel of a reader to the dispatcher, on its way from one thread to another.

    The consumer's thread opens the iteration, and leaves the channel to the I/O thread, which would
    else connect again: that took a tenth of a short epoch.

    Args:
        connect: Opens a channel to the dispatcher.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._kept: list[Channel] = []
        self._is_taken = False

    def keep(self, channel: Channel) -> None:
        """Keep a channel for whoever takes it; close it where that was done."""
        if self._is_taken:
            channel.close()
        else:
            self._kept.append(channel)

    def take(self) -> Channel:
        """Return the last channel that was kept, or a new one."""
        self._is_taken = True
        if not self._kept:
            return self._connect()
        channel = self._kept.pop()
        # An opening that was interrupted and repeated may have left one, too.
        while self._kept:
            self._kept.pop().close()
        return channel


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
        self._runner = SessionRunner("headrace-client", self._turn, self._fail, self._end)
        self._deliveries: deque[Delivery] = deque()
        #: What the consumer waits for.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: Since when the consumer has waited.
        self._waits_since: float | None = None
        #: How often those who waited were sent away.
        self._turns = 0
        #: Taken by the thread when it begins; released when it is over.
        self._begun, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        #: Of the thread, once it has begun.
        self._in_hand: InHand = _nothing

    @property
    def failure(self) -> HeadraceError | None:
        """Why nothing can be read any more, if that is the case."""
        return self._session.failure

    @property
    def lost(self) -> tuple[LostSplits, ...]:
        """What was lost with workers; known at the end of the iteration."""
        return self._session.lost

    @property
    def skipped(self) -> int:
        """Elements that were gone when this client came for them."""
        return self._session.skipped

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._runner.is_closed

    # --- life -----------------------------------------------------------------------------------

    def opened(self, reply: OpenIterationReply) -> None:
        """Take what there is to read of what the dispatcher answered to `OpenIteration`."""
        with self._runner.lock:
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
        with self._runner.lock:
            self._runner.is_closed = True
            self._deliveries.clear()
        if not is_known:
            return
        self.begin(in_hand)
        self._ring()
        self._runner.wake()
        if not self._runner.is_current_thread:
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
        with self._runner.lock:
            is_urgent = self._session.used_up(delivery.task.task_id, delivery.number)
        if is_urgent:
            self._runner.wake()

    def delivered(self) -> list[Delivery]:
        """Return all that was delivered so far, without waiting, as used up."""
        found = []
        is_urgent = False
        with self._runner.lock:
            while self._deliveries:
                delivery = self._deliveries.popleft()
                found.append(delivery)
                said = self._session.used_up(delivery.task.task_id, delivery.number)
                is_urgent = is_urgent or said
        if is_urgent:
            self._runner.wake()
        return found

    def await_delivery(self) -> bool:
        """Wait until something is delivered, or given up; False: no more comes."""
        with self._runner.lock:
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
        with self._runner.lock:
            return not self._runner.is_closed and (
                bool(self._deliveries) or not self._session.is_over
            )

    def survey(self) -> tuple[set[int], tuple[tuple[int, int], ...], frozenset[int]]:
        """Return the tasks that are being read, units that are dealt no more, and helpers."""
        with self._runner.lock:
            return self._session.reading, self._session.given_up, self._session.helpers

    def allow(self, task_ids: set[int] | None, wanted: int | None) -> None:
        """Ask none but these tasks for more from now on; None: any.

        Args:
            task_ids: The tasks.
            wanted: The unit that the consumer waits for; None: none.
        """
        with self._runner.lock:
            changed = self._session.allow(task_ids, wanted, time.monotonic())
        if changed:
            self._runner.wake()

    def renew_lease(self) -> bool:
        """Wait, after a long pause of this process, until the dispatcher knows this client again.

        Returns:
            Whether what was delivered may be used; else `failure` says why not.
        """
        with self._runner.lock:
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
        with self._runner.lock:
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
        with self._runner.lock:
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
        while not self._runner.is_closed and self._turns == turn:
            # In slices, so that a thread that died is noticed.
            try:
                self._bell.get(timeout=slice_)
            except queue.Empty:
                slice_ = _LONGEST_WAIT
                self._runner.wake()
            if not self._over.locked():
                break
            with self._runner.lock:
                if is_over():
                    break

    def _ring(self) -> None:
        """Let the consumer look, if it waits."""
        if self._bell.empty():
            self._bell.put(None)

    # --- the I/O thread -------------------------------------------------------------------------

    def _run(self, in_hand: InHand) -> None:
        if not self._begun.acquire(blocking=False):
            return
        self._in_hand = in_hand
        try:
            self._runner.run()
        except BaseException as error:
            self._fail(error)
        finally:
            self._over.release()
            self._ring()

    def _fail(self, error: BaseException) -> bool:
        _log.error("reading from the dispatcher at %s failed", self._dispatcher, exc_info=error)
        with self._runner.lock:
            self._session.fail(HeadraceError(f"reading failed by an error of its own: {error!r}"))
        return False

    def _turn(self, events: Sequence[Answered | Lost]) -> float:
        self._connect_dispatcher()
        self._take(events)
        if self._runner.is_closed:
            return 0.0
        with self._runner.lock:
            actions = self._session.act(time.monotonic())
            is_over = self._session.is_over
        if is_over:
            self._ring()
        self._do(actions)
        return actions.wake_in

    def _connect_dispatcher(self) -> None:
        connections = self._runner.connections
        if _DISPATCHER not in connections:
            connections.add(_DISPATCHER, self.line.take())

    def _end(self) -> None:
        """Say goodbye to the dispatcher, and wait for a moment until it answers."""
        self._say_the_rest()
        self._connect_dispatcher()
        connections = self._runner.connections
        words = self._last_words(self._in_hand)
        for peer in connections:
            if peer != _DISPATCHER:
                connections.drop(peer)
        with contextlib.suppress(HeadraceError):
            for message in [*words, CloseIteration(client_id=self._session.client_id)]:
                connections.send(_DISPATCHER, message, message)
            until = time.monotonic() + _GOODBYE_SECONDS
            while (left := until - time.monotonic()) > 0:
                for event in connections.wait(left):
                    if isinstance(event, Lost) or event.request is message:
                        return

    def _say_the_rest(self) -> None:
        """Log what the session found at the very end, where the consumer closed at once."""
        with self._runner.lock:
            warnings = self._session.act(time.monotonic()).warnings if self._session.is_over else []
        for warning in warnings:
            _log.warning("%s", warning)

    def _last_words(self, in_hand: InHand) -> list[ReportDelivery]:
        """Return what is to be said of what was used, where others are to read the rest."""
        if not self._settles:
            return []
        with self._runner.lock:
            held = in_hand()
            begun = None if held is None else (held[0].task.task_id, held[0].number, held[1])
            return self._session.leave(begun)

    def _do(self, actions: Actions) -> None:
        connections = self._runner.connections
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for task_id in actions.drops:
            connections.drop(task_id)
        for task, number, message in actions.asks:
            try:
                if task.task_id not in connections:
                    connections.add(task.task_id, self._connect(task))
                connections.send(task.task_id, message, number)
            except UnavailableError as error:
                with self._runner.lock:
                    self._session.disconnected(task.task_id, error, time.monotonic())
            except (HeadraceError, ValueError) as error:
                # A worker that cannot be read this way is the trouble of that worker alone, unless
                # the user chose the way.
                with self._runner.lock:
                    self._unreadable(task, error)
        for request in actions.calls:
            connections.send(_DISPATCHER, request, request, expires=_EXPIRY_SECONDS)

    def _unreadable(self, task: TaskAddress, error: Exception) -> None:
        if isinstance(error, FailedPreconditionError):
            self._session.fail(error)
        else:
            problem = UnavailableError(f"{task.worker_address!r} is no address to read: {error}")
            self._session.disconnected(task.task_id, problem, time.monotonic())

    # --- what came ------------------------------------------------------------------------------

    def _take(self, events: Sequence[Answered | Lost]) -> None:
        now = time.monotonic()
        with self._runner.lock:
            before = len(self._deliveries)
            from_dispatcher = [each for each in events if each.peer == _DISPATCHER]
            for event in events:
                if event.peer == _DISPATCHER:
                    self._take_from_dispatcher(event, now)
                elif isinstance(event, Lost):
                    self._take_loss(event, now)
                else:
                    self._take_answer(event, now)
            self._deliveries += self._session.due(now)
            is_over = self._session.is_over
        # Also where nothing came: who waits to be known again must hear that it is.
        if len(self._deliveries) > before or is_over or from_dispatcher:
            self._ring()

    def _take_loss(self, event: Lost, now: float) -> None:
        self._runner.connections.drop(event.peer)
        if isinstance(event.error, UnavailableError):
            self._session.disconnected(event.peer, event.error, now)
        else:
            self._session.fail(event.error)

    def _take_answer(self, event: Answered, now: float) -> None:
        task_id, number, (_, answer, buffers) = event
        if not isinstance(answer, GetElementsReply | Exception):
            answer = HeadraceError(f"the worker answered with {type(answer).__name__}")
        payload = _error_of(answer) or buffers
        if buffers:
            self._session.measured(task_id, buffers, now)
        skipped = self._session.skipped
        self._deliveries += self._session.answered(task_id, number, answer, payload, now)
        if self._session.skipped > skipped:
            count_skipped(self._session.skipped - skipped)

    def _take_from_dispatcher(self, event: Answered | Lost, now: float) -> None:
        answer: Any
        if isinstance(event, Lost):
            asked, answer = None, event.error
        else:
            asked, answer = event.request, event.reply.message
        if isinstance(answer, UnavailableError):
            _log.debug("the dispatcher at %s: %s; reading on", self._dispatcher, answer)
        if isinstance(answer, ClientHeartbeatReply):
            heard, answer = answer, self._target.of(answer)
            self._session.passed_over = self._target.passed_over
            if self._target.is_local:
                answer = self._local_part(heard, answer)
        self._session.heard(asked, answer, now)

    def _local_part(
        self, update: ClientHeartbeatReply, local: ClientHeartbeatReply
    ) -> ClientHeartbeatReply:
        """Leave out the tasks of other processes, which end as soon as those of this one do.

        What a worker of this process left unfinished is waited for: another one here may take its
        place. A copy of the dataset ends with its worker.
        """
        if update.unchanged:
            return update
        reading, gone = self._session.unended
        shards = [each for each in gone if each.shard_index is not None]
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


def _error_of(answer: GetElementsReply | Exception) -> Exception | None:
    """Return the error that stands in an element's place, if one came."""
    if not isinstance(answer, GetElementsReply) or answer.error is None:
        return None
    try:
        return decode_error(answer.error)
    except msgspec.DecodeError as error:
        return HeadraceError(f"the worker sent an error that cannot be read: {error}")


def _nothing() -> None:
    """Return what a consumer has in hand that has begun nothing."""
