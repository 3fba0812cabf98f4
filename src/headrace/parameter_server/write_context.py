"""Who writes: the closure that the code belongs to, and how often it wrote.

    with writing_as(Origin(incarnation=1, closure=7, worker=0)):
        function(*args)          # each write has a key: it is carried out once, however often sent

Another attempt at the closure counts from 0 again, so its writes have the same keys. Replicas come
in any order, so what each of them writes itself is counted for it alone. Outside of closures writes
have no keys.

Writes that were begun and not waited for (`pushing.PendingStep`) are the attempt's: what its thread
asks later is carried out after them, and they are done when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.distribute.context import OnReplica, before_replicas, here
from headrace.parameter_server.specs import WriteKey

if TYPE_CHECKING:  # it imports this module
    from headrace.parameter_server.optimizer_steps import PendingStep

__all__ = [
    "ClosureRun",
    "WriteContext",
    "call_at_closure_end",
    "current_background_context",
    "current_closure_run",
    "current_collecting_context",
    "current_pending_steps",
    "next_key",
    "wait_for_steps",
    "write_as",
]


_REPLICA_NUMBER_STRIDE = 1 << 40
"""From one replica's numbers to those of the next: more than anything writes."""


class ClosureRun(NamedTuple):
    """Which attempt at which closure runs here.

    Attributes:
        coordinator_term: Of the coordinator.
        closure: Its number; another attempt has the same.
        worker_session: Number that the coordinator gave the worker.
        first_write_number: Number of its first write to anything.
    """

    coordinator_term: int
    closure: int
    worker_session: int
    first_write_number: int = 0


class WriteContext:
    """An origin, and how often it wrote to what.

    Args:
        run: What runs.
        collects_steps: Whether steps of optimizers are kept here (`collected_steps`) and not
            pushed.
    """

    def __init__(self, run: ClosureRun, *, collects_steps: bool = False) -> None:
        self.run = run
        self.collects_steps = collects_steps
        self.collected_steps: list[Any] = []
        self.thread_id = threading.get_ident()
        #: In the order in which they were begun.
        self.pending_steps: list[PendingStep] = []
        self._end_callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        #: By target, and where the numbers of a replica begin.
        self._write_counts: dict[tuple[str, int], int] = {}
        self._rejection: Exception | None = None

    @property
    def has_written(self) -> bool:
        """Whether anything was written, or tried."""
        return bool(self._write_counts)

    def reject_writes(self, error: Exception) -> None:
        """Have each later write raise this error. May be called from any thread."""
        self._rejection = error

    def next_key(self, target: str) -> WriteKey:
        """Return the key of the next write to a shard, table or counter."""
        incarnation, closure, worker, first = self.run
        place = here.get()
        if isinstance(place, OnReplica):
            first += _REPLICA_NUMBER_STRIDE * (1 + place.replica_id_in_sync_group)
        with self._lock:
            if self._rejection is not None:
                raise self._rejection
            number = self._write_counts.get((target, first), first)
            self._write_counts[target, first] = number + 1
        return WriteKey(
            coordinator_term=incarnation, closure=closure, worker_session=worker, number=number
        )

    def call_at_end(self, fn: Callable[[], None]) -> None:
        """Call a function once that of the user has returned, or has met the end of its data."""
        self._end_callbacks.append(fn)

    def finish(self) -> None:
        """Do what is left for the end, and wait for what was begun.

        Raises:
            Exception: What the first of it failed with.
        """
        while self._end_callbacks:
            self._end_callbacks.pop(0)()
        wait_for_steps(self.pending_steps)
        while self.pending_steps:
            self.finish_step(self.pending_steps[0])

    def finish_step(self, step: PendingStep) -> int:
        """Wait for a write, and for those before it; raise what it failed with, once."""
        wait_for_steps(self.pending_steps[: self.pending_steps.index(step) + 1])
        self.pending_steps.remove(step)
        return step.result()

    def collect_step(self, step: Any) -> int:
        """Keep a step of an optimizer; return how many are kept."""
        with self._lock:
            if self._rejection is not None:
                raise self._rejection
            self.collected_steps.append(step)
            return len(self.collected_steps)


_current: ContextVar[WriteContext | None] = ContextVar("headrace_closure", default=None)


@contextmanager
def write_as(run: ClosureRun, *, collects_steps: bool = False) -> Iterator[WriteContext]:
    """Give what is written inside the keys of a closure; steps are pushed, or gathered."""
    attempt = WriteContext(run, collects_steps=collects_steps)
    token = _current.set(attempt)
    before = before_replicas.set(_finish_pending_steps)
    try:
        yield attempt
    finally:
        before_replicas.reset(before)
        _current.reset(token)


def _finish_pending_steps() -> None:
    wait_for_steps(current_pending_steps())


def current_closure_run() -> ClosureRun | None:
    """Return the closure that the code belongs to; None: it belongs to none."""
    attempt = _current.get()
    return None if attempt is None else attempt.run


def current_collecting_context() -> WriteContext | None:
    """Return the closure that keeps steps of optimizers here; None: they are pushed."""
    attempt = _current.get()
    return attempt if attempt is not None and attempt.collects_steps else None


def call_at_closure_end(fn: Callable[[], None]) -> None:
    """Call a function at the end of the closure that the code belongs to; outside of one, now."""
    attempt = _current.get()
    if attempt is None:
        fn()
    else:
        attempt.call_at_end(fn)


def next_key(target: str) -> WriteKey | None:
    """Return the key of the next write to a shard, table or counter; None outside of closures."""
    attempt = _current.get()
    return None if attempt is None else attempt.next_key(target)


def current_background_context() -> WriteContext | None:
    """Return the closure in which writes may be begun and left; None: here they may not.

    Channels are a thread's own, and what replicas write becomes one write of all of them.
    """
    attempt = _current.get()
    place = here.get()
    is_one = not (isinstance(place, OnReplica) and place.strategy.num_replicas_in_sync > 1)
    if attempt is None or attempt.collects_steps or attempt.thread_id != threading.get_ident():
        return None
    return attempt if is_one else None


def current_pending_steps() -> list[PendingStep]:
    """Return the writes that were begun on this thread, in the closure, and are not over."""
    attempt = _current.get()
    if attempt is None or not attempt.pending_steps or attempt.thread_id != threading.get_ident():
        return []
    return [each for each in attempt.pending_steps if not each.is_done]


def wait_for_steps(steps: Sequence[PendingStep]) -> None:
    """Wait for writes in their order, up to one that is waited for already."""
    for each in steps:
        if each.is_awaited:
            return
        each.wait()
