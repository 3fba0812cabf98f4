"""The threads of a strategy: its replicas run at the same time, and meet.

Rule 1. Replicas are taken one by one by whoever is free: the thread that called `run`, and the
        crew's. Each that takes one wakes the next, so that a step that waits or computes has as
        many threads as replicas. After a round that was over at once the next wakes nobody: one of
        the threads looks every few milliseconds then, and the round goes on as others if it lasts.
Rule 2. There are threads for all replicas of a round, so that all can wait for each other; there is
        one round at a time.
Rule 3. A replica that fails ends the others at their next meeting, and `run` raises its error once
        all have ended. A meeting that cannot take place, for a replica has returned, is an error.
Rule 4. Threads hold neither the crew nor a round that is over: dropped is stopped.
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
from typing import Any

from headrace.errors import DeadlineExceededError, FailedPreconditionError
from headrace.forks import in_each_child
from headrace.threads import start_thread
from headrace.waiting import WaitWarnings

__all__ = ["Crew", "Round"]

_log = logging.getLogger(__name__)


class _EndedError(BaseException):
    """Unwinds a replica whose round has failed. No `Exception`: user code lets it pass."""


class Round:
    """One call of a function on each replica.

    Args:
        replicas: How many there are.
        function: Called with the replica's number and the round.
        across: Calls a function where it runs once for all replicas.
    """

    def __init__(
        self,
        replicas: int,
        function: Callable[[int, Round], Any],
        across: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.results: list[Any] = [None] * replicas
        self._replicas = replicas
        self._function = function
        self._across = across
        self._context = contextvars.copy_context()
        #: Replicas that nobody has taken. Each leaves it by one `pop`, which is atomic.
        self._pending = deque(range(replicas))
        self._changed = threading.Condition(threading.Lock())
        #: Replicas that have not returned yet. Changes under `_changed`, as all below.
        self._running = replicas
        #: What each replica that waits at the meeting brought.
        self._here: dict[int, tuple[Callable[[list[Any]], list[Any]], Any, str]] = {}
        self._meetings = 0
        #: The thread in which the function of a meeting runs.
        self.merger: int | None = None
        self._parts: list[Any] = []
        self._error: BaseException | None = None

    @property
    def pending(self) -> int:
        """How many replicas nobody has taken."""
        return len(self._pending)

    @property
    def is_over(self) -> bool:
        """Whether all replicas have returned."""
        return not self._running

    def take_one(self) -> bool:
        """Run a replica that nobody has taken; return whether there was one."""
        try:
            replica = self._pending.popleft()
        except IndexError:
            return False
        error: BaseException | None = None
        try:
            # A context of its own: what one replica sets there is not seen by the others.
            context = self._context.copy()
            self.results[replica] = context.run(self._function, replica, self)
        except _EndedError:
            pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._running -= 1
            if error is not None:
                self._fail(error)
            elif self._here and self._error is None:
                self._fail_unequal()
            if not self._running:
                self._changed.notify_all()
        return True

    def wait(self) -> None:
        """Wait until all replicas have returned.

        Raises:
            BaseException: What the first that failed raised.
        """
        with self._changed:
            try:
                while self._running:
                    self._changed.wait()
            except BaseException as interruption:
                if self._error is not None:  # interrupted again, as it waits for the others
                    raise
                self._fail(interruption)
                while self._running:
                    self._changed.wait()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def call_off(self, error: BaseException) -> None:
        """End the replicas at their next meeting, and begin no more."""
        with self._changed:
            self._fail(error)

    def merge(
        self,
        replica: int,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        what: str,
        limit: float | None = None,
    ) -> Any:
        """Meet the other replicas (`context.Rendezvous`)."""
        with self._changed:
            if self.is_over:
                raise FailedPreconditionError(
                    f"replica {replica} is at {what} after strategy.run has returned, where no "
                    "other replica comes: call backward, and all else in which replicas meet, in "
                    "the function that run calls"
                )
            if self._error is not None:
                raise _EndedError
            meeting = self._meetings
            self._check_alike(replica, what)
            self._here[replica] = (function, value, what)
            if len(self._here) < self._replicas:
                if self._running < self._replicas:
                    self._fail_unequal()
                self._wait_for_others(replica, meeting, limit)
                if self._meetings == meeting:
                    raise _EndedError
                return self._parts[replica]
            arrived = [self._here[each] for each in range(self._replicas)]
        # All others wait, so nothing of the round changes meanwhile.
        self.merger = threading.get_ident()
        try:
            parts = self._across(lambda: arrived[0][0]([brought for _, brought, _ in arrived]))
        except BaseException as error:
            # Were it caught on this replica alone, its next meeting would be with what the others
            # brought to this one.
            self.call_off(error)
            raise
        finally:
            self.merger = None
        with self._changed:
            self._here.clear()
            self._parts = parts
            self._meetings += 1
            self._changed.notify_all()
        return parts[replica]

    def release(self) -> None:
        """Drop what replicas made and brought, once it is over.

        A graph of gradients that runs through a meeting holds the round: so the round must not hold
        the graph, which Python's garbage collector does not see.
        """
        with self._changed:
            self.results, self._parts, self._here = [], [], {}
            self._function, self._context = _nothing, contextvars.Context()

    def _check_alike(self, replica: int, what: str) -> None:
        """Raise, and end the round, where a replica comes to what the others are not at."""
        for other, (_, _, theirs) in self._here.items():
            if theirs != what or other == replica:
                error = FailedPreconditionError(
                    f"the replicas do not do the same: replica {other} is at {theirs}, and replica "
                    f"{replica} is at {what}. Call merge_call, all_reduce and all_gather in the "
                    "same order on all replicas, with values that require gradients on all of them "
                    "or on none, and run the backward pass on all of them or on none"
                )
                self._fail(error)
                raise error

    def _wait_for_others(self, replica: int, meeting: int, limit: float | None) -> None:
        began, warnings = time.monotonic(), WaitWarnings()
        while self._meetings == meeting and self._error is None:
            waited = time.monotonic() - began
            missing = [each for each in range(self._replicas) if each not in self._here]
            if limit is not None and waited >= limit and missing:
                self._fail_late(replica, missing, waited)
                return
            # One of those who wait says it for all. Where all are here, their function is at work,
            # which says itself for whom it waits.
            if warnings.is_due(waited) and missing and replica == min(self._here):
                here = sorted(self._here)
                _log.warning(
                    "replica %s waits for replica %s since %.0f s, in merge_call, all_reduce, "
                    "all_gather or at a variable that all write (%s): all must come there",
                    ", ".join(map(str, here)),
                    ", ".join(map(str, missing)),
                    waited,
                    self._here[replica][2],
                )
            until = warnings.due_after if limit is None else min(limit, warnings.due_after)
            self._changed.wait(max(0.0, until - waited))

    def _fail_late(self, replica: int, missing: list[int], waited: float) -> None:
        self._fail(
            DeadlineExceededError(
                f"replica {', '.join(map(str, missing))} did not come to {self._here[replica][2]} "
                f"within {waited:.0f} s, where replica {replica} waits: run the backward pass on "
                "all replicas, and compute on each replica's own device, for PyTorch runs the "
                "backward passes of one GPU one after the other"
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
            self._running -= 1
        self._changed.notify_all()

    def _fail_unequal(self) -> None:
        waiting = ", ".join(map(str, sorted(self._here)))
        what = next(iter(self._here.values()))[2]
        self._fail(
            FailedPreconditionError(
                "Some replicas made a different number of replica_context().merge_call() calls: "
                f"replica {waiting} waits at {what} for one that has returned; call merge_call, "
                "all_reduce and all_gather equally often on all replicas, and run the backward "
                "pass through them on all of them or on none"
            )
        )


class Crew:
    """Runs rounds, one at a time.

    Args:
        replicas: Of each round.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._begin()
        _crews.add(self)

    def _begin(self) -> None:
        self._one_round = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._bench = _Bench()
        self._finalizer = weakref.finalize(self, self._bench.calls.put, None)

    def run(self, round_: Round) -> list[Any]:
        """Return what each replica returned.

        Raises:
            BaseException: What a replica raised.
            FailedPreconditionError: It is called in a function of `merge_call`, in whose round all
                replicas wait.
        """
        current = self._bench.current
        if current is not None and current.merger == threading.get_ident():
            raise FailedPreconditionError(
                "strategy.run is called in merge_call, where all replicas wait for its function: "
                "do that work on the replicas, before or after merge_call, or call run again when "
                "this one has returned"
            )
        with self._one_round:
            try:
                while len(self._threads) < self._replicas - 1:
                    self._start_one()
                if self._replicas > 1:
                    self._bench.begin(round_)
                while round_.take_one():
                    pass
                round_.wait()
                if self._replicas > 1:
                    self._bench.end(round_)
            except BaseException as error:
                self._bench.current = None
                if not round_.is_over:  # interrupted twice: its threads are of no more use
                    round_.call_off(error)
                    self._finalizer()
                    self._begin()
                raise
            else:
                return round_.results
            finally:
                if round_.is_over:
                    round_.release()

    def _start_one(self) -> None:
        thread = threading.Thread(
            target=_work,
            args=(self._bench,),
            name=f"headrace-replica-{len(self._threads) + 1}",
            daemon=True,
        )
        self._threads.append(thread)
        start_thread(thread)

    def leave_to_parent(self) -> None:
        """Begin again in a forked child, which has none of the threads."""
        self._finalizer.detach()
        self._begin()


