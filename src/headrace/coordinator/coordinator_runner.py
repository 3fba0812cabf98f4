"""Threads and I/O of the coordinator: one lock and one I/O thread for all workers.

Users' threads change the core under the lock and wait for conditions, which the I/O thread checks
at each turn. A second thread sends requests to parameter servers, whose replies may take long.
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

from headrace.coordinator.closure import Closure, ClosurePhase, ClosureResult, RoundPush
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.coordinator_core import CoordinatorCore
from headrace.coordinator.messages import (
    CoordinatorActions,
    EndSession,
    RunReply,
    StartSession,
    WorkerCall,
)
from headrace.coordinator.packing import unpack
from headrace.coordinator.status import stall_report
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
)
from headrace.forks import register_fork_sensitive
from headrace.parameter_server.optimizer_steps import ClosureServers
from headrace.serving.connections import PeerLost, ReplyReceived
from headrace.serving.life_cycle import LifeCycle
from headrace.serving.session_runner import SessionRunner
from headrace.threads import start_thread
from headrace.transport.channel import Channel
from headrace.waiting import WaitWarningLimiter

__all__ = ["CoordinatorRunner", "RunnerLifeCycle", "ServerNotifier"]


_log = logging.getLogger(__name__)

_JOIN_SECONDS = 1.0
_DRAIN_GRACE_SECONDS = 0.2
_YIELD_SECONDS = 2e-5
_BURST_SECONDS = 1e-3
_CLOSED_MESSAGE = "the coordinator is closed"


class CoordinatorRunner:
    """Runs a coordinator core from `open` to `close`.

    Args:
        core: State machine of the coordinator.
        connect: Opens a channel to a worker; called on the I/O thread.
        servers: Parameter servers; None without servers.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        connect: Callable[[str], Channel],
        servers: ClosureServers | None,
    ) -> None:
        self.core = core
        """Accessed only under `lock`."""
        self._connect = connect
        self._runner = SessionRunner(
            "headrace-coordinator", self._run_turn, self._fail, self._end_sessions
        )
        self._fatal_error: BaseException | None = None
        #: Resources no longer referenced. The garbage collector may append at any instant, so they
        #: are only queued here, without taking the lock.
        self._released_resources: deque[int] = deque()
        #: Whether `schedule` has woken the I/O thread, which has not run since.
        self._is_woken = False
        self._next_yield_at = 0.0
        self._notifier: ServerNotifier | None = None
        self._notifier_thread: threading.Thread | None = None
        self._servers = servers
        if servers is not None:
            self._notifier = ServerNotifier(servers, self)
            self._notifier_thread = threading.Thread(
                target=self._notifier.run, name="headrace-coordinator", daemon=True
            )
        register_fork_sensitive(self)

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Lock that guards the core."""
        return self._runner.lock

    # --- start and stop -------------------------------------------------------------------------

    def open(self) -> None:
        """Start the threads; `close` must follow, even after an error."""
        self._runner.start()
        if self._notifier_thread is not None:
            start_thread(self._notifier_thread)

    def close(self) -> None:
        """Cancel all functions and end all threads. Idempotent."""
        with self.lock:
            self._runner.is_closed = True
            self._runner.notify(notify_all=True)
        if self._notifier is not None:
            self._notifier.stop()
        self._runner.close(_JOIN_SECONDS)
        thread = self._notifier_thread
        if thread is not None and thread.ident and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def after_fork_in_child(self) -> None:
        """Disable this object in a forked child, which has none of the threads."""
        self._runner.after_fork_in_child(_ForkedLock())
        self._notifier = self._notifier_thread = None

    def check_not_forked(self) -> None:
        """Raise FailedPreconditionError in a forked child of the coordinator's process."""
        with self.lock:
            return

    def wake(self) -> None:
        """Wake the I/O thread."""
        self._runner.wake()

    def release_resource(self, resource: int) -> None:
        """Release a resource on all workers at the next turn. May be called at any instant."""
        self._released_resources.append(resource)

    # --- users' threads -------------------------------------------------------------------------

    def schedule(self, closure: Closure) -> None:
        """Schedule a closure; block while the queue is full.

        Raises:
            Exception: The error of an earlier function; this closure was not scheduled.
        """
        queue = self.core.queue
        while True:
            with self.lock:
                self._check_open()
                if queue.failure is None and queue.has_capacity:
                    queue.schedule(closure, time.monotonic())
                    must_wake = any(load.has_capacity for load in queue.worker_pool)
                    is_worker_idle = must_wake and not all(
                        load.in_flight for load in queue.worker_pool
                    )
                    break
            self.raise_failure()
            self.wait(
                lambda: queue.has_capacity or queue.failure is not None, "capacity in the queue"
            )
        if must_wake:
            self._wake_and_yield(is_worker_idle)

    def _wake_and_yield(self, is_worker_idle: bool) -> None:
        """Wake the I/O thread; yield to it if a worker is idle and it was woken before."""
        # A thread that schedules in a loop keeps the interpreter for its switch interval, 5 ms.
        is_waiting, self._is_woken = self._is_woken and is_worker_idle, True
        self.wake()
        if is_waiting and (now := time.monotonic()) >= self._next_yield_at:
            self._next_yield_at = now + _BURST_SECONDS
            time.sleep(_YIELD_SECONDS)

    def join(self, timeout: float | None) -> None:
        """Wait until all scheduled functions are done.

        Raises:
            Exception: The first error of a function.
            DeadlineExceededError: If they are not done within `timeout` seconds.
        """
        queue = self.core.queue
        with self.lock:
            self._check_open()
            last = queue.end_round()
        self.wake()
        is_done = self.wait(
            lambda: queue.is_done_through(last) or queue.failure is not None,
            "scheduled functions",
            timeout,
        )
        self.raise_failure()
        if not is_done:
            raise DeadlineExceededError(
                f"scheduled functions not done after {timeout:g} s: " + self._stall_report()
            )

    def is_done(self) -> bool:
        """Return whether all scheduled functions are done; raise the first error of a function."""
        with self.lock:
            self._check_open()
        self.raise_failure()
        with self.lock:
            self.core.queue.end_round()
            is_drained = self.core.queue.is_drained
        self.wake()
        return is_drained

    def raise_failure(self) -> None:
        """Raise the first error of a function, once running ones have ended or after 10 s."""
        queue = self.core.queue
        with self.lock:
            failure = queue.failure
        if failure is None:
            return
        remaining = failure.drain_deadline + _DRAIN_GRACE_SECONDS - time.monotonic()
        self.wait(
            lambda: queue.is_drained or queue.failure is not failure,
            "functions still running after an error",
            max(0.0, remaining),
        )
        with self.lock:
            taken = queue.take_failure() if queue.failure is failure else None
        if taken is not None:
            raise taken.build_error()

    def wait_for_result(self, result: ClosureResult, name: str, timeout: float | None) -> None:
        """Wait until a result is available.

        Raises:
            DeadlineExceededError: If it is not available within `timeout` seconds.
        """
        if not self.wait(lambda: result.is_ready, f"the value of {name}", timeout):
            raise DeadlineExceededError(
                f"the value of {name} is not available after {timeout:g} s: {self._stall_report()}"
            )

    def cancel(self, closure: Closure) -> bool:
        """Cancel a closure; return False if it has ended."""
        with self.lock:
            is_cancelled = self.core.queue.cancel(closure, time.monotonic())
            self._runner.notify()
        self.wake()
        return is_cancelled

    def wait(
        self, is_met: Callable[[], bool], condition: str, timeout: float | None = None
    ) -> bool:
        """Wait until a condition is met; return False after the timeout.

        Args:
            is_met: Condition; called under the lock.
            condition: Name of the condition, for a warning after ten seconds without progress.
            timeout: Seconds to wait; None waits forever.

        Raises:
            CancelledError: If the coordinator is closed.
        """
        last_progress = time.monotonic()
        progress, warnings = -1, WaitWarningLimiter()

        def check() -> None:
            nonlocal progress, last_progress
            with self.lock:
                self._check_open()
                finished = self.core.queue.num_finished
            now = time.monotonic()
            if finished != progress:
                progress, last_progress = finished, now
                warnings.reset()
            elif warnings.should_warn(now - last_progress):
                _log.warning("waiting for %s: %s", condition, self._stall_report())

        return self._runner.wait(is_met, timeout, check)

    def _stall_report(self) -> str:
        with self.lock:
            return stall_report(self.core, time.monotonic())

    def _check_open(self) -> None:
        if self._fatal_error is not None:
            raise self._fatal_error
        if self._runner.is_closed:
            raise CancelledError(_CLOSED_MESSAGE)
        if self.core.failure is not None:
            raise self.core.failure

    # --- results of requests to servers (called by `ServerNotifier`) ----------------------------

    def low_watermark(self) -> int:
        """Return the number below which all closures are done."""
        with self.lock:
            return self.core.queue.low_watermark

    def worker_fenced(self, session: int, error: Exception | None) -> None:
        """Record that servers reject the writes of a worker session."""
        with self.lock:
            self.core.queue.worker_fenced(session, time.monotonic(), error)
        self.wake()

    def write_keys_forgotten(self, closures: Sequence[int], error: Exception | None) -> None:
        """Record that servers have forgotten write keys."""
        with self.lock:
            self.core.queue.write_keys_forgotten(closures, time.monotonic(), error)
        self.wake()

    def round_pushed(self, error: Exception | None) -> None:
        """Record that servers have applied the mean of a round."""
        with self.lock:
            self.core.queue.round_pushed(time.monotonic(), error)
        self.wake()

    # --- the I/O thread -------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> bool:
        _log.error("the coordinator failed", exc_info=error)
        with self.lock:
            self._fatal_error = error
            self._runner.notify(notify_all=True)
        return False

    def _run_turn(self, events: Sequence[ReplyReceived | PeerLost]) -> float:
        """Handle replies and run the resulting actions; return the seconds until the next turn."""
        core = self.core
        self._is_woken = False
        with self.lock:
            now = time.monotonic()
            for event in events:
                if isinstance(event, PeerLost):
                    core.worker_lost(event.peer, event.error, now)
                    continue
                worker, request, (_, reply, buffers) = event
                if self._servers is not None and isinstance(reply, RunReply):
                    # Merge before the key cleanup, which may make servers forget the closure.
                    self._servers.servers.states.merge(reply.acknowledged)
                core.handle_reply(worker, request, reply, buffers, now)
            while self._released_resources:
                core.release_resource(self._released_resources.popleft())
            actions = core.take_actions(now)
            self._notify_servers(actions)
            self._runner.notify(notify_all=core.failure is not None)
        for warning in actions.warnings:
            _log.warning("%s", warning)
        for call in actions.calls:
            self._send(call, now)
        for worker in actions.disconnects:
            self._runner.connections.drop(worker)
        return actions.wake_in

    def _notify_servers(self, actions: CoordinatorActions) -> None:
        """Queue requests to servers; without servers, report them as done at once."""
        if self._notifier is not None:
            self._notifier.submit(actions.fences, actions.key_cleanups, actions.round_push)
            return
        for session in actions.fences:
            self.worker_fenced(session, None)
        if actions.key_cleanups:
            self.write_keys_forgotten(actions.key_cleanups, None)
        if actions.round_push is not None:
            self.round_pushed(None)

    def _send(self, call: WorkerCall, now: float) -> None:
        connections, message = self._runner.connections, call.message
        if call.worker not in connections:
            with self.lock:
                connection = self.core.connections.get(call.worker)
            if connection is None:
                return
            connections.add(call.worker, self._connect(connection.address))
        if self._servers is not None and isinstance(message, StartSession):
            acknowledged = self._servers.servers.acknowledged_states()
            message = msgspec.structs.replace(message, acknowledged=acknowledged)
        try:
            connections.send(call.worker, message, call.message, call.buffers)
        except (HeadraceError, ValueError, OSError) as error:
            with self.lock:
                self.core.handle_reply(call.worker, call.message, error, (), now)
            self.wake()

    def _end_sessions(self) -> None:
        """Ask all reachable workers to end their sessions."""
        connections = self._runner.connections
        with self.lock:
            connected = [each for each in self.core.connections.values() if each.is_connected]
        for connection in connected:
            if connection.worker in connections:
                with contextlib.suppress(Exception):
                    connections.send(
                        connection.worker, EndSession(session=connection.session), None
                    )


