"""Sampling profiler: measures how long the threads of a worker spend in each dataset step.

Rule 1. It does not slow down the data path: no step is wrapped and no element counted. It walks the
    stacks of the process twenty times per second while a task produces elements.
Rule 2. A thread is attributed to a step by `execution.step_registry`, unless it waits. Seconds are
    summed over threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

from headrace.execution.sampling import forget_calls, frames_of_threads, interrupt_threads
from headrace.execution.step_registry import Activity, find_activity
from headrace.service.worker.producer_channel import ProducerChannel
from headrace.service.worker.task_metrics import TaskMetrics, WorkerMetrics

__all__ = ["StepProfiler", "find_step"]

_INTERVAL = 0.05
_IDLE_INTERVAL = 0.5
_MAX_SAMPLE_SECONDS = 1.0
"""Maximum seconds of one sample: after a pause of the process, no thread was running."""
_WAITING_CODE: frozenset[CodeType] = frozenset(
    {
        ProducerChannel._wait_for_splits.__code__,
        ProducerChannel._wait_for_grant_or_deferral.__code__,
    }
)
"""Code of functions that wait; a thread in these is attributed to no step."""
_WORK = (Activity.USER_CODE, Activity.OWN_CODE)


class StepProfiler:
    """Thread that takes the samples.

    Args:
        metrics: Counters of the running tasks.
        on_sample: Called on this thread after each sample, with the time.
    """

    def __init__(
        self, metrics: WorkerMetrics, on_sample: Callable[[float], None] | None = None
    ) -> None:
        self._metrics = metrics
        self._on_sample = on_sample
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-sampler", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling. Idempotent, and allowed before `start`."""
        self._stop.set()

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the thread."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))

    def _run(self) -> None:
        last = time.perf_counter()
        wait = _IDLE_INTERVAL
        progress: dict[int, int] = {}
        while True:
            with interrupt_threads(self._stop, wait) as is_stopped:
                if is_stopped:
                    break
                now, running = time.perf_counter(), self._metrics.running
                if running and wait == _INTERVAL:
                    # Also tasks that wait: their other threads may work.
                    self._sample(running, min(now - last, _MAX_SAMPLE_SECONDS))
                else:
                    forget_calls()
            if self._on_sample is not None:
                self._on_sample(now)
            # A task that waits between its batches is sampled as often as one that does not.
            # Otherwise its times would be too short: it rarely works at the end of a long pause.
            previous, progress = progress, {id(meter): meter.progress for meter in running}
            is_active = progress != previous or not all(meter.is_waiting for meter in running)
            last, wait = now, _INTERVAL if is_active else _IDLE_INTERVAL
        forget_calls()

    def _sample(self, meters: Sequence[TaskMetrics], seconds: float) -> None:
        own_thread = self._thread.ident
        with frames_of_threads() as frames:
            for thread, frame in frames.items():
                found = None if thread == own_thread else find_step(frame, meters)
                if found is not None:
                    meter, step = found
                    meter.add_step_seconds(step, seconds)


def find_step(
    frame: FrameType | None, meters: Sequence[TaskMetrics]
) -> tuple[TaskMetrics, str] | None:
    """Return the step that a thread executes, and its task's counters.

    None if it executes none, or waits in one.
    """
    if frame is None:
        return None
    for meter in meters:
        found = find_activity(frame, meter.steps, _WAITING_CODE)
        if found is not None:
            step, activity = found
            return (meter, step) if step is not None and activity in _WORK else None
    return None
