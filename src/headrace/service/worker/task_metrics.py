"""Work done for each task, as reported in heartbeats and metrics.

Rule 1. Nothing is counted per element: a batch is counted when it is made, a wait when it begins
    and ends, and the steps that threads execute are sampled (`step_profiler`).
Rule 2. A heartbeat contains the changes since the last one. A continuing wait is no change, because
    its start was reported.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import msgspec

from headrace.execution.iterator import ElementIterator
from headrace.execution.parallel_map import ParallelMapIterator
from headrace.execution.step_registry import StepRegistry, name_step
from headrace.plan.node import Node
from headrace.service.messages import (
    WAITING_FOR_CLIENTS,
    WAITING_FOR_SPLITS,
    StepSeconds,
    TaskActivity,
)
from headrace.service.worker.delivery_policy import BufferedByTask, BufferedOutput

__all__ = ["TaskMetrics", "WorkerMetrics", "WorkerTotals"]

_MAX_STEPS = 64
_OTHER_STEPS = "other steps"
_EMPTY = BufferedOutput()


class TaskMetrics:
    """Counters of one task.

    Args:
        task_id: ID of the task.
        clock: Returns the time in seconds of a monotonic clock.
    """

    def __init__(self, task_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.task_id = task_id
        self._clock = clock
        #: Held briefly by every thread that counts or reads.
        self._lock = threading.Lock()
        self._elements = self._bytes = 0
        self._waited = {WAITING_FOR_CLIENTS: 0.0, WAITING_FOR_SPLITS: 0.0}
        #: Waits in progress and their start times; there can be several, because a plan that reads
        #: ahead may wait for splits at the same time.
        self._open_waits: dict[str, float] = {}
        self._step_seconds: dict[str, float] = {}
        #: Numbers of the steps by name, inputs first, and the iterators of those with threads.
        self._positions: dict[str, int] = {}
        self._parallel_steps: dict[str, weakref.ref[ParallelMapIterator]] = {}
        self.steps: StepRegistry[str] = StepRegistry[str]()
        """Names of the steps."""
        self.thread_id: int | None = None
        """Identifier of the thread that computes the task."""
        self.progress: int = 0
        """Counter that grows with each result batch, assignment of splits, and end of a wait."""
        self.last_splits: tuple[int, int] | None = None
        """The splits assigned last, if any."""
        self.is_requesting_splits = False
        """Whether a thread of the task waits for more splits."""

    # --- inputs -----------------------------------------------------------------------------------

    def add_batch(self, elements: int, size: int) -> None:
        """Count a batch of this many elements and bytes."""
        with self._lock:
            self._elements += elements
            self._bytes += size
            self.progress += 1

    def add_assignment(self, splits: tuple[int, int] | None) -> None:
        """Record an assignment of splits."""
        with self._lock:
            self.last_splits = splits or self.last_splits
            self.progress += 1

    @contextlib.contextmanager
    def track_wait(self, reason: str) -> Iterator[None]:
        """Count the duration of the block as a wait."""
        with self._lock:
            self._open_waits[reason] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._waited[reason] += self._clock() - self._open_waits.pop(reason)
                self.progress += 1

    @property
    def waits_for_clients(self) -> bool:
        """Whether the task waits until clients take its output."""
        return WAITING_FOR_CLIENTS in self._open_waits

    @property
    def is_waiting(self) -> bool:
        """Whether the task produces nothing at present because it waits."""
        return bool(self._open_waits)

    # --- steps ----------------------------------------------------------------------------------

    def register_step(self, node: Node, iterator: ElementIterator) -> ElementIterator:
        """Record the name of a step. The iterator is not wrapped."""
        name = name_step(node)
        self.steps.register(iterator, name)
        with self._lock:
            # Inputs are built first. Nested datasets may have any number of names.
            if len(self._positions) < _MAX_STEPS:
                self._positions.setdefault(name, len(self._positions))
            if isinstance(iterator, ParallelMapIterator) and name in self._positions:
                self._parallel_steps[name] = weakref.ref(iterator)
        return iterator

    def find_step(self, iterator: object) -> str | None:
        """Return the name of a step of this task; see `StepRegistry.find`."""
        return self.steps.find(iterator)

    def add_step_seconds(self, step: str, seconds: float) -> None:
        """Add the seconds that a thread spent in a step."""
        with self._lock:
            if step not in self._step_seconds and len(self._step_seconds) >= _MAX_STEPS:
                step = _OTHER_STEPS
            self._step_seconds[step] = self._step_seconds.get(step, 0.0) + seconds

    def _threads(self, step: str) -> int:
        reference = self._parallel_steps.get(step)
        iterator = None if reference is None else reference()
        return 0 if iterator is None else iterator.threads

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self, buffered: BufferedOutput = _EMPTY) -> TaskActivity:
        """Return the counters.

        Args:
            buffered: Output that waits for clients.
        """
        with self._lock:
            waited = dict(self._waited)
            for reason, since in self._open_waits.items():
                waited[reason] += self._clock() - since
            return TaskActivity(
                task_id=self.task_id,
                elements=self._elements,
                bytes=self._bytes,
                buffered_batches=buffered.batches,
                buffered_bytes=buffered.bytes,
                waiting_for=next(iter(self._open_waits), ""),
                client_wait_seconds=waited[WAITING_FOR_CLIENTS],
                split_wait_seconds=waited[WAITING_FOR_SPLITS],
                steps=tuple(
                    StepSeconds(
                        step=step,
                        seconds=seconds,
                        position=self._positions.get(step, -1),
                        threads=self._threads(step),
                    )
                    for step, seconds in self._step_seconds.items()
                ),
                trainers=buffered.trainers,
            )


class WorkerTotals(msgspec.Struct):
    """Totals of a worker since its start, over all tasks."""

    elements: int = 0
    bytes: int = 0
    buffered_batches: int = 0
    buffered_bytes: int = 0
    client_wait_seconds: float = 0.0
    split_wait_seconds: float = 0.0
    steps: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, task: TaskActivity) -> None:
        """Add the counters of a task."""
        self.elements += task.elements
        self.bytes += task.bytes
        self.client_wait_seconds += task.client_wait_seconds
        self.split_wait_seconds += task.split_wait_seconds
        self.buffered_batches += task.buffered_batches
        self.buffered_bytes += task.buffered_bytes
        for each in task.steps:
            step = each.step if each.step in self.steps else _OTHER_STEPS
            if len(self.steps) < _MAX_STEPS:
                step = each.step
            self.steps[step] = self.steps.get(step, 0.0) + each.seconds


class WorkerMetrics:
    """Counters of a worker's tasks, by number of the producer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, TaskMetrics] = {}
        #: Tasks whose producers ended, until that was reported and clients have taken their output.
        self._ended: list[TaskMetrics] = []
        #: Last reported activity by task.
        self._last_reported: dict[int, TaskActivity] = {}
        #: Totals of finished tasks.
        self._finished_totals = WorkerTotals()

    def start_task(self, producer: int, task_id: int) -> TaskMetrics:
        """Return the counters of a new producer."""
        meter = TaskMetrics(task_id)
        with self._lock:
            self._running[producer] = meter
        return meter

    def end_task(self, producer: int) -> None:
        """Record that a producer ended; its output may still wait for clients."""
        with self._lock:
            meter = self._running.pop(producer, None)
            if meter is not None:
                self._ended.append(meter)
                self._finished_totals.add(meter.snapshot())

    @property
    def running(self) -> list[TaskMetrics]:
        """Tasks whose producers have not ended."""
        with self._lock:
            return list(self._running.values())

    def take_changes(self, buffered: BufferedByTask) -> tuple[TaskActivity, ...]:
        """Return the counters of tasks that changed since the last call."""
        with self._lock:
            found = []
            for meter in (*self._running.values(), *self._ended):
                now = meter.snapshot(buffered.get(meter.task_id, _EMPTY))
                if _without_wait_times(now) != _without_wait_times(
                    self._last_reported.get(meter.task_id)
                ):
                    self._last_reported[meter.task_id] = now
                    found.append(now)
            reported = [
                each
                for each in self._ended
                if not self._last_reported[each.task_id].buffered_batches
            ]
            for meter in reported:
                self._ended.remove(meter)
                del self._last_reported[meter.task_id]
            return tuple(found)

    def totals(self, buffered: BufferedByTask) -> WorkerTotals:
        """Return the totals of all tasks, including finished ones."""
        with self._lock:
            totals = msgspec.structs.replace(
                self._finished_totals, steps=dict(self._finished_totals.steps)
            )
            for meter in self._running.values():
                totals.add(meter.snapshot(buffered.get(meter.task_id, _EMPTY)))
            return totals


def _without_wait_times(activity: TaskActivity | None) -> object:
    if activity is None:
        return None
    if not activity.waiting_for:
        return activity
    return msgspec.structs.replace(activity, client_wait_seconds=0.0, split_wait_seconds=0.0)