# --------------------------------------------------------------------------------------------------
# Life cycle of the runner: it ends on close, with its last reference, or with the program


class RunnerLifeCycle(LifeCycle):
    """Life cycle of the coordinator's threads; they end with the last reference or the program."""

    def __init__(self, runner: CoordinatorRunner) -> None:
        super().__init__()
        self._runner = runner

    def _open(self) -> None:
        self._on_stop(self._runner.close)
        stop_reference = weakref.WeakMethod(self.stop_at_exit)  # does not keep this object alive

        def at_exit() -> None:
            if (stop := stop_reference()) is not None:
                stop()

        # Registered last, so it runs before the exit handlers of servers that this program has
        # already started.
        atexit.register(at_exit)
        self._on_stop(lambda: atexit.unregister(at_exit))
        self._runner.open()

    def on_close(self, close: Callable[[], object]) -> None:
        """Register a function to call at the end."""
        self._on_stop(close)

    def stop_at_exit(self) -> None:
        """Warn about unfinished functions and unraised errors, and stop."""
        if os.getpid() != self._process:
            return
        queue = self._runner.core.queue
        with self._runner.lock:
            num_unfinished, failure = len(_find_unfinished(queue)), queue.failure
        if num_unfinished:
            _log.warning(
                "the program exits with %d unfinished scheduled functions, which are cancelled; "
                "call coordinator.join() to wait for them",
                num_unfinished,
            )
        if failure is not None:
            _log.warning(
                "the program exits before schedule() or join() raised this error of a function: %s",
                failure.error,
            )
        self.stop()


