"""The coordinator's shell around its core: one lock, one I/O thread for all workers.

Users' threads bring what they want under the lock, and wait until something is the case; the I/O
thread looks at each turn who has waited long enough. A second thread talks to the parameter
servers, whose answers take as long as they take.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from headrace.coordinator.actions import Call
from headrace.coordinator.closure import Closure, Result
from headrace.coordinator.coordination import Coordination
from headrace.coordinator.messages import Forget, Greet, Ran
from headrace.coordinator.refusal import Refusal
from headrace.coordinator.server_talk import NoServers, Servers, ServerTalk, Talk
from headrace.coordinator.stuck import what_is_stuck
from headrace.errors import CancelledError, DeadlineExceededError, HeadraceError
from headrace.forks import stays_with_parent
from headrace.serving.connections import Answered, Lost
from headrace.serving.session_runner import SessionRunner
from headrace.threads import start_thread
from headrace.transport.channel import Channel
from headrace.waiting import WaitWarnings

__all__ = ["Shell"]

_log = logging.getLogger(__name__)

_JOIN_SECONDS = 1.0
_SETTLE_SECONDS = 0.2
_YIELD_SECONDS = 2e-5
_BURST_SECONDS = 1e-3
_CLOSED = "the coordinator is closed"


class Shell:
    """Runs a coordination from `open` to `close`.

    Args:
        core: What decides.
        connect: Opens a channel to a worker; called on the I/O thread.
        servers: None: there are none.
    """

    def __init__(
        self, core: Coordination, connect: Callable[[str], Channel], servers: Servers | None
    ) -> None:
        self.core = core
        """Used under `lock` alone."""
        self._connect = connect
        self._runner = SessionRunner(
            "headrace-coordinator", self._turn, self._fail, self._say_goodbye
        )
        self._broken: BaseException | None = None
        #: Resources that nobody holds any more. Whoever finds that out may be the collector, in the
        #: middle of anything: so it only says so here.
        self._released: deque[int] = deque()
        #: Whether `schedule` has woken the I/O thread, which has not had its turn since.
        self._is_called = False
        self._yields_at = 0.0
        self._talk: Talk = NoServers(self)
        self._talk_thread: threading.Thread | None = None
        self._servers = servers
        if servers is not None:
            self._talk = talk = ServerTalk(servers, self)
            self._talk_thread = threading.Thread(
                target=talk.run, name="headrace-coordinator", daemon=True
            )
        stays_with_parent(self)

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """What the core is used under."""
        return self._runner.lock

    # --- life -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Start; to be followed by `close`, whatever it raises."""
        self._runner.start()
        if self._talk_thread is not None:
            start_thread(self._talk_thread)

    def close(self) -> None:
        """Call off what there is, and end all threads. May be called twice."""
        with self.lock:
            self._runner.is_closed = True
            self._runner.notify(everybody=True)
        self._talk.end()
        self._runner.close(_JOIN_SECONDS)
        thread = self._talk_thread
        if thread is not None and thread.ident and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def leave_to_parent(self) -> None:
        """Refuse further use, in a process that was just forked: none of the threads is in it."""
        self._runner.leave_to_parent(Refusal())
        self._talk, self._talk_thread = NoServers(self), None

    def check_here(self) -> None:
        """Raise FailedPreconditionError in a process that was forked from the coordinator's."""
        with self.lock:
            return

    def wake(self) -> None:
        """Have the I/O thread look at once."""
        self._runner.wake()

    def release(self, resource: int) -> None:
        """Have workers let go of something, at the next turn. May be called at any instant."""
        self._released.append(resource)

    # --- users' threads -------------------------------------------------------------------------

    def schedule(self, closure: Closure) -> None:
        """Take a closure; waits while the queue is full.

        Raises:
            Exception: The error of a function that was scheduled before; this one was not taken.
        """
        queue = self.core.queue
        while True:
            with self.lock:
                self._check_open()
                if queue.failure is None and queue.has_room:
                    queue.schedule(closure, time.monotonic())
                    wakes = any(load.has_room for load in queue.loads)
                    starves = wakes and not all(load.running for load in queue.loads)
                    break
            self.raise_failure()
            self.wait(lambda: queue.has_room or queue.failure is not None, "room in the queue")
        if wakes:
            self._call(starves)

    def _call(self, starves: bool) -> None:
        """Wake the I/O thread; let it run, where a worker has nothing and it was woken before."""
        # Who schedules in a loop keeps the interpreter for its switch interval, 5 ms.
        is_waiting, self._is_called = self._is_called and starves, True
        self.wake()
        if is_waiting and (now := time.monotonic()) >= self._yields_at:
            self._yields_at = now + _BURST_SECONDS
            time.sleep(_YIELD_SECONDS)

    def join(self, timeout: float | None) -> None:
        """Wait until all that was scheduled is over.

        Raises:
            Exception: The first error of a function.
            DeadlineExceededError: It is not over in that time.
        """
        queue = self.core.queue
        with self.lock:
            self._check_open()
            last = queue.end_round()
        self.wake()
        is_over = self.wait(
            lambda: queue.is_over(last) or queue.failure is not None,
            "functions that were scheduled",
            timeout,
        )
        self.raise_failure()
        if not is_over:
            raise DeadlineExceededError(
                f"not all functions were over in {timeout:g} s: " + self._what_is_stuck()
            )

    def is_done(self) -> bool:
        """Whether nothing is left of what was scheduled; raises the first error of a function."""
        with self.lock:
            self._check_open()
        self.raise_failure()
        with self.lock:
            self.core.queue.end_round()
            is_drained = self.core.queue.is_drained
        self.wake()
        return is_drained

    def raise_failure(self) -> None:
        """Raise the first error of a function, once what runs has ended, or 10 s have passed."""
        queue = self.core.queue
        with self.lock:
            failure = queue.failure
        if failure is None:
            return
        left = failure.press_at + _SETTLE_SECONDS - time.monotonic()
        self.wait(
            lambda: queue.is_drained or queue.failure is not failure,
            "functions that still run after an error",
            max(0.0, left),
        )
        with self.lock:
            taken = queue.take_failure() if queue.failure is failure else None
        if taken is not None:
            raise taken.to_raise()

    def wait_for(self, result: Result, name: str, timeout: float | None) -> None:
        """Wait until a value is here.

        Raises:
            DeadlineExceededError: It is not here in that time.
        """
        if not self.wait(lambda: result.is_ready, f"the value of {name}", timeout):
            raise DeadlineExceededError(
                f"the value of {name} is not here after {timeout:g} s: {self._what_is_stuck()}"
            )

    def cancel(self, closure: Closure) -> bool:
        """Call a closure off; False: it has ended."""
        with self.lock:
            is_off = self.core.queue.cancel(closure, time.monotonic())
            self._runner.notify()
        self.wake()
        return is_off

    def wait(self, is_met: Callable[[], bool], what: str, timeout: float | None = None) -> bool:
        """Wait until something is the case; False: so many seconds have passed.

        Args:
            is_met: Called under the lock.
            what: For a word, where nothing moves for ten seconds.
            timeout: None: as long as it takes.

        Raises:
            CancelledError: The coordinator is closed.
        """
        moved = time.monotonic()
        progress, warnings = -1, WaitWarnings()

        def check() -> None:
            nonlocal progress, moved
            with self.lock:
                self._check_open()
                finished = self.core.queue.finished
            now = time.monotonic()
            if finished != progress:
                progress, moved = finished, now
                warnings.reset()
            elif warnings.is_due(now - moved):
                _log.warning("waiting for %s: %s", what, self._what_is_stuck())

        return self._runner.wait(is_met, timeout, check)

    def _what_is_stuck(self) -> str:
        with self.lock:
            return what_is_stuck(self.core, time.monotonic())

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._runner.is_closed:
            raise CancelledError(_CLOSED)
        if self.core.failure is not None:
            raise self.core.failure

    # --- what servers were told (`server_talk.Hears`) --------------------------------------------

    def low(self) -> int:
        """Return below which number all closures are over."""
        with self.lock:
            return self.core.queue.low

    def fenced(self, session: int, error: Exception | None) -> None:
        """Take note that servers refuse the writes of a life of a worker."""
        with self.lock:
            self.core.queue.fenced(session, time.monotonic(), error)
        self.wake()

    def settled(self, closures: Sequence[int], error: Exception | None) -> None:
        """Take note that servers have forgotten keys."""
        with self.lock:
            self.core.queue.settled(closures, time.monotonic(), error)
        self.wake()

    def pushed(self, error: Exception | None) -> None:
        """Take note that the mean of a round is on the servers."""
        with self.lock:
            self.core.queue.pushed(time.monotonic(), error)
        self.wake()

    # --- the I/O thread -------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> bool:
        _log.error("the coordinator cannot go on", exc_info=error)
        with self.lock:
            self._broken = error
            self._runner.notify(everybody=True)
        return False

    def _turn(self, events: Sequence[Answered | Lost]) -> float:
        """Take note of what arrived, and do what follows; return when to look again."""
        core = self.core
        self._is_called = False
        with self.lock:
            now = time.monotonic()
            for event in events:
                if isinstance(event, Lost):
                    core.lost(event.peer, event.error, now)
                    continue
                worker, question, (_, answer, buffers) = event
                if self._servers is not None and isinstance(answer, Ran):
                    # Before servers are told that it has ended, by whom it may be forgotten.
                    self._servers.learn(answer.acknowledged)
                core.answered(worker, question, answer, buffers, now)
            while self._released:
                core.release(self._released.popleft())
            actions = core.act(now)
            self._talk.tell(actions.fences, actions.settles, actions.round)
            self._runner.notify(everybody=core.failure is not None)
        for words in actions.words:
            _log.warning("%s", words)
        for call in actions.calls:
            self._send(call, now)
        for worker in actions.closes:
            self._runner.connections.drop(worker)
        return actions.wake_in

    def _send(self, call: Call, now: float) -> None:
        connections, message = self._runner.connections, call.message
        if call.worker not in connections:
            with self.lock:
                contact = self.core.contacts.get(call.worker)
            if contact is None:
                return
            connections.add(call.worker, self._connect(contact.address))
        if self._servers is not None and isinstance(message, Greet):
            message = msgspec.structs.replace(message, acknowledged=self._servers.acknowledged())
        try:
            connections.send(call.worker, message, call.message, call.buffers)
        except (HeadraceError, ValueError, OSError) as error:
            with self.lock:
                self.core.answered(call.worker, call.message, error, (), now)
            self.wake()

    def _say_goodbye(self) -> None:
        """Have workers drop what belongs to this coordinator, as far as they hear of it."""
        connections = self._runner.connections
        with self.lock:
            contacts = [each for each in self.core.contacts.values() if each.is_there]
        for contact in contacts:
            if contact.worker in connections:
                with contextlib.suppress(Exception):
                    connections.send(contact.worker, Forget(session=contact.session), None)
