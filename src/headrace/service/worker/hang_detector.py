"""Detection of tasks that make no progress, for example because a function never returns.

A task makes progress when it makes a result batch, is assigned splits, or has waited. A step that
fills a large buffer may do none of these for a long time, so the calls of its threads are compared:
the same frame objects in a later check mean that none of the calls returned.

Frames are held from one check to the next, and only of tasks without other progress. Each stack is
compared down to the first function outside Headrace, inclusive; calls made by that function, such
as a wait in a loop, are ignored.
"""

from __future__ import annotations

import logging
import math
import threading
import traceback
from dataclasses import dataclass, field
from types import FrameType

from headrace.execution.sampling import frames_of_threads
from headrace.process.parent_link import report_hang
from headrace.service.worker.step_profiler import find_step
from headrace.service.worker.task_metrics import TaskMetrics, WorkerMetrics

__all__ = ["HangDetector"]

_log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 10.0
_SHORTEST_INTERVAL = 0.1
_CHECKS_PER_TIMEOUT = 10
_LIBRARY = ("headrace", "threading", "queue", "concurrent")


@dataclass
class _Stalled:
    """A task without progress."""

    progress: int
    calls: dict[int, list[FrameType]] = field(default_factory=dict)
    seconds: float = 0.0
    is_reported: bool = False


class HangDetector:
    """Reports each task that makes no progress for too long (`process.parent_link.report_hang`).

    Args:
        metrics: Counters of the running tasks.
        timeout: Seconds without progress; 0.0 disables the detection.
    """

    def __init__(self, metrics: WorkerMetrics, timeout: float) -> None:
        self._metrics = metrics
        self._timeout = timeout or math.inf
        self._interval = min(
            _LONGEST_INTERVAL, max(_SHORTEST_INTERVAL, timeout / _CHECKS_PER_TIMEOUT)
        )
        self._checked_at = -math.inf
        self._stalled: dict[TaskMetrics, _Stalled] = {}

    def check(self, now: float) -> None:
        """Check all tasks if a check is due; called often, by one thread."""
        elapsed = now - self._checked_at
        if self._timeout == math.inf:
            return
        running = self._metrics.running
        for meter in self._stalled.keys() - running:
            del self._stalled[meter]
        if elapsed < self._interval:
            return
        self._checked_at = now
        for meter in running:
            # Time in which the whole process was stopped does not count.
            self._check_task(meter, min(elapsed, 2 * self._interval))

    def _check_task(self, meter: TaskMetrics, elapsed: float) -> None:
        stalled = self._stalled.get(meter)
        if stalled is None or stalled.progress != meter.progress or meter.waits_for_clients:
            self._stalled[meter] = _Stalled(meter.progress)
            return
        with frames_of_threads() as frames:
            threads = _task_threads(meter, frames)
            calls = {thread: _outer_calls(frame) for thread, frame in threads.items()}
        # While the task waits for splits, only a user function can hang.
        hangs = [thread for thread, frames in calls.items() if not _is_ours(frames[-1])]
        if not (hangs or (calls and not meter.is_requesting_splits)):
            calls = {}
        if not calls or calls != stalled.calls:
            stalled.calls, stalled.seconds, stalled.is_reported = calls, 0.0, False
            return
        stalled.seconds += elapsed
        if stalled.seconds > self._timeout and not stalled.is_reported:
            stalled.is_reported = True
            report_hang(
                _log, self._describe(meter, stalled, [threads[each] for each in hangs or calls])
            )

    def _describe(self, meter: TaskMetrics, stalled: _Stalled, frames: list[FrameType]) -> str:
        splits = ""
        if meter.last_splits is not None:
            start, stop = meter.last_splits
            splits = f" (last assigned splits: {start} to {stop - 1})"
        stacks = "\n".join("".join(traceback.format_stack(frame)) for frame in frames)
        return (
            f"task {meter.task_id}{splits} has made no progress for {stalled.seconds:.0f} s "
            f"(hang_timeout_ms={self._timeout * 1000:.0f}). Current call stack:\n{stacks}"
        )


def _task_threads(meter: TaskMetrics, frames: dict[int, FrameType]) -> dict[int, FrameType]:
    """Return the innermost frames of the threads that work on a task."""
    return {
        thread: frame
        for thread, frame in frames.items()
        if thread != threading.get_ident()
        and (thread == meter.thread_id or find_step(frame, [meter]) is not None)
    }


def _outer_calls(innermost: FrameType) -> list[FrameType]:
    """Return the calls of a thread, down to the first function outside Headrace."""
    stack = [frame for frame, _ in traceback.walk_stack(innermost)][::-1]
    outside = next((i for i, frame in enumerate(stack) if not _is_ours(frame)), None)
    if outside is not None:
        return stack[: outside + 1]
    while len(stack) > 1 and _module(stack[-1]) != "headrace":
        stack.pop()
    return stack


def _is_ours(frame: FrameType) -> bool:
    return _module(frame) in _LIBRARY


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