def _find_unfinished(queue: ClosureQueue) -> list[Closure]:
    """Return closures whose outcome still matters; those that only await key cleanup do not."""
    return [
        closure
        for closure in queue.unfinished.values()
        if closure.phase is not ClosurePhase.COMPLETING or closure.optimizer_steps is not None
    ]


# --- replacement of the coordinator's lock in a forked child --------------------------------------

_FORKED_MESSAGE = (
    "this coordinator was created before a fork and belongs to the parent process: schedule "
    "functions there, or start processes with `subprocess` or the spawn method of multiprocessing"
)


class _ForkedLock(AbstractContextManager[None]):
    """Lock that can never be acquired: every use of a coordinator acquires it first."""

    def __enter__(self) -> NoReturn:
        raise FailedPreconditionError(_FORKED_MESSAGE)

    def __exit__(self, *error: object) -> None:
        return


# --------------------------------------------------------------------------------------------------
# Requests to parameter servers, on a separate thread since replies may take long

# All queued requests are sent together, in order: a worker is fenced before its closures' keys are
# cleaned up.


class ServerNotifier:
    """Sends fences, key cleanups and round pushes to servers until `stop`.

    Args:
        servers: Parameter servers.
        runner: Runner that is notified of the results.
    """

    def __init__(self, servers: ClosureServers, runner: CoordinatorRunner) -> None:
        self._servers = servers
        self._runner = runner
        #: Sessions to fence, closures to clean up after that, and a round; None ends the thread.
        self._jobs: SimpleQueue[tuple[list[int], list[int], RoundPush | None] | None] = (
            SimpleQueue()
        )

    def submit(
        self, sessions: list[int], closures: list[int], round_push: RoundPush | None
    ) -> None:
        """Queue sessions to fence, closures to clean up, and a round to push."""
        if sessions or closures or round_push is not None:
            self._jobs.put((sessions, closures, round_push))

    def stop(self) -> None:
        """End `run` once servers have answered all queued requests."""
        self._jobs.put(None)

    def run(self) -> None:
        """Send queued requests; runs on a separate thread."""
        is_last = False
        while not is_last and (job := self._jobs.get()) is not None:
            sessions, closures, round_push = list(job[0]), list(job[1]), job[2]
            while not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    is_last = True
                    break
                sessions += more[0]
                closures += more[1]
                round_push = round_push or more[2]  # at most one round is pushed at a time
            for session in sessions:
                self._runner.worker_fenced(
                    session, _capture_error(partial(self._servers.fence, session))
                )
            if closures:
                low_watermark = self._runner.low_watermark()
                error = _capture_error(
                    partial(self._servers.forget_write_keys, closures, low_watermark)
                )
                self._runner.write_keys_forgotten(closures, error)
            if round_push is not None:
                self._runner.round_pushed(_capture_error(partial(self._push, round_push)))

    def _push(self, round_push: RoundPush) -> None:
        self._servers.push_round(
            round_push.last_number, [unpack(steps) for steps in round_push.optimizer_steps]
        )


def _capture_error(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
