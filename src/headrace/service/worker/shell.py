"""The worker's shell around its session: one lock, one I/O thread, a thread for each producer.

Whoever brings an event, a server's thread or a producer's, carries out the answers and the grants
that it caused. Calls to the dispatcher belong to the I/O thread, which also acts when time has
passed. What producers are to do is done under the lock, so that nothing overtakes anything;
requests are answered without it, as that may take a while.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.errors import CancelledError, UnavailableError
from headrace.execution.iterator import ElementIterator
from headrace.service.messages import (
    DispatcherRequest,
    Done,
    GetElements,
    TaskActivity,
)
from headrace.service.modes.distributed_save.producer import FileProducer
from headrace.service.worker.agenda import Actions, Start
from headrace.service.worker.answering import answer
from headrace.service.worker.failure import describe, for_clients
from headrace.service.worker.feed import Feed
from headrace.service.worker.hand_out import ReadyByTask
from headrace.service.worker.hang_detector import HangDetector
from headrace.service.worker.meters import Meters, Totals
from headrace.service.worker.opening import open_plan
from headrace.service.worker.packer import Packer
from headrace.service.worker.portion import Answer, Portion
from headrace.service.worker.producer import MOST_ELEMENTS, Producer
from headrace.service.worker.sampler import Sampler
from headrace.service.worker.session import Session
from headrace.service.worker.ways import is_in_order
from headrace.serving.connections import Answered, Lost
from headrace.serving.session_runner import SessionRunner
from headrace.transport.channel import Buffer, Channel, Request

__all__ = ["Shell"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.8
_STOP_SECONDS = 0.95
"""How long closing may take, and the part of it in which the session is to be over."""
_DISPATCHER = "dispatcher"
_EXPIRY_SECONDS = 30.0
"""Calls are repeated much earlier, so answers to older ones do not matter."""
_LONGEST_WAIT = 5.0
_RECOVERY_SECONDS = 0.05


class Shell:
    """Runs a session from `open` to `close`.

    Args:
        connect: Opens a channel to the dispatcher; called on the I/O thread.
        hang_timeout: Seconds after which a task without progress counts as hung; 0.0: never.
    """

    def __init__(self, connect: Callable[[], Channel], hang_timeout: float = 0.0) -> None:
        self._connect = connect
        self._address = ""
        self._runner = SessionRunner("headrace-worker", self._turn, self._recover)
        self._meters = Meters()
        self._sampler = Sampler(self._meters, HangDetector(self._meters, hang_timeout).look)
        #: Used under the runner's lock alone, as all below it.
        self._session: Session[Request] | None = None
        self._feeds: dict[int, Feed] = {}
        self._producers: dict[int, Producer | FileProducer] = {}
        self._outgoing: deque[DispatcherRequest] = deque()
        #: When the I/O thread looks next, whatever happens.
        self._looks_at = 0.0
        self._is_over = False
        self._packer = Packer(_answer)

    @property
    def is_over(self) -> bool:
        """Whether the session is."""
        return self._is_over

    @property
    def num_tasks(self) -> int:
        """Number of tasks that are not finished."""
        with self._runner.lock:
            return 0 if self._session is None else len(self._session.tasks.running)

    @property
    def is_registered(self) -> bool:
        """Whether the dispatcher knows this worker, as far as it said."""
        with self._runner.lock:
            return self._session is not None and self._session.is_registered

    def changes(self, ready: ReadyByTask) -> tuple[TaskActivity, ...]:
        """Return what changed of the work on tasks since this was asked last."""
        return self._meters.changes(ready)

    def totals(self) -> Totals:
        """Return what was done for all tasks so far."""
        with self._runner.lock:
            ready: ReadyByTask = {} if self._session is None else self._session.tasks.ready
        return self._meters.totals(ready)

    # --- life -----------------------------------------------------------------------------------

    def open(self, session: Session[Request]) -> None:
        """Begin; to be followed by `close`, whatever it raises."""
        with self._runner.lock:
            if self._is_over:
                raise _stopped_early()
            self._address, self._session = session.address, session
            self._runner.start()
        self._sampler.start()

    def register(self) -> None:
        """Wait until the worker is registered.

        Raises:
            HeadraceError: The dispatcher does not take it, or does not answer.
            CancelledError: The session is over.
        """
        session = self._session
        assert session is not None
        self._runner.wait(lambda: session.is_registered or self._is_over)
        if session.failure is not None:
            raise session.failure
        if not session.is_registered:
            raise _stopped_early()

    def drain(self, seconds: float) -> None:
        """Deliver what there is, for so many seconds; return when that is done."""
        if self._bring(lambda session, now: session.drain(seconds, now)):
            self._runner.wait(lambda: self._is_over)

    def close(self) -> None:
        """Leave, and end all threads, for as long as that may take. May be called twice."""
        until = time.monotonic() + _STOP_SECONDS
        self._sampler.stop()
        if self._runner.is_current_thread:
            # The collector found a server that was dropped: nobody is left to say goodbye.
            self._is_over = self._runner.is_closed = True
            return
        if self._bring(lambda session, now: session.stop(now)):
            self._runner.wait(lambda: self._is_over, _LEAVE_SECONDS)
        with self._runner.lock:
            self._is_over = self._runner.is_closed = True
            self._runner.notify()
            feeds, producers = list(self._feeds.values()), list(self._producers.values())
        self._runner.wake()
        for feed in feeds:
            feed.close()
        self._packer.close()
        for producer in producers:
            producer.join(until - time.monotonic())
        self._runner.close(until - time.monotonic())
        self._sampler.join(until - time.monotonic())

    # --- clients --------------------------------------------------------------------------------

    def handle(self, requests: Sequence[Request]) -> None:
        """Answer requests of clients, now or later (`transport.channel.Handler`)."""
        asked: list[tuple[Request, GetElements]] = []
        for request in requests:
            if isinstance(request.message, GetElements):
                asked.append((request, request.message))
            else:
                request.reply(Done())

        def take(session: Session[Request], now: float) -> None:
            for request, message in asked:
                session.requested(request, message, now)

        if asked and not self._bring(take):
            for request, _ in asked:
                request.fail(UnavailableError("the worker is not ready yet"))

    # --- events ---------------------------------------------------------------------------------

    def _bring(self, event: Callable[[Session[Request], float], None]) -> bool:
        """Let the session hear of something, and do what follows; False: there is no session."""
        with self._runner.lock:
            session = self._session
            if session is None:
                return False
            now = time.monotonic()
            event(session, now)
            actions = self._act(session, now)
            wakes = bool(self._outgoing) or now + actions.wake_in < self._looks_at
        if wakes:
            self._runner.wake()
        self._say(actions)
        return True

    def _act(self, session: Session[Request], now: float) -> Actions[Request]:
        """Do what may not be overtaken; return the rest, to be done without the lock."""
        actions = session.act(now)
        self._outgoing += actions.calls
        failed = [each for each in map(self._start_producer, actions.starts) if each is not None]
        for producer in actions.resumes:
            self._feeds[producer].resume(actions.most.get(producer))
        for grant in actions.grants:
            self._feeds[grant.producer].grant(grant)
        for producer in actions.waits:
            self._feeds[producer].let_wait()
        for producer in actions.cuts:
            self._feeds[producer].cut()
        for producer in actions.closes:
            self._feeds[producer].close()
        self._is_over = self._is_over or actions.over
        self._runner.is_closed = self._is_over
        self._runner.notify()
        if not failed:
            return actions
        for producer, error in failed:
            session.tasks.produced(producer, Portion(first=0, error=for_clients(error)), now)
            session.tasks.ended(producer, f"it cannot be started: {describe(error)}", now)
        more = self._act(session, now)
        for producer, _ in failed:
            del self._feeds[producer], self._producers[producer]
            self._meters.end(producer)
        more.answers[:0], more.warnings[:0] = actions.answers, actions.warnings
        return more

    # --- producers ------------------------------------------------------------------------------

    def _start_producer(self, start: Start) -> tuple[int, BaseException] | None:
        """Start a producer; return its number and the error if that cannot be done."""
        definition = start.definition
        name, order = f"task-{definition.task_id}", definition.save_destination
        meter = self._meters.begin(start.producer, definition.task_id)
        feed = Feed(start.producer, self, meter)

        def open_task(hand_over: Callable[[], None]) -> ElementIterator:
            next_units = partial(feed.next_units, hand_over) if definition.assigns_splits else None
            return open_plan(
                start.plan,
                definition,
                next_units,
                worker=self._address,
                watch=meter.watch,
                cost_plan=start.cost_plan,
            )

        producer: Producer | FileProducer
        if order is None:
            producer = Producer(
                name,
                open_task,
                feed,
                counts_units=definition.assigns_splits,
                # A part of a round is an answer of its own.
                most_elements=MOST_ELEMENTS if definition.num_consumers is None else 1,
                says_origins=definition.has_element_ids,
                in_order=is_in_order(definition),
                portion_bytes=start.portion_bytes,
            )
        else:
            stream = definition.task_id
            producer = FileProducer(name, open_task, feed, destination=order, stream=stream)
        self._feeds[start.producer], self._producers[start.producer] = feed, producer
        try:
            producer.start()
        except Exception as error:
            return start.producer, error
        meter.thread = producer.ident
        return None

    def produced(self, producer: int, portion: Portion) -> None:
        """Take a portion that a producer made (`feed.Owner`)."""
        self._bring(lambda session, now: session.tasks.produced(producer, portion, now))

    def needs_units(self, producer: int) -> None:
        """Take note that a producer waits for units (`feed.Owner`)."""
        self._bring(lambda session, now: session.tasks.needs_units(producer, now))

    def ended(self, producer: int, failure: str | None) -> None:
        """Take note that a producer makes no more portions (`feed.Owner`)."""

        def end(session: Session[Request], now: float) -> None:
            session.tasks.ended(producer, failure, now)
            self._producers.pop(producer, None)
            self._meters.end(producer)
            feed = self._feeds.pop(producer, None)
            if feed is not None:
                # A thread of the plan that read ahead may still wait for units, or ask for them.
                feed.close()

        self._bring(end)

    def _say(self, actions: Actions[Request]) -> None:
        """Log warnings and answer requests."""
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for request, content in actions.answers:
            self._packer.answer(request, content)

    # --- the I/O thread -------------------------------------------------------------------------

    def _turn(self, events: Sequence[Answered | Lost]) -> float:
        """Tell the session what came, and send what it asks; return when to do so again."""
        connections = self._runner.connections
        if _DISPATCHER not in connections:
            connections.add(_DISPATCHER, self._connect())
        came = [each for event in events for each in _outcomes(event)]
        for message, outcome in came:
            if isinstance(outcome, Exception):
                _log.debug("the dispatcher answers %s: %s", type(message).__name__, outcome)
        with self._runner.lock:
            session, now = self._session, time.monotonic()
            assert session is not None
            for message, outcome in came:
                session.answered(message, outcome, now)
            actions = self._act(session, now)
            self._looks_at = now + min(_LONGEST_WAIT, actions.wake_in)
            outgoing = list(self._outgoing)
            self._outgoing.clear()
        self._say(actions)
        for call in outgoing:
            connections.send(_DISPATCHER, call, call, expires=_EXPIRY_SECONDS)
        return actions.wake_in

    def _recover(self, error: BaseException) -> bool:
        # Without this thread the worker would be taken for lost while it serves on. What is short
        # now (memory, file descriptors) may be there again soon.
        _log.warning("no heartbeat: %s", describe(error))
        with contextlib.suppress(Exception):
            self._runner.connections.drop(_DISPATCHER)
        time.sleep(_RECOVERY_SECONDS)
        return True


def _outcomes(event: Answered | Lost) -> list[tuple[DispatcherRequest, Any]]:
    """Return requests, each with its answer or the error in its place."""
    if isinstance(event, Lost):
        return [(request, event.error) for request in event.requests]
    return [(event.request, event.reply.message)]


def _answer(
    request: Request, content: Answer, frame_of: Callable[[Portion], Sequence[Buffer]]
) -> None:
    try:
        answer(request, content, frame_of)
    except Exception as error:
        # The others are to be answered all the same, and this one must not wait for ever.
        _log.exception("an answer cannot be sent")
        with contextlib.suppress(Exception):
            request.fail(for_clients(error))


def _stopped_early() -> CancelledError:
    return CancelledError("the worker was stopped before it had registered")
