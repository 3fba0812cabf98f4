"""Meters: what a worker has done for its tasks, for its heartbeats and its metrics.

Rule 1. Nothing is done for an element: a portion is counted when it is made, a wait when it begins
        and ends, and at which steps threads are is looked at now and then (`sampler`).
Rule 2. A heartbeat says what changed since the last one. A wait that goes on is no change: when it
        began was said.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import msgspec

from headrace.execution.iterator import ElementIterator
from headrace.plan.node import Node
from headrace.service.messages import (
    WAITING_FOR_CLIENTS,
    WAITING_FOR_SPLITS,
    StepSeconds,
    TaskActivity,
)
from headrace.service.worker.hand_out import Ready, ReadyByTask

__all__ = ["Meter", "Meters", "Totals"]

_MOST_STAGES = 64
_OTHER_STAGES = "other steps"
_NOTHING = Ready()


class Meter:
    """What is done for one task.

    Args:
        task_id: Its number.
        clock: Tells the time, in seconds of a steady clock.
    """

    def __init__(self, task_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.task_id = task_id
        self._clock = clock
        #: Held for a moment, by whoever counts or reads.
        self._lock = threading.Lock()
        self._elements = self._bytes = 0
        self._waited = {WAITING_FOR_CLIENTS: 0.0, WAITING_FOR_SPLITS: 0.0}
        #: Waits that go on, and since when: a plan that reads ahead may wait for units meanwhile.
        self._waits: dict[str, float] = {}
        self._stages: dict[str, float] = {}
        #: The classes of steps, with those that they are derived from, by name.
        self.kinds: set[str] = set()
        self._made: set[type] = set()
        #: Of steps, by `id`.
        self._names: dict[int, tuple[weakref.ref[ElementIterator], str]] = {}
        self.thread: int | None = None
        """The thread that computes the task, by its identifier."""
        self.progress = 0
        """Grows with each result batch, each assignment of splits, and each wait that ended."""
        self.splits: tuple[int, int] | None = None
        """Which splits were assigned last, if any were."""
        self.asks_for_splits = False
        """Whether a thread of the task waits for more splits."""

    # --- what happens ---------------------------------------------------------------------------

    def made(self, elements: int, size: int) -> None:
        """Count a portion of so many elements and bytes."""
        with self._lock:
            self._elements += elements
            self._bytes += size
            self.progress += 1

    def assigned(self, splits: tuple[int, int] | None) -> None:
        """Take note of splits that were assigned."""
        with self._lock:
            self.splits = splits or self.splits
            self.progress += 1

    @contextlib.contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """Count the time that the block takes as a wait."""
        with self._lock:
            self._waits[what] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._waited[what] += self._clock() - self._waits.pop(what)
                self.progress += 1

    @property
    def waits_for_clients(self) -> bool:
        """Whether the task waits until clients take what it made."""
        return WAITING_FOR_CLIENTS in self._waits

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is made for now."""
        return bool(self._waits)

    # --- steps ----------------------------------------------------------------------------------

    def watch(self, node: Node, iterator: ElementIterator) -> ElementIterator:
        """Learn the name of a step (`Watched` of `execution`); nothing stands in its place."""
        kind = node.kind or type(node).__name__
        place = f" at {node.location}" if node.location else ""
        made = type(iterator)
        if made not in self._made:
            self._made.add(made)
            self.kinds.update(kind.__qualname__ for kind in made.__mro__)
        number, names = id(iterator), self._names
        # One that cannot be referred to weakly goes without a name.
        with contextlib.suppress(TypeError):
            reference = weakref.ref(iterator, lambda _: names.pop(number, None))
            names[number] = reference, f"{kind}{place}"
        return iterator

    def stage_of(self, iterator: object) -> str | None:
        """Return the name of a step of this task.

        It is known by its identity alone: what is asked for may be half made, by another thread.
        """
        found = self._names.get(id(iterator))
        return found[1] if found is not None and found[0]() is iterator else None

    def spent(self, stage: str, seconds: float) -> None:
        """Count seconds for which a thread was at a step."""
        with self._lock:
            if stage not in self._stages and len(self._stages) >= _MOST_STAGES:
                stage = _OTHER_STAGES
            self._stages[stage] = self._stages.get(stage, 0.0) + seconds

    # --- what is the case -----------------------------------------------------------------------

    def read(self, ready: Ready = _NOTHING) -> TaskActivity:
        """Return what was counted so far.

        Args:
            ready: What is made and waits for clients.
        """
        with self._lock:
            waited = dict(self._waited)
            for what, since in self._waits.items():
                waited[what] += self._clock() - since
            return TaskActivity(
                task_id=self.task_id,
                elements=self._elements,
                bytes=self._bytes,
                buffered_batches=ready.portions,
                buffered_bytes=ready.bytes,
                waiting_for=next(iter(self._waits), ""),
                client_wait_seconds=waited[WAITING_FOR_CLIENTS],
                split_wait_seconds=waited[WAITING_FOR_SPLITS],
                steps=tuple(
                    StepSeconds(step=stage, seconds=seconds)
                    for stage, seconds in self._stages.items()
                ),
                trainers=ready.trainers,
            )


