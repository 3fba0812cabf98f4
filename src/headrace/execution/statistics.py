"""Measures a running plan: elements and bytes of each step, and how the threads spend their time.

Rule 1. Nothing is timed on the data path: elements are counted once per chunk, or without Python
    code if they come one by one. A thread inspects the stacks of the process a hundred times per
    second (`step_registry`), so times are samples.
Rule 2. Only `Context.instrument` is used. The steps contain no measurements.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.element.chunk import Chunk
from headrace.element.wire import frame_bytes
from headrace.execution.iterator import ElementIterator, InstrumentedIterator, LazyRows, State
from headrace.execution.parallel_map import ParallelMapIterator
from headrace.execution.sampling import forget_calls, frames_of_threads, interrupt_threads
from headrace.execution.step_registry import Activity, StepRegistry, find_activity, name_step
from headrace.plan.elements import GatherIndices, Indices
from headrace.plan.node import Node, distinct_nodes
from headrace.threads import start_thread

__all__ = ["Measurements", "StatisticsCollector", "StepMeasurements"]

_SAMPLE_SECONDS = 0.01
"""Seconds between samples."""
_MAX_SAMPLE_SECONDS = 1.0
"""Maximum seconds of one sample: after a pause of the process, no thread was running."""
_JOIN_TIMEOUT_SECONDS = 0.2
_MAX_MEASURING_INTERVAL = 64
"""Maximum number of chunks between those whose first element is measured in bytes."""
_MAX_NESTED_STEPS = 64
"""Maximum number of steps of nested datasets that are measured separately."""
_WORK = (Activity.USER_CODE, Activity.OWN_CODE)


@dataclass(eq=False)
class StepMeasurements:
    """Measurements of one step.

    Args:
        node: The step; of steps in nested datasets any one with this name.
        depth: Number of steps between it and the end of the plan; None in nested datasets.
    """

    node: Node
    depth: int | None = None
    elements: int = 0
    """Elements that it returned."""
    bytes: int = 0
    """Their approximate size, extrapolated from a few elements."""
    seconds: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    """Seconds by activity, summed over threads."""
    work_by_thread: dict[int, float] = field(default_factory=dict)
    """Seconds of work by identifier of the thread."""
    threads: int | None = None
    """Number of threads that call its function; None for steps without such threads."""


@dataclass(frozen=True)
class Measurements:
    """All measurements of a plan."""

    steps: tuple[StepMeasurements, ...]
    """Steps of the plan, inputs first; then those of nested datasets."""
    seconds: float
    """Seconds during which the plan was read."""
    consumer_seconds: float
    """Seconds that the reading program spent elsewhere."""


class StatisticsCollector:
    """Collects the measurements of one iterator, also if its plan is built several times."""

    def __init__(self) -> None:
        self._registry = StepRegistry[StepMeasurements]()
        #: Held while a counter changes that several threads may share.
        self._lock = threading.Lock()
        self._plan_steps: list[StepMeasurements] = []
        self._nested_steps: dict[str, StepMeasurements] = {}
        #: Steps of the plan by `id` of their node, while it runs.
        self._running_steps: dict[int, StepMeasurements] = {}
        self._building: list[tuple[Node, ElementIterator, _CountingIterator]] | None = None
        #: Iterators of the plan that runs, without nested datasets.
        self._counting: list[_CountingIterator] = []
        #: Steps without an iterator of their own: indices, and the step that reads their elements.
        self._read_together: list[tuple[StepMeasurements, StepMeasurements]] = []
        self._sampler: _Sampler | None = None
        self._seconds = self._consumer_seconds = 0.0
        #: Identifier of the thread that read last.
        self._reading_thread = 0

    # --- building -------------------------------------------------------------------------------

    def start_build(self) -> None:
        """Record that the iterators of a plan will be built."""
        self._lock = threading.Lock()  # the old one may be held by a thread before a fork
        self._building = []

    def instrument(self, node: Node, iterator: ElementIterator) -> ElementIterator:
        """Return an iterator that counts the elements of a step. An `Instrument`."""
        counting = _CountingIterator(iterator, self._lock)
        if self._building is not None:
            self._building.append((node, iterator, counting))
        else:
            counting.step = self._find_step(node)
            self._registry.register(iterator, counting.step)
        return counting

    def finish_build(self, iterator: ElementIterator) -> ElementIterator:
        """Return the iterator to read instead of the plan's iterator, which has been built."""
        building, self._building = self._building or [], None
        # The last step of a plan is built last. Some plans are built when they are read.
        nodes = distinct_nodes([building[-1][0]] if building else [])
        if len(nodes) != len(self._plan_steps):
            depths = _depths(nodes)
            self._plan_steps = [StepMeasurements(node, depths[id(node)]) for node in nodes]
        self._running_steps = {
            id(node): step for node, step in zip(nodes, self._plan_steps, strict=True)
        }
        for step, node in zip(self._plan_steps, nodes, strict=True):
            step.node = node  # keeps the nodes alive, so that no other has the same `id`
        built = {id(node) for node, _, _ in building}
        self._read_together = [
            (self._running_steps[id(node.input)], self._running_steps[id(node)])
            for node in nodes
            if isinstance(node, GatherIndices)
            and isinstance(node.input, Indices)
            and id(node.input) not in built
        ]
        self._counting = []
        for node, inner, counting in building:
            counting.step = self._find_step(node)
            self._counting.append(counting)
            self._registry.register(inner, counting.step)
        return _RootIterator(iterator, self)

    def _find_step(self, node: Node) -> StepMeasurements:
        step = self._running_steps.get(id(node))
        if step is not None:
            return step
        # A step of a nested dataset. There may be one for each element, so equal names are joined.
        name = name_step(node)
        with self._lock:
            if name not in self._nested_steps and len(self._nested_steps) >= _MAX_NESTED_STEPS:
                name = next(iter(self._nested_steps))
            return self._nested_steps.setdefault(name, StepMeasurements(node))

    # --- reading --------------------------------------------------------------------------------

    def start_reading(self) -> None:
        """Record that this thread reads the iterator."""
        self._reading_thread = threading.get_ident()
        if self._sampler is None:
            self._sampler = _Sampler(self)
            self._sampler.start()

    def stop_reading(self) -> None:
        """Record that the iterator has ended or was closed. Idempotent."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()

    def add_sample(self, seconds: float, own_thread: int | None) -> None:
        """Attribute `seconds` to what each thread does now."""
        self._seconds += seconds
        is_reading = False
        with frames_of_threads() as frames:
            for thread, frame in frames.items():
                if thread == own_thread:
                    continue
                found = find_activity(frame, self._registry)
                if found is None:
                    continue
                step, activity = found
                is_reading = is_reading or thread == self._reading_thread
                if step is not None:
                    step.seconds[activity] += seconds
                    if activity in _WORK:
                        by_thread = step.work_by_thread
                        by_thread[thread] = by_thread.get(thread, 0.0) + seconds
        if not is_reading:
            self._consumer_seconds += seconds

    def measurements(self) -> Measurements:
        """Return what was measured so far."""
        for counting in self._counting:
            counting.add_rows()
            if counting.step is not None and isinstance(counting.iterator, ParallelMapIterator):
                counting.step.threads = counting.iterator.threads
        for indices, reader in self._read_together:
            indices.elements = reader.elements
        with self._lock:
            steps = (*self._plan_steps, *self._nested_steps.values())
        return Measurements(steps, self._seconds, self._consumer_seconds)


def _depths(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the number of steps between each node and the end of the plan, by its `id`.

    Args:
        nodes: The nodes of a plan, inputs first.
    """
    depths: dict[int, int] = {}
    for node in reversed(nodes):
        depth = depths.setdefault(id(node), 0)
        for input_ in node.inputs:
            depths[id(input_)] = max(depths.get(id(input_), 0), depth + 1)
    return depths


