"""Number of threads for AUTOTUNE, found by measuring calls while they run.

Extra threads help a function that waits or that releases the interpreter lock, as NumPy does. They
slow down a function that holds the lock. Neither is known in advance, so the tuner compares the
elements per second with different numbers of threads:

    more threads, kept if that gains `_MIN_GAIN` -> half as many, kept if that loses nothing

and so on, ever more rarely. It measures only while the threads are what limits the speed. The
fraction of a call that runs on a processor tells how many threads could be useful: as many as cores
for a function that only computes, `MAX_THREADS` for one that only waits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

__all__ = ["MAX_THREADS", "ThreadTuner"]

MAX_THREADS = 16
_MIN_GAIN = 1.15
"""More threads are kept if the rate grows by this factor."""
_MIN_REMAINING = 0.97
"""Fewer threads are kept if this fraction of the rate remains."""
_WINDOW_SECONDS = 0.05
"""Minimum duration of a measurement, in seconds."""
_TRIAL_SECONDS = 0.1
"""Minimum duration of a measurement with another number of threads, in seconds."""
_MIN_CALLS_PER_THREAD = 3
"""Minimum number of calls in a measurement, per thread."""
_MIN_UTILIZATION = 0.6
"""Fraction of the time below which the threads are not what limits the speed."""
_FULL_UTILIZATION = 0.8
"""Fraction of the time from which on the threads count as always busy."""
_DRAIN_SECONDS = 0.06
"""Seconds in which the queue of a parallel map is processed."""
_CPU_FRACTION_DECAY = 0.6
"""Factor of `_cpu_fraction` at each choice, because a function may change."""
_FIRST_HOLD_SECONDS = 0.5
"""Seconds from a choice to the next trial; doubled after each trial that changes nothing."""
_MAX_HOLD_SECONDS = 60.0

_logger = logging.getLogger("headrace")


class ThreadTuner:
    """Chooses a number of threads. Calls need a lock.

    Args:
        step: Name of the step, for the log.
        cores: Number of processor cores.
        min_threads: Smallest number, and the first.
        max_threads: Largest number.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        step: str,
        cores: int,
        *,
        min_threads: int = 1,
        max_threads: int = MAX_THREADS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._step = step
        self._cores = cores
        self._min_threads = min_threads
        self._max_threads = max(min_threads, max_threads)
        self._clock = clock
        self.threads = min_threads
        """The number to use now."""
        #: Number of threads and rate before the current trial; None without one.
        self._before: tuple[int, float] | None = None
        #: Largest fraction of calls on a processor. Other processes and other threads only make it
        #: smaller.
        self._cpu_fraction = 0.0
        #: Moving average of the rate since the last trial; 0 if unknown.
        self._held_rate = 0.0
        self._hold_until = 0.0
        self._hold_seconds = _FIRST_HOLD_SECONDS
        self._num_holds = 0
        #: Whether the next trial is with fewer threads; trials alternate.
        self._tries_fewer = False
        self._last_logged: int | None = None
        self._start_window(-math.inf)

    def _start_window(self, since: float) -> None:
        """Start a measurement of the calls that begin after `since`."""
        self._busy = self._cpu = 0.0
        self._elements = self._calls = 0
        self._ignored_until = since
        self._window_start = math.inf

    def observe(self, begin: float, end: float, cpu_seconds: float, elements: int) -> bool:
        """Count a call; return whether `threads` has changed.

        Args:
            begin: Time of its beginning, of the tuner's clock.
            end: Time of its end.
            cpu_seconds: Seconds of it on a processor.
            elements: Number of elements that it computed.
        """
        if begin < self._ignored_until:
            return False  # with another number of threads
        self._window_start = min(self._window_start, begin)
        self._busy += end - begin
        self._cpu += cpu_seconds
        self._elements += elements
        self._calls += 1
        elapsed = end - self._window_start
        window = _WINDOW_SECONDS if self._before is None else _TRIAL_SECONDS
        if self._calls < _MIN_CALLS_PER_THREAD * self.threads or elapsed < window:
            return False
        old = self.threads
        self._evaluate(end, elapsed)
        if self.threads == old:
            self._start_window(end)
        else:
            # Calls that are reported later may have begun before now. Threads that are to end
            # first process what is queued for them.
            self._start_window(self._clock() + (_DRAIN_SECONDS if self.threads < old else 0.0))
        return self.threads != old

    def _evaluate(self, now: float, elapsed: float) -> None:
        """Decide a trial, or start one, from the measurement that ends now.

        Args:
            now: Time of the tuner's clock.
            elapsed: Duration of the measurement in seconds.
        """
        threads = self.threads
        self._cpu_fraction = max(self._cpu_fraction, self._cpu / (self._busy + 1e-9))
        utilization = self._busy / (threads * elapsed)
        # Calls that have not ended yet are not counted, so with busy threads the duration of calls
        # is more exact than the number of elements.
        is_busy = utilization >= _FULL_UTILIZATION
        rate = self._elements / (self._busy / threads if is_busy else elapsed)
        if self._before is not None:
            old_threads, old_rate = self._before
            self._before = None
            if rate < old_rate * (_MIN_GAIN if threads > old_threads else _MIN_REMAINING):
                self._hold(old_threads, now)
                return
            self._hold_seconds = _FIRST_HOLD_SECONDS
            if threads < old_threads:
                self._hold(threads, now)
                self._tries_fewer = True
                return
        else:
            rate = self._held_rate = (self._held_rate + rate) / 2 if self._held_rate else rate
            if now < self._hold_until:
                return
        if utilization < _MIN_UTILIZATION:
            return
        others = self._fewer_threads() if self._tries_fewer else self._more_threads()
        self._tries_fewer = False
        if others == threads:
            self._hold(threads, now)
            return
        self._before = threads, rate
        self.threads = others

    def _more_threads(self) -> int:
        # More would only compete for the cores.
        useful = round(self._cores / (self._cpu_fraction + 1e-3))
        return max(self.threads, min(self._max_threads, useful))

    def _fewer_threads(self) -> int:
        return max(self._min_threads, self.threads // 2)

    def _hold(self, threads: int, now: float) -> None:
        """Use this number, and try others after some time."""
        self.threads = threads
        self._held_rate = 0.0
        self._cpu_fraction *= _CPU_FRACTION_DECAY
        self._num_holds += 1
        self._tries_fewer = self._num_holds % 2 == 1
        self._hold_until = now + self._hold_seconds
        self._hold_seconds = min(2 * self._hold_seconds, _MAX_HOLD_SECONDS)
        if threads != self._last_logged:
            level = logging.INFO if self._last_logged is None else logging.DEBUG
            _logger.log(level, "%s: AUTOTUNE uses %d threads", self._step, threads)
            self._last_logged = threads
