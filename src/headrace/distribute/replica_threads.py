"""Threads that run the replicas of a strategy concurrently.

Rule 1. Any free thread (the caller of `run`, or one of the pool) takes the next replica and runs
        it. A thread that takes a replica wakes another thread, so a step that waits or computes
        gets a thread per replica. After a very short step, no thread is woken for the next step;
        instead one thread polls every few milliseconds, and joins a step that lasts longer.
Rule 2. One step runs at a time, and the pool has enough threads for all of its replicas, since
        replicas wait for each other in merges.
Rule 3. An error in one replica aborts the others at their next merge, and `run` raises it once all
        have ended. A merge that can never complete, because a replica has returned, is an error.
Rule 4. Threads hold no reference to the pool or to a finished step; they stop when the pool is
        garbage collected.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from headrace.errors import DeadlineExceededError, FailedPreconditionError
from headrace.forks import call_in_children
from headrace.threads import start_thread
from headrace.waiting import WaitWarningLimiter

__all__ = ["ReplicaStep", "ReplicaThreadPool"]

_log = logging.getLogger(__name__)


class _StepAbortedError(BaseException):
    """Unwinds a replica of a failed step. Not an `Exception`, which user code might catch."""


class _MergeCall(NamedTuple):
    """One replica's call of `ReplicaStep.merge`."""

    function: Callable[[list[Any]], list[Any]]
    value: Any
    description: str


