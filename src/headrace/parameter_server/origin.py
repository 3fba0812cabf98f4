"""Who writes: the closure that the code belongs to, and how often it wrote.

    with writing_as(Origin(incarnation=1, closure=7, worker=0)):
        function(*args)          # each write has a key: it is carried out once, however often sent

Another attempt at the closure counts from 0 again, so its writes have the same keys. Replicas come
in any order, so what each of them writes itself is counted for it alone. Outside of closures writes
have no keys.

Writes that were begun and not waited for (`pushing.BegunStep`) are the attempt's: what its thread
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
    from headrace.parameter_server.pushing import BegunStep

__all__ = [
    "Attempt",
    "Origin",
    "at_end",
    "beginning",
    "finish",
    "gathering",
    "in_closure",
    "next_key",
    "under_way",
    "writing_as",
]


_REPLICA = 1 << 40
"""From one replica's numbers to those of the next: more than anything writes."""


class Origin(NamedTuple):
    """Which attempt at which closure runs here.

    Attributes:
        incarnation: Of the coordinator.
        closure: Its number; another attempt has the same.
        worker: Number that the coordinator gave the worker.
        first: Number of its first write to anything.
    """

    incarnation: int
    closure: int
    worker: int
    first: int = 0


class Attempt:
    """An origin, and how often it wrote to what.

    Args:
        origin: What runs.
        gathers: Whether steps of optimizers are kept here (`gathered`) and not pushed.
    """

    def __init__(self, origin: Origin, *, gathers: bool = False) -> None:
        self.origin = origin
        self.gathers = gathers
        self.gathered: list[Any] = []
        self.thread = threading.get_ident()
        #: In the order in which they were begun.
        self.begun: list[BegunStep] = []
        self._at_end: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        #: By target, and where the numbers of a replica begin.
        self._counts: dict[tuple[str, int], int] = {}
        self._refusal: Exception | None = None

    @property
    def wrote(self) -> bool:
        """Whether anything was written, or tried."""
        return bool(self._counts)

    def refuse(self, error: Exception) -> None:
        """Have each later write raise this error. May be called from any thread."""
        self._refusal = error

    def next_key(self, target: str) -> WriteKey:
        """Return the key of the next write to a shard, table or counter."""
        incarnation, closure, worker, first = self.origin
        place = here.get()
        if isinstance(place, OnReplica):
            first += _REPLICA * (1 + place.replica_id_in_sync_group)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            number = self._counts.get((target, first), first)
            self._counts[target, first] = number + 1
        return WriteKey(incarnation=incarnation, closure=closure, worker=worker, number=number)

    def at_end(self, fn: Callable[[], None]) -> None:
        """Call a function once that of the user has returned, or has met the end of its data."""
        self._at_end.append(fn)

    def finish(self) -> None:
        """Do what is left for the end, and wait for what was begun.

        Raises:
            Exception: What the first of it failed with.
        """
        while self._at_end:
            self._at_end.pop(0)()
        finish(self.begun)
        while self.begun:
            self.result_of(self.begun[0])

    def result_of(self, begun: BegunStep) -> int:
        """Wait for a write, and for those before it; raise what it failed with, once."""
        finish(self.begun[: self.begun.index(begun) + 1])
        self.begun.remove(begun)
        return begun.result()

    def gather(self, step: Any) -> int:
        """Keep a step of an optimizer; return how many are kept."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self.gathered.append(step)
            return len(self.gathered)


_here: ContextVar[Attempt | None] = ContextVar("headrace_closure", default=None)


@contextmanager
def writing_as(origin: Origin, *, gathers: bool = False) -> Iterator[Attempt]:
    """Give what is written inside the keys of a closure; steps are pushed, or gathered."""
    attempt = Attempt(origin, gathers=gathers)
    token = _here.set(attempt)
    before = before_replicas.set(_finish_here)
    try:
        yield attempt
    finally:
        before_replicas.reset(before)
        _here.reset(token)


def _finish_here() -> None:
    finish(under_way())


def in_closure() -> Origin | None:
    """Return the closure that the code belongs to; None: it belongs to none."""
    attempt = _here.get()
    return None if attempt is None else attempt.origin


def gathering() -> Attempt | None:
    """Return the closure that keeps steps of optimizers here; None: they are pushed."""
    attempt = _here.get()
    return attempt if attempt is not None and attempt.gathers else None


def at_end(fn: Callable[[], None]) -> None:
    """Call a function at the end of the closure that the code belongs to; outside of one, now."""
    attempt = _here.get()
    if attempt is None:
        fn()
    else:
        attempt.at_end(fn)


def next_key(target: str) -> WriteKey | None:
    """Return the key of the next write to a shard, table or counter; None outside of closures."""
    attempt = _here.get()
    return None if attempt is None else attempt.next_key(target)


def beginning() -> Attempt | None:
    """Return the closure in which writes may be begun and left; None: here they may not.

    Channels are a thread's own, and what replicas write becomes one write of all of them.
    """
    attempt = _here.get()
    place = here.get()
    is_one = not (isinstance(place, OnReplica) and place.strategy.num_replicas_in_sync > 1)
    if attempt is None or attempt.gathers or attempt.thread != threading.get_ident():
        return None
    return attempt if is_one else None


def under_way() -> list[BegunStep]:
    """Return the writes that were begun on this thread, in the closure, and are not over."""
    attempt = _here.get()
    if attempt is None or not attempt.begun or attempt.thread != threading.get_ident():
        return []
    return [each for each in attempt.begun if not each.is_over]


def finish(begun: Sequence[BegunStep]) -> None:
    """Wait for writes in their order, up to one that is waited for already."""
    for each in begun:
        if each.is_waiting:
            return
        each.wait()
