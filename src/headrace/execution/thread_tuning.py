"""Number of threads for AUTOTUNE, chosen by measuring calls while they run.

More threads help a function that waits, and one that releases the interpreter lock, as NumPy does.
They slow down a function that holds the lock. With few threads these can be distinguished, even on
a busy machine:

    measure with `min_threads` -> choose -> compare the rate -> hold, ever longer -> measure again

* If a thread that awakes from a short sleep waits for the lock, usually as long as another thread
  may hold it (`sys.getswitchinterval`), and calls are not spent on waiting alone, the function
  holds it: `min_threads` are enough.
* Otherwise the fraction of a call on a processor tells how many threads keep all cores busy: one
  per core if it only computes, `max_threads` if it only waits.
* More threads are kept only if they compute more elements per second, since some functions wait
  for another lock.

It measures only while the threads are what limits the speed.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections.abc import Callable
from enum import Enum, auto

__all__ = ["MAX_THREADS", "MIN_THREADS", "ThreadTuner"]

MAX_THREADS = 16
MIN_THREADS = 2
"""Smallest number of threads. A function that holds the interpreter lock loses little with two, and
whether it holds the lock can be measured only with two."""
_MEASURING_SECONDS = 0.1
_COMPARING_SECONDS = 0.2
_MIN_CALLS_PER_THREAD = 3
_MIN_GAIN = 1.1
"""More threads are kept if the rate grows by at least this factor."""
_MIN_UTILIZATION = 0.6
"""Fraction of the time below which the threads are not what limits the speed."""
_DRAIN_SECONDS = 0.06
"""Time in which the queue of a parallel map is processed."""
_FIRST_HOLD_SECONDS = 1.0
"""Time from a choice to the next measurement; doubled while the choice stays the same."""
_MAX_HOLD_SECONDS = 60.0
_LOCK_INTERVAL_SECONDS = 0.01
"""Minimum seconds between measurements of the delay by the interpreter lock."""
_LOCK_SLEEP_SECONDS = 0.0005
_MIN_LOCK_DELAYS = 3
_HELD_SHARE = 0.6
"""The interpreter lock counts as held if threads wait for it at least this fraction of the switch
interval."""
_MIN_HOLDING_FRACTION = 0.1
"""Smallest fraction of calls on a processor of a function that holds the lock with two threads."""

_logger = logging.getLogger("headrace")


class _Phase(Enum):
    MEASURING = auto()
    """Measures with `min_threads`."""
    COMPARING = auto()
    """Compares the rate with the one measured before."""
    HOLDING = auto()


class ThreadTuner:
    """Chooses a number of threads. `observe` needs a lock.

    Args:
        step: Name of the step, for the log.
        cores: Number of processor cores.
        min_threads: Smallest number, and the first; at least two.
        max_threads: Largest number.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        step: str,
        cores: int,
        *,
        min_threads: int = MIN_THREADS,
        max_threads: int = MAX_THREADS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._step = step
        self._cores = cores
        self._min_threads = min_threads
        self._max_threads = max(min_threads, max_threads)
        self._clock = clock
        self.threads: int = min_threads
        """The number to use now."""
        self._phase = _Phase.MEASURING
        #: Elements per second with `min_threads`.
        self._min_rate = 0.0
        self._hold_until = 0.0
        self._hold_seconds = _FIRST_HOLD_SECONDS
        #: The number that is held, or was held last.
        self._held: int | None = None
        self._next_lock_time = 0.0
        self._start_window(-math.inf)

    def _start_window(self, since: float) -> None:
        """Start a measurement of the calls that begin after `since`."""
        self._busy = self._cpu = 0.0
        self._elements = self._calls = 0
        self._ignored_until = since
        self._window_start = math.inf
        #: Seconds that threads waited for the interpreter lock after a sleep.
        self._lock_delays: list[float] = []

    # --- on the threads, without a lock ---------------------------------------------------------

    def measure_lock(self) -> None:
        """Measure the delay by the interpreter lock, if it is needed. To be called between calls.

        A thread awakes from a sleep of half a millisecond and needs the lock.
        """
        if self._phase is not _Phase.MEASURING:
            return
        now = self._clock()
        if now < max(self._next_lock_time, self._ignored_until):
            return
        self._next_lock_time = now + _LOCK_INTERVAL_SECONDS
        time.sleep(_LOCK_SLEEP_SECONDS)
        self.add_lock_delay(self._clock() - now - _LOCK_SLEEP_SECONDS)

    def add_lock_delay(self, seconds: float) -> None:
        """Record that a thread waited for the interpreter lock."""
        self._lock_delays.append(seconds)

    # --- with a lock ----------------------------------------------------------------------------

    def observe(self, begin: float, end: float, cpu_seconds: float, elements: int) -> bool:
        """Count a call; return whether `threads` has changed.

        Args:
            begin: Time of its beginning, of the tuner's clock.
            end: Time of its end.
            cpu_seconds: Time of it on a processor.
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
        is_measuring = self._phase is _Phase.MEASURING
        if (
            elapsed < (_MEASURING_SECONDS if is_measuring else _COMPARING_SECONDS)
            or self._calls < _MIN_CALLS_PER_THREAD * self.threads
            or (is_measuring and len(self._lock_delays) < _MIN_LOCK_DELAYS)
        ):
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
        is_limit = self._busy >= _MIN_UTILIZATION * self.threads * elapsed
        rate = self._elements / elapsed
        if self._phase is _Phase.COMPARING:
            is_better = rate >= _MIN_GAIN * self._min_rate
            self._hold(self.threads if is_better else self._min_threads, now)
        elif not is_limit or (self._phase is _Phase.HOLDING and now < self._hold_until):
            return
        elif self._phase is _Phase.HOLDING:
            self._phase, self.threads = _Phase.MEASURING, self._min_threads
        else:
            useful = self._count_useful()
            if useful == self._min_threads:
                self._hold(useful, now)
            else:
                self._min_rate = rate
                self._phase, self.threads = _Phase.COMPARING, useful

    def _count_useful(self) -> int:
        """Return how many threads the measured function can use."""
        fraction = (self._cpu + 1e-9) / self._busy
        delay = statistics.median(self._lock_delays)
        is_held = delay >= _HELD_SHARE * sys.getswitchinterval()
        if is_held and fraction >= _MIN_HOLDING_FRACTION:  # else other threads hold the lock
            return self._min_threads
        useful = round(self._cores / fraction)
        return max(self._min_threads, min(self._max_threads, useful))

    def _hold(self, threads: int, now: float) -> None:
        """Use this number, and measure again after some time."""
        if self._held is None:
            _logger.info("%s: AUTOTUNE uses %d threads", self._step, threads)
        elif threads != self._held:
            _logger.debug("%s: AUTOTUNE uses %d threads", self._step, threads)
            self._hold_seconds = _FIRST_HOLD_SECONDS
        self._phase, self.threads, self._held = _Phase.HOLDING, threads, threads
        self._hold_until = now + self._hold_seconds
        self._hold_seconds = min(2 * self._hold_seconds, _MAX_HOLD_SECONDS)
