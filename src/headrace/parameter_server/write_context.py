"""Identity of writes: the closure that the code belongs to, and the number of its writes.

    with write_as(ClosureRun(coordinator_term=1, closure=7, worker_session=0)):
        function(*args)          # each write has a key: it is applied once, even if sent again

Another run of the closure counts from 0 again, so its writes have the same keys. Replicas run in
any order, so the writes of each replica are counted separately. Writes outside of closures have no
keys.

Pending writes (`optimizer_steps.PendingStep`) belong to the run: later requests of its thread are
executed after them, and they are complete when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.distribute.execution_context import ReplicaView, before_replicas_hook, current_context
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
"""Distance between the write numbers of replicas; larger than any number of writes."""


class ClosureRun(NamedTuple):
    """One run of a closure.

    Attributes:
        coordinator_term: Term of the coordinator.
        closure: Number of the closure, the same in each run.
        worker_session: Number that the coordinator gave the worker.
        first_write_number: Number of its first write to each target.
    """

    coordinator_term: int
    closure: int
    worker_session: int
    first_write_number: int = 0


class WriteContext:
    """A closure run, and its number of writes to each target.

    Args:
        run: The closure run.
        collects_steps: Whether optimizer steps are collected (`collected_steps`) instead of pushed.
    """

    def __init__(self, run: ClosureRun, *, collects_steps: bool = False) -> None:
        self.run = run
        self.collects_steps = collects_steps
        self.collected_steps: list[Any] = []
        self.thread_id: int = threading.get_ident()
        #: In the order in which they were begun.
        self.pending_steps: list[PendingStep] = []
        self._end_callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        #: By target and first write number of the replica.
        self._write_counts: dict[tuple[str, int], int] = {}
        self._rejection: Exception | None = None

    @property
    def has_written(self) -> bool:
        """Whether the run has written anything, or tried to."""
        return bool(self._write_counts)

    def reject_writes(self, error: Exception) -> None:
        """Make each later write raise this error. Thread-safe."""
        self._rejection = error

    def next_key(self, target: str) -> WriteKey:
        """Return the key of the next write to a shard, table or counter."""
        term, closure, worker_session, first = self.run
        replica = current_context.get()
        if isinstance(replica, ReplicaView):
            first += _REPLICA_NUMBER_STRIDE * (1 + replica.replica_id_in_sync_group)
        with self._lock:
            if self._rejection is not None:
                raise self._rejection
            number = self._write_counts.get((target, first), first)
            self._write_counts[target, first] = number + 1
        return WriteKey(
            coordinator_term=term, closure=closure, worker_session=worker_session, number=number
        )

    def call_at_end(self, fn: Callable[[], None]) -> None:
        """Call a function after the user's function has returned or reached the end of its data."""
        self._end_callbacks.append(fn)

    def finish(self) -> None:
        """Call the end callbacks, and wait for pending steps.

        Raises:
            Exception: The first error of these.
        """
        while self._end_callbacks:
            self._end_callbacks.pop(0)()
        wait_for_steps(self.pending_steps)
        while self.pending_steps:
            self.finish_step(self.pending_steps[0])

    def finish_step(self, step: PendingStep) -> int:
        """Wait for a step, and for those before it; raise its error, once."""
        wait_for_steps(self.pending_steps[: self.pending_steps.index(step) + 1])
        self.pending_steps.remove(step)
        return step.result()

    def collect_step(self, step: Any) -> int:
        """Keep an optimizer step; return the number of kept steps."""
        with self._lock:
            if self._rejection is not None:
                raise self._rejection
            self.collected_steps.append(step)
            return len(self.collected_steps)


_current: ContextVar[WriteContext | None] = ContextVar("headrace_closure", default=None)


@contextmanager
def write_as(run: ClosureRun, *, collects_steps: bool = False) -> Iterator[WriteContext]:
    """Give writes inside the context the keys of a closure; push steps, or collect them."""
    context = WriteContext(run, collects_steps=collects_steps)
    token = _current.set(context)
    before = before_replicas_hook.set(_finish_pending_steps)
    try:
        yield context
    finally:
        before_replicas_hook.reset(before)
        _current.reset(token)


def _finish_pending_steps() -> None:
    wait_for_steps(current_pending_steps())


def current_closure_run() -> ClosureRun | None:
    """Return the closure run that the code belongs to, or None."""
    context = _current.get()
    return None if context is None else context.run


def current_collecting_context() -> WriteContext | None:
    """Return the context that collects optimizer steps, or None if steps are pushed."""
    context = _current.get()
    return context if context is not None and context.collects_steps else None


def call_at_closure_end(fn: Callable[[], None]) -> None:
    """Call a function at the end of the current closure, or now if there is none."""
    context = _current.get()
    if context is None:
        fn()
    else:
        context.call_at_end(fn)


def next_key(target: str) -> WriteKey | None:
    """Return the key of the next write to a shard, table or counter; None outside of closures."""
    context = _current.get()
    return None if context is None else context.next_key(target)


def current_background_context() -> WriteContext | None:
    """Return the context in which steps may stay pending, or None if they may not.

    Channels belong to one thread, and the writes of replicas are merged into one.
    """
    context = _current.get()
    replica = current_context.get()
    has_one_replica = not (
        isinstance(replica, ReplicaView) and replica.strategy.num_replicas_in_sync > 1
    )
    if context is None or context.collects_steps or context.thread_id != threading.get_ident():
        return None
    return context if has_one_replica else None


def current_pending_steps() -> list[PendingStep]:
    """Return the pending steps of the current closure on this thread."""
    context = _current.get()
    if context is None or not context.pending_steps or context.thread_id != threading.get_ident():
        return []
    return [each for each in context.pending_steps if not each.is_done]


def wait_for_steps(steps: Sequence[PendingStep]) -> None:
    """Wait for steps in order, up to one that is already awaited."""
    for each in steps:
        if each.is_awaited:
            return
        each.wait()
