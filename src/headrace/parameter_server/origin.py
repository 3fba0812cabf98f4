"""Who writes: the closure that the code belongs to, and how often it wrote.

    with writing_as(Origin(incarnation=1, closure=7, worker=0)):
        function(*args)          # each write has a key: it is carried out once, however often sent

Another attempt at the closure counts from 0 again, so its writes have the same keys. Replicas come
in any order, so what each of them writes itself is counted for it alone. Outside of closures writes
have no keys.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from headrace.distribute.context import OnReplica, here
from headrace.parameter_server.operations import WriteKey

__all__ = ["Attempt", "Origin", "gathering", "in_closure", "next_key", "writing_as"]


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
    try:
        yield attempt
    finally:
        _here.reset(token)


def in_closure() -> Origin | None:
    """Return the closure that the code belongs to; None: it belongs to none."""
    attempt = _here.get()
    return None if attempt is None else attempt.origin


def gathering() -> Attempt | None:
    """Return the closure that keeps steps of optimizers here; None: they are pushed."""
    attempt = _here.get()
    return attempt if attempt is not None and attempt.gathers else None


def next_key(target: str) -> WriteKey | None:
    """Return the key of the next write to a shard, table or counter; None outside of closures."""
    attempt = _here.get()
    return None if attempt is None else attempt.next_key(target)