class ReplicaStep:
    """One call of a function on each replica.

    Args:
        replicas: Number of replicas.
        function: Called with the replica's number and this step.
        run_cross_replica: Calls a function in the cross-replica context, once for all replicas.
    """

    def __init__(
        self,
        replicas: int,
        function: Callable[[int, ReplicaStep], Any],
        run_cross_replica: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.results: list[Any] = [None] * replicas
        self._replicas = replicas
        self._function = function
        self._run_cross_replica = run_cross_replica
        self._context = contextvars.copy_context()
        #: Replicas that no thread has taken. Threads take one by `popleft`, which is atomic.
        self._pending = deque(range(replicas))
        self._changed = threading.Condition(threading.Lock())
        #: Number of replicas that have not returned. Guarded by `_changed`, as all fields below.
        self._num_running = replicas
        #: Call of each replica that waits in the current merge.
        self._arrived: dict[int, _MergeCall] = {}
        self._num_merges = 0
        #: Thread that runs the function of a merge.
        self.merge_thread: int | None = None
        self._merge_results: list[Any] = []
        self._error: BaseException | None = None

    @property
    def num_pending(self) -> int:
        """Number of replicas that no thread has taken."""
        return len(self._pending)

    @property
    def is_done(self) -> bool:
        """Whether all replicas have returned."""
        return not self._num_running

    def run_next(self) -> bool:
        """Run a replica that no thread has taken; return False if there is none."""
        try:
            replica = self._pending.popleft()
        except IndexError:
            return False
        error: BaseException | None = None
        try:
            # A separate context: variables that one replica sets are not visible to the others.
            context = self._context.copy()
            self.results[replica] = context.run(self._function, replica, self)
        except _StepAbortedError:
            pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._num_running -= 1
            if error is not None:
                self._fail(error)
            elif self._arrived and self._error is None:
                self._fail_unequal_calls()
            if not self._num_running:
                self._changed.notify_all()
        return True

    def wait(self) -> None:
        """Wait until all replicas have returned.

        Raises:
            BaseException: The error of the first replica that failed.
        """
        with self._changed:
            try:
                while self._num_running:
                    self._changed.wait()
            except BaseException as interruption:
                if self._error is not None:  # interrupted again while waiting for the others
                    raise
                self._fail(interruption)
                while self._num_running:
                    self._changed.wait()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def abort(self, error: BaseException) -> None:
        """Abort running replicas at their next merge, and do not start others."""
        with self._changed:
            self._fail(error)

    def merge(
        self,
        replica: int,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        description: str,
        timeout: float | None = None,
    ) -> Any:
        """Merge the values of all replicas (`execution_context.Rendezvous`)."""
        with self._changed:
            if self.is_done:
                raise FailedPreconditionError(
                    f"replica {replica} calls {description} after strategy.run has returned, "
                    "when no other replica can take part: call backward and all collectives in "
                    "the function that run calls"
                )
            if self._error is not None:
                raise _StepAbortedError
            merge_number = self._num_merges
            self._check_same_call(replica, description)
            self._arrived[replica] = _MergeCall(function, value, description)
            if len(self._arrived) < self._replicas:
                if self._num_running < self._replicas:
                    self._fail_unequal_calls()
                self._wait_for_others(replica, merge_number, timeout)
                if self._num_merges == merge_number:
                    raise _StepAbortedError
                return self._merge_results[replica]
            calls = [self._arrived[each] for each in range(self._replicas)]
        # All other replicas wait, so no lock is needed.
        self.merge_thread = threading.get_ident()
        try:
            parts = self._run_cross_replica(
                lambda: calls[0].function([call.value for call in calls])
            )
        except BaseException as error:
            # If user code caught the error on this replica only, its next merge would be paired
            # with the values that the others passed to this one.
            self.abort(error)
            raise
        finally:
            self.merge_thread = None
        with self._changed:
            self._arrived.clear()
            self._merge_results = parts
            self._num_merges += 1
            self._changed.notify_all()
        return parts[replica]

    def release(self) -> None:
        """Drop the values of a finished step.

        A gradient graph with a merge references the step. If the step referenced the graph, too,
        Python's garbage collector could not see the cycle.
        """
        with self._changed:
            self.results, self._merge_results, self._arrived = [], [], {}
            self._function, self._context = _do_nothing, contextvars.Context()

    def _check_same_call(self, replica: int, description: str) -> None:
        """Raise, and fail the step, if a replica's call differs from those of the others."""
        for other, call in self._arrived.items():
            if call.description != description or other == replica:
                error = FailedPreconditionError(
                    f"the replicas run different operations: replica {other} is in "
                    f"{call.description}, and replica {replica} is in {description}. Call "
                    "merge_call, all_reduce and all_gather in the same order on all replicas, with "
                    "values that require "
                    "gradients on all of them or on none, and run the backward pass on all of "
                    "them or on none"
                )
                self._fail(error)
                raise error

    def _wait_for_others(self, replica: int, merge_number: int, timeout: float | None) -> None:
        started, warnings = time.monotonic(), WaitWarningLimiter()
        while self._num_merges == merge_number and self._error is None:
            waited = time.monotonic() - started
            missing = [each for each in range(self._replicas) if each not in self._arrived]
            if timeout is not None and waited >= timeout and missing:
                self._fail_timeout(replica, missing, waited)
                return
            # One of the waiting replicas logs for all. If none is missing, the merge function is
            # running, and logs its own waits.
            if warnings.should_warn(waited) and missing and replica == min(self._arrived):
                waiting = sorted(self._arrived)
                _log.warning(
                    "replica %s has waited for replica %s for %.0f s, in merge_call, "
                    "all_reduce, all_gather or an aggregated variable write (%s): all replicas "
                    "must call it",
                    ", ".join(map(str, waiting)),
                    ", ".join(map(str, missing)),
                    waited,
                    self._arrived[replica].description,
                )
            until = (
                warnings.next_warning_after
                if timeout is None
                else min(timeout, warnings.next_warning_after)
            )
            self._changed.wait(max(0.0, until - waited))

    def _fail_timeout(self, replica: int, missing: list[int], waited: float) -> None:
        self._fail(
            DeadlineExceededError(
                f"replica {', '.join(map(str, missing))} did not call "
                f"{self._arrived[replica].description} within {waited:.0f} s, while replica "
                f"{replica} waited: run the backward pass on all replicas, and use a different "
                "device for each replica, since PyTorch runs the backward passes of one GPU one "
                "after the other"
            )
        )

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        while self._pending:
            try:
                self._pending.pop()
            except IndexError:
                break
            self._num_running -= 1
        self._changed.notify_all()

    def _fail_unequal_calls(self) -> None:
        waiting = ", ".join(map(str, sorted(self._arrived)))
        description = next(iter(self._arrived.values())).description
        self._fail(
            FailedPreconditionError(
                "Some replicas made a different number of replica_context().merge_call() calls: "
                f"replica {waiting} waits in {description}, but another replica has returned; call "
                "merge_call, all_reduce and all_gather equally often on all replicas, and run "
                "the backward pass through them on all of them or on none"
            )
        )


class ReplicaThreadPool:
    """Threads that run steps, one at a time.

    Args:
        replicas: Number of replicas in each step.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._initialize()
        _pools.add(self)

    def _initialize(self) -> None:
        self._step_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._queue = _StepQueue()
        self._finalizer = weakref.finalize(self, self._queue.calls.put, None)

    def run(self, step: ReplicaStep) -> list[Any]:
        """Run a step and return each replica's result.

        Raises:
            BaseException: The error of a replica.
            FailedPreconditionError: If called in a function of `merge_call`: all replicas of the
                current step wait for its result.
        """
        current = self._queue.current
        if current is not None and current.merge_thread == threading.get_ident():
            raise FailedPreconditionError(
                "strategy.run was called in the function of merge_call, while all replicas wait "
                "for its result: do that work on the replicas, before or after merge_call, or call "
                "run again after this one has returned"
            )
        with self._step_lock:
            try:
                while len(self._threads) < self._replicas - 1:
                    self._start_thread()
                if self._replicas > 1:
                    self._queue.start(step)
                while step.run_next():
                    pass
                step.wait()
                if self._replicas > 1:
                    self._queue.finish(step)
            except BaseException as error:
                self._queue.current = None
                if not step.is_done:  # interrupted twice: replace its threads
                    step.abort(error)
                    self._finalizer()
                    self._initialize()
                raise
            else:
                return step.results
            finally:
                if step.is_done:
                    step.release()

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_run_steps,
            args=(self._queue,),
            name=f"headrace-replica-{len(self._threads) + 1}",
            daemon=True,
        )
        self._threads.append(thread)
        start_thread(thread)

    def after_fork_in_child(self) -> None:
        """Reset the pool in a forked child, which has none of the threads."""
        self._finalizer.detach()
        self._initialize()


class _StepQueue:
    """Queue on which threads wait for a step.

    Attributes:
        calls: Each entry wakes one thread for a step; None ends the thread.
        current: Step in progress.
        is_polling: Whether the last step was short, so that a thread polls instead of being woken.
        num_steps: Number of started steps.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[ReplicaStep | None] = SimpleQueue()
        self.current: ReplicaStep | None = None
        self.is_polling = False
        self.num_steps = 0
        self._started_at = 0.0

    def start(self, step: ReplicaStep) -> None:
        """Start a step."""
        self.num_steps += 1
        self._started_at = time.perf_counter()
        # Set `current` before reading `is_polling`: a thread that stops polling does the reverse.
        self.current = step
        if not self.is_polling:
            self.calls.put(step)

    def finish(self, step: ReplicaStep) -> None:
        """Finish a step, and choose between polling and waking for the next one."""
        self.current = None
        if time.perf_counter() - self._started_at > _SHORT_STEP_SECONDS:
            self.is_polling = False
        elif not self.is_polling:
            self.is_polling = True
            self.calls.put(step)  # the thread that takes it starts polling

    def next_step(self) -> ReplicaStep | None:
        """Return a step that needs a thread; None ends the calling thread."""
        last_seen, num_polls = self.num_steps, 0
        while self.is_polling:
            with contextlib.suppress(Empty):
                return self.calls.get(timeout=_POLL_SECONDS)
            num_polls = num_polls + 1 if last_seen == self.num_steps else 0
            is_long = self.num_steps == last_seen and self.current
            last_seen = self.num_steps
            if is_long or num_polls == _MAX_POLLS:
                self.is_polling = False
            current = self.current
            if not self.is_polling and current is not None and current.num_pending:
                return current
        return self.calls.get()


def _do_nothing(replica: int, step: ReplicaStep) -> None:
    """Replacement for the function of a finished step."""


def _run_steps(queue: _StepQueue) -> None:
    while True:
        step = queue.next_step()
        if step is None:
            queue.calls.put(None)  # ends the next thread
            return
        if step.num_pending > 1:
            queue.calls.put(step)  # wakes the next thread
        while step.run_next():
            pass
        del step


_SHORT_STEP_SECONDS = 1e-4
_POLL_SECONDS = 2e-3
_MAX_POLLS = 10
"""Number of polls without a step after which a thread waits to be woken."""


def _notify_after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork_in_child()


_pools: weakref.WeakSet[ReplicaThreadPool] = weakref.WeakSet()

call_in_children(_notify_after_fork)