class _CountingIterator(InstrumentedIterator):
    """Counts the elements of a step."""

    def __init__(self, iterator: ElementIterator, lock: threading.Lock) -> None:
        self.iterator = iterator
        self.step: StepMeasurements | None = None
        #: Several threads add to the measurements of a step in nested datasets.
        self._lock = lock
        self._num_chunks = 0
        self._next_measured = 1
        self._element_bytes = 0
        #: Counts lazy rows: each element takes the next number, in C.
        self._row_counter = itertools.count(1)
        self._num_rows_added = 0

    @property
    def has_lazy_rows(self) -> bool:  # type: ignore[override]
        return self.iterator.has_lazy_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self.iterator.next_chunk(limit)
        if chunk is not None:
            self._num_chunks += 1
            if self._num_chunks >= self._next_measured:
                self._next_measured += min(self._next_measured, _MAX_MEASURING_INTERVAL)
                self._element_bytes = frame_bytes(chunk.slice(0, 1))
            with self._lock:
                self._add(chunk.size)
        return chunk

    def lazy_rows(self) -> LazyRows | None:
        found = self.iterator.lazy_rows()
        if found is None:
            return None
        rows, states = found
        # All numbers are true, so every element is kept.
        return itertools.compress(rows, self._row_counter), states

    def _add(self, count: int) -> None:
        if self.step is not None:
            self.step.elements += count
            self.step.bytes += count * self._element_bytes

    def add_rows(self) -> None:
        """Add the lazy rows that were taken since the last call."""
        with self._lock:
            taken = next(self._row_counter) - 1
            count, self._num_rows_added = taken - self._num_rows_added, taken + 1
            self._add(count)

    def set_state(self, state: State) -> None:
        self.add_rows()
        super().set_state(state)

    def close(self) -> None:
        self.add_rows()
        super().close()


class _RootIterator(InstrumentedIterator):
    """The iterator of a whole plan; starts and stops the sampling."""

    def __init__(self, iterator: ElementIterator, collector: StatisticsCollector) -> None:
        self.iterator = iterator
        self._collector = collector

    @property
    def has_lazy_rows(self) -> bool:  # type: ignore[override]
        return self.iterator.has_lazy_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        self._collector.start_reading()
        return self.iterator.next_chunk(limit)

    def lazy_rows(self) -> LazyRows | None:
        self._collector.start_reading()
        return self.iterator.lazy_rows()

    def close(self) -> None:
        self._collector.stop_reading()
        super().close()


class _Sampler:
    """Thread that takes the samples, until it is stopped."""

    def __init__(self, collector: StatisticsCollector) -> None:
        self._collector = collector
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-statistics", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        start_thread(self._thread)

    def stop(self) -> None:
        """Stop sampling and wait briefly for the thread."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_SECONDS)

    def _run(self) -> None:
        last = time.perf_counter()
        while True:
            with interrupt_threads(self._stop, _SAMPLE_SECONDS) as is_stopped:
                if is_stopped:
                    break
                now = time.perf_counter()
                seconds = min(now - last, _MAX_SAMPLE_SECONDS)
                self._collector.add_sample(seconds, self._thread.ident)
                last = now
        forget_calls()