class _Bench:
    """Where threads wait for a round.

    Attributes:
        calls: Wakes a thread for a round; None: for ever.
        current: The round that is going on.
        is_quick: Whether the last round was over at once, and a thread looks by itself.
        rounds: How many have begun.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Round | None] = SimpleQueue()
        self.current: Round | None = None
        self.is_quick = False
        self.rounds = 0
        self._began = 0.0

    def begin(self, round_: Round) -> None:
        """Let a round begin."""
        self.rounds += 1
        self._began = time.perf_counter()
        # First this, then the question: who looks by itself and gives up asks the other way round.
        self.current = round_
        if not self.is_quick:
            self.calls.put(round_)

    def end(self, round_: Round) -> None:
        """Take note of the end of a round."""
        self.current = None
        if time.perf_counter() - self._began > _QUICK_SECONDS:
            self.is_quick = False
        elif not self.is_quick:
            self.is_quick = True
            self.calls.put(round_)  # whoever takes it looks by itself from now on

    def next_call(self) -> Round | None:
        """Return a round that wants a thread; None: no more will."""
        seen, looks = self.rounds, 0
        while self.is_quick:
            with contextlib.suppress(Empty):
                return self.calls.get(timeout=_LOOK_SECONDS)
            looks = looks + 1 if seen == self.rounds else 0
            lasting = self.rounds == seen and self.current
            seen = self.rounds
            if lasting or looks == _MOST_LOOKS:
                self.is_quick = False
            current = self.current
            if not self.is_quick and current is not None and current.pending:
                return current
        return self.calls.get()


def _nothing(replica: int, round_: Round) -> None:
    """The function of a round that is over."""


def _work(bench: _Bench) -> None:
    while True:
        round_ = bench.next_call()
        if round_ is None:
            bench.calls.put(None)  # for the next
            return
        if round_.pending > 1:
            bench.calls.put(round_)  # wakes the next
        while round_.take_one():
            pass
        del round_


_QUICK_SECONDS = 1e-4
_LOOK_SECONDS = 2e-3
_MOST_LOOKS = 10
"""Without a round, after which a thread waits to be woken."""


def _leave_all_to_parent() -> None:
    for crew in list(_crews):
        crew.leave_to_parent()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()

in_each_child(_leave_all_to_parent)
