"""The coordinator's shell around its core: one lock, one I/O thread for all workers.

Users' threads bring what they want under the lock, and wait until something is the case; the I/O
thread looks at each turn who has waited long enough. A second thread talks to the parameter
servers, whose answers take as long as they take.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from headrace.coordinator.closure import Closure, Phase, Result, Round
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.coordination import Coordination
from headrace.coordinator.messages import Actions, Call, Forget, Greet, Ran
from headrace.coordinator.packing import unpack
from headrace.coordinator.status import what_is_stuck
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
)
from headrace.forks import stays_with_parent
from headrace.parameter_server.optimizer_steps import ClosureServers
from headrace.serving.connections import Answered, Lost
from headrace.serving.life_cycle import LifeCycle
from headrace.serving.session_runner import SessionRunner
from headrace.threads import start_thread
from headrace.transport.channel import Channel
from headrace.waiting import WaitWarnings

__all__ = ["RunningShell", "ServerTalk", "Shell"]


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
        self,
        core: Coordination,
        connect: Callable[[str], Channel],
        servers: ClosureServers | None,
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
        self._talk: ServerTalk | None = None
        self._talk_thread: threading.Thread | None = None
        self._servers = servers
        if servers is not None:
            self._talk = ServerTalk(servers, self)
            self._talk_thread = threading.Thread(
                target=self._talk.run, name="headrace-coordinator", daemon=True
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
        if self._talk is not None:
            self._talk.end()
        self._runner.close(_JOIN_SECONDS)
        thread = self._talk_thread
        if thread is not None and thread.ident and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def leave_to_parent(self) -> None:
        """Refuse further use, in a process that was just forked: none of the threads is in it."""
        self._runner.leave_to_parent(_Refusal())
        self._talk = self._talk_thread = None

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

    # --- what servers were told, and with which error they could not be (`ServerTalk`) -----------

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
                    self._servers.servers.states.merge(answer.acknowledged)
                core.answered(worker, question, answer, buffers, now)
            while self._released:
                core.release(self._released.popleft())
            actions = core.act(now)
            self._tell_servers(actions)
            self._runner.notify(everybody=core.failure is not None)
        for words in actions.words:
            _log.warning("%s", words)
        for call in actions.calls:
            self._send(call, now)
        for worker in actions.closes:
            self._runner.connections.drop(worker)
        return actions.wake_in

    def _tell_servers(self, actions: Actions) -> None:
        """Have servers told; where there are none, it is done as soon as it is decided."""
        if self._talk is not None:
            self._talk.tell(actions.fences, actions.settles, actions.round)
            return
        for session in actions.fences:
            self.fenced(session, None)
        if actions.settles:
            self.settled(actions.settles, None)
        if actions.round is not None:
            self.pushed(None)

    def _send(self, call: Call, now: float) -> None:
        connections, message = self._runner.connections, call.message
        if call.worker not in connections:
            with self.lock:
                contact = self.core.contacts.get(call.worker)
            if contact is None:
                return
            connections.add(call.worker, self._connect(contact.address))
        if self._servers is not None and isinstance(message, Greet):
            acknowledged = self._servers.servers.acknowledged_states()
            message = msgspec.structs.replace(message, acknowledged=acknowledged)
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


# --------------------------------------------------------------------------------------------------
# The life of a coordinator's shell: until it is closed, nobody holds it, or the program ends


class RunningShell(LifeCycle):
    """The coordinator's threads; they end when nobody holds it, or with the program."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self._shell = shell

    def _open(self) -> None:
        self._keep(self._shell.close)
        end = weakref.WeakMethod(
            self.end_with_program
        )  # which does not keep this object until then

        def at_exit() -> None:
            if (end_with_program := end()) is not None:
                end_with_program()

        # Registered now, so that it is called before servers of this program are closed: those that
        # are here already, and have registered themselves.
        atexit.register(at_exit)
        self._keep(lambda: atexit.unregister(at_exit))
        self._shell.open()

    def keep(self, close: Callable[[], object]) -> None:
        """Have `close` called at the end."""
        self._keep(close)

    def end_with_program(self) -> None:
        """Say what nobody waited for, and stop."""
        if os.getpid() != self._process:
            return
        queue = self._shell.core.queue
        with self._shell.lock:
            left, failure = len(_left(queue)), queue.failure
        if left:
            _log.warning(
                "the program ends while %d functions that were scheduled are not over: they are "
                "called off; coordinator.join() waits for them",
                left,
            )
        if failure is not None:
            _log.warning(
                "the program ends before schedule() or join() raised this error of a function: %s",
                failure.error,
            )
        self.stop()


def _left(queue: ClosureQueue) -> list[Closure]:
    """Return closures whose end would make a difference: no longer where servers forget keys."""
    return [
        closure
        for closure in queue.unsettled.values()
        if closure.phase is not Phase.SETTLING or closure.steps is not None
    ]


# --- what a forked child of a coordinator's process finds where the coordinator's lock was --------

_FORKED = (
    "this coordinator was made before a fork, and belongs to the process that made it: schedule "
    "there, or start processes with `subprocess` or the spawn method of multiprocessing"
)


class _Refusal(AbstractContextManager[None]):
    """A lock that nobody gets: all ways into a coordinator lead through it."""

    def __enter__(self) -> NoReturn:
        raise FailedPreconditionError(_FORKED)

    def __exit__(self, *error: object) -> None:
        return


# --------------------------------------------------------------------------------------------------
# What the coordinator tells parameter servers, on a thread of its own: their answers take a while

# What waits at a time is told at once, in its order: a worker is fenced before its closures settle.


class ServerTalk:
    """Tells servers what is to be settled and fenced, until `end`.

    Args:
        servers: Who is told.
        shell: Hears when they have been told.
    """

    def __init__(self, servers: ClosureServers, shell: Shell) -> None:
        self._servers = servers
        self._shell = shell
        #: Lives to be fenced, after that closures to be settled, and a round; None: the end.
        self._jobs: SimpleQueue[tuple[list[int], list[int], Round | None] | None] = SimpleQueue()

    def tell(self, sessions: list[int], closures: list[int], complete: Round | None) -> None:
        """Have servers told, soon: lives to fence, closures to settle, a round to push."""
        if sessions or closures or complete is not None:
            self._jobs.put((sessions, closures, complete))

    def end(self) -> None:
        """End `run`, as soon as servers have answered what they were told."""
        self._jobs.put(None)

    def run(self) -> None:
        """Tell servers what is to be told; to be called on a thread of its own."""
        is_last = False
        while not is_last and (job := self._jobs.get()) is not None:
            sessions, closures, complete = list(job[0]), list(job[1]), job[2]
            while not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    is_last = True
                    break
                sessions += more[0]
                closures += more[1]
                complete = complete or more[2]  # there is one at a time
            for session in sessions:
                self._shell.fenced(session, _error_of(partial(self._servers.fence, session)))
            if closures:
                below = self._shell.low()
                error = _error_of(partial(self._servers.forget_write_keys, closures, below))
                self._shell.settled(closures, error)
            if complete is not None:
                self._shell.pushed(_error_of(partial(self._push, complete)))

    def _push(self, complete: Round) -> None:
        self._servers.push_round(complete.last, [unpack(steps) for steps in complete.steps])


def _error_of(tell: Callable[[], None]) -> Exception | None:
    try:
        tell()
    except Exception as error:
        return error
    return None