class Totals(msgspec.Struct):
    """What a worker has done since it started, for all tasks."""

    elements: int = 0
    bytes: int = 0
    buffers: int = 0
    buffer_bytes: int = 0
    waited_for_clients: float = 0.0
    waited_for_units: float = 0.0
    stages: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, task: TaskActivity) -> None:
        """Add what was done for a task."""
        self.elements += task.elements
        self.bytes += task.bytes
        self.waited_for_clients += task.client_wait_seconds
        self.waited_for_units += task.split_wait_seconds
        self.buffers += task.buffered_batches
        self.buffer_bytes += task.buffered_bytes
        for each in task.steps:
            stage = each.step if each.step in self.stages else _OTHER_STAGES
            if len(self.stages) < _MOST_STAGES:
                stage = each.step
            self.stages[stage] = self.stages.get(stage, 0.0) + each.seconds


class Meters:
    """The meters of a worker's tasks, by the number of the producer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, Meter] = {}
        #: Those whose producers ended, until that was said, and clients have taken what they made.
        self._ended: list[Meter] = []
        #: What was reported last.
        self._said: dict[int, TaskActivity] = {}
        #: Of tasks that are over.
        self._before = Totals()

    def begin(self, producer: int, task_id: int) -> Meter:
        """Return the meter of a new producer."""
        meter = Meter(task_id)
        with self._lock:
            self._running[producer] = meter
        return meter

    def end(self, producer: int) -> None:
        """Take note that a producer has ended; what it made may still wait for clients."""
        with self._lock:
            meter = self._running.pop(producer, None)
            if meter is not None:
                self._ended.append(meter)
                self._before.add(meter.read())

    @property
    def running(self) -> list[Meter]:
        """Those whose producers have not ended."""
        with self._lock:
            return list(self._running.values())

    def changes(self, ready: ReadyByTask) -> tuple[TaskActivity, ...]:
        """Return what was done for tasks of which anything changed since this was asked last."""
        with self._lock:
            found = []
            for meter in (*self._running.values(), *self._ended):
                now = meter.read(ready.get(meter.task_id, _NOTHING))
                if _what_counts(now) != _what_counts(self._said.get(meter.task_id)):
                    self._said[meter.task_id] = now
                    found.append(now)
            over = [each for each in self._ended if not self._said[each.task_id].buffered_batches]
            for meter in over:
                self._ended.remove(meter)
                del self._said[meter.task_id]
            return tuple(found)

    def totals(self, ready: ReadyByTask) -> Totals:
        """Return what was done for all tasks, those that are over too."""
        with self._lock:
            totals = msgspec.structs.replace(self._before, stages=dict(self._before.stages))
            for meter in self._running.values():
                totals.add(meter.read(ready.get(meter.task_id, _NOTHING)))
            return totals


def _what_counts(activity: TaskActivity | None) -> object:
    if activity is None:
        return None
    if not activity.waiting_for:
        return activity
    return msgspec.structs.replace(activity, client_wait_seconds=0.0, split_wait_seconds=0.0)
