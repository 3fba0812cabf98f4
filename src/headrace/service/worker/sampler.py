"""The sampler: looks now and then at which step of its dataset each thread of a worker is.

Rule 1. It costs the data path nothing: no step is wrapped, no element counted. It walks the stacks
        of the process twenty times a second, while a task makes something.
Rule 2. A thread is at the innermost step on its stack: in the step's own code, or in a function of
        the user's that it calls. Seconds are added up over threads.
Rule 3. It writes to no frame, and reads only those of steps, which last for a chunk: what they hold
        is kept until they return, where Python gives a snapshot of a frame (before 3.13).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

from headrace.service.worker.feed import Feed
from headrace.service.worker.meters import Meter, Meters

__all__ = ["Sampler", "find_stage"]

_INTERVAL = 0.05
_IDLE_INTERVAL = 0.5
_LONGEST = 1.0
"""Seconds that one look may stand for: after a pause of the process nobody was anywhere."""
_WAITING: frozenset[CodeType] = frozenset(
    {Feed._wait_for_units.__code__, Feed._has_to_wait.__code__}
)
"""Whoever stands in these is at no step."""


class Sampler:
    """A thread that looks.

    Args:
        meters: Of the tasks that run.
        then: Called on the same thread after each look, with the time.
    """

    def __init__(self, meters: Meters, then: Callable[[float], None] | None = None) -> None:
        self._meters = meters
        self._then = then
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-sampler", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. May be called twice, and before `start`."""
        self._stop.set()

    def join(self, timeout: float) -> None:
        """Wait so many seconds for the thread."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout))

    def _run(self) -> None:
        last = time.perf_counter()
        wait = _IDLE_INTERVAL
        while not self._stop.wait(wait):
            now = time.perf_counter()
            meters = [meter for meter in self._meters.running if not meter.is_waiting]
            if meters and wait == _INTERVAL:
                self._look(meters, min(now - last, _LONGEST))
            if self._then is not None:
                self._then(now)
            last, wait = now, _INTERVAL if meters else _IDLE_INTERVAL

    def _look(self, meters: Sequence[Meter], seconds: float) -> None:
        own = self._thread.ident
        frames = sys._current_frames()
        try:
            for thread, frame in frames.items():
                found = None if thread == own else find_stage(frame, meters)
                if found is not None:
                    meter, stage = found
                    meter.spent(stage, seconds)
        finally:
            # The frames hold each other, and this one is among them.
            frames.clear()


def find_stage(frame: FrameType | None, meters: Sequence[Meter]) -> tuple[Meter, str] | None:
    """Return the innermost step that a thread is at, and whose it is; None: at none."""
    while frame is not None:
        code = frame.f_code
        if code in _WAITING:
            return None
        kind = code.co_qualname.rpartition(".")[0]
        for meter in meters:
            if kind in meter.kinds:
                stage = meter.stage_of(frame.f_locals.get("self"))
                if stage is not None:
                    return meter, stage
        frame = frame.f_back
    return None
