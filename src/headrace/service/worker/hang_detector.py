"""Finds tasks that make no progress: a function that never returns.

A task makes progress when it makes a result batch, is assigned splits, or has waited. A step that
fills a large buffer does none of these for long, so the calls that its threads are in are compared:
the same frame objects in a later look mean that none of the calls returned.
Frames are held from one look to the next, and only of tasks without other progress.

Of each thread counts what leads to the first function outside Headrace, that function included:
what it calls in turn, to wait in a loop, does not matter.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import traceback
from dataclasses import dataclass, field
from types import FrameType

from headrace.process.parent_link import report_hang
from headrace.service.worker.meters import Meter, Meters
from headrace.service.worker.sampler import find_stage

__all__ = ["HangDetector"]

_log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 10.0
_SHORTEST_INTERVAL = 0.1
_LOOKS = 10
_LIBRARY = ("headrace", "threading", "queue", "concurrent")


@dataclass
class _Stalled:
    """A task without progress."""

    progress: int
    calls: dict[int, list[FrameType]] = field(default_factory=dict)
    seconds: float = 0.0
    is_reported: bool = False


class HangDetector:
    """Reports each task that makes no progress for too long (`process.watchdog.report_hang`).

    Args:
        meters: The meters of the tasks that run.
        timeout: Seconds without progress; 0.0: nothing is looked at.
    """

    def __init__(self, meters: Meters, timeout: float) -> None:
        self._meters = meters
        self._timeout = timeout or math.inf
        self._interval = min(_LONGEST_INTERVAL, max(_SHORTEST_INTERVAL, timeout / _LOOKS))
        self._looked_at = -math.inf
        self._stalled: dict[Meter, _Stalled] = {}

    def look(self, now: float) -> None:
        """Look, if it is time to; to be called often, by one thread."""
        elapsed = now - self._looked_at
        if self._timeout == math.inf:
            return
        running = self._meters.running
        for meter in self._stalled.keys() - running:
            del self._stalled[meter]
        if elapsed < self._interval:
            return
        self._looked_at = now
        for meter in running:
            # Time in which the whole process was stopped does not count.
            self._look_at(meter, min(elapsed, 2 * self._interval))

    def _look_at(self, meter: Meter, elapsed: float) -> None:
        stalled = self._stalled.get(meter)
        if stalled is None or stalled.progress != meter.progress or meter.waits_for_clients:
            self._stalled[meter] = _Stalled(meter.progress)
            return
        threads = _threads_of(meter)
        calls = {thread: _calls(frame) for thread, frame in threads.items()}
        # Where splits are waited for, only a function of the user's can be what hangs.
        hangs = [thread for thread, frames in calls.items() if not _is_ours(frames[-1])]
        if not (hangs or (calls and not meter.asks_for_splits)):
            calls = {}
        if not calls or calls != stalled.calls:
            stalled.calls, stalled.seconds, stalled.is_reported = calls, 0.0, False
            return
        stalled.seconds += elapsed
        if stalled.seconds > self._timeout and not stalled.is_reported:
            stalled.is_reported = True
            report_hang(
                _log, self._words(meter, stalled, [threads[each] for each in hangs or calls])
            )

    def _words(self, meter: Meter, stalled: _Stalled, frames: list[FrameType]) -> str:
        splits = ""
        if meter.splits is not None:
            start, stop = meter.splits
            splits = f" (the splits assigned last are {start} to {stop - 1})"
        stacks = "\n".join("".join(traceback.format_stack(frame)) for frame in frames)
        return (
            f"task {meter.task_id}{splits} has made no progress for {stalled.seconds:.0f} s, "
            f"longer than the `hang_timeout_ms` of {self._timeout * 1000:.0f}. It is at:\n{stacks}"
        )


def _threads_of(meter: Meter) -> dict[int, FrameType]:
    """Return the innermost frames of the threads that work on a task."""
    frames = sys._current_frames()
    try:
        del frames[threading.get_ident()]
        return {
            thread: frame
            for thread, frame in frames.items()
            if thread == meter.thread or find_stage(frame, [meter]) is not None
        }
    finally:
        frames.clear()


def _calls(innermost: FrameType) -> list[FrameType]:
    """Return the calls that a thread is in, down to the first function outside Headrace."""
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
