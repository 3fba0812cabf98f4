"""Measures whether compressed replies are faster. No thread, socket or clock.

While the consumer waits most of the time, the bytes of elements received per second are measured
with and without compression, and the faster setting is used. The measurement thereby covers all
factors: the network, the data, and the processors of both ends. If the consumer does not wait,
nothing can be gained; if the worker is the bottleneck, compression does not help and is disabled
again.
"""

from __future__ import annotations

__all__ = ["CompressionTuner"]

_PERIOD_SECONDS = 0.5
"""Length of a measurement, in seconds."""
_MIN_WAIT_FRACTION = 0.5
"""Minimum fraction of a period that the consumer must wait before a trial."""
_MIN_SPEEDUP = 1.15
"""Minimum speedup by compression, which costs both ends processor time."""
_FIRST_PAUSE = 10.0
_LONGEST_PAUSE = 600.0
"""Seconds until the next trial; doubled after each trial without improvement."""


class CompressionTuner:
    """Chooses the setting for one reader.

    Args:
        codec: Codec of compressed replies; empty disables compression.
        now: Current time.
    """

    def __init__(self, codec: str, now: float) -> None:
        self._codec = codec
        self._is_compressing = False
        self._since = now
        self._bytes, self._waited, self._replies = 0, 0.0, 0
        #: Bytes per second with the current setting, during a trial of the other one.
        self._baseline: float | None = None
        #: Number of pending replies to requests from before the change.
        self._ignored_replies = 0
        self._next_trial_at = now
        self._pause = _FIRST_PAUSE

    @property
    def is_enabled(self) -> bool:
        """Whether there is a choice."""
        return bool(self._codec)

    @property
    def codec(self) -> str:
        """Codec of the next replies; empty for no compression."""
        return self._codec if self._is_compressing else ""

    def reply_received(self, size: int, waited: float, outstanding: int, now: float) -> None:
        """Record a reply.

        Args:
            size: Bytes of its elements.
            waited: Seconds the consumer had waited for it.
            outstanding: Number of requests in flight.
            now: Current time.
        """
        if not self._codec:
            return
        if self._ignored_replies:
            self._ignored_replies -= 1
            self._start_period(now)
            return
        self._bytes += size
        self._waited += waited
        self._replies += 1
        if now - self._since >= _PERIOD_SECONDS and self._replies >= 3:
            self._evaluate(outstanding, now)

    def _start_period(self, now: float) -> None:
        self._since, self._bytes, self._waited, self._replies = now, 0, 0.0, 0

    def _evaluate(self, outstanding: int, now: float) -> None:
        seconds = now - self._since
        throughput = self._bytes / seconds
        is_waiting = self._waited >= _MIN_WAIT_FRACTION * seconds
        self._start_period(now)
        if self._baseline is not None:
            is_better = (
                throughput > self._baseline * _MIN_SPEEDUP
                if self._is_compressing
                else throughput * _MIN_SPEEDUP > self._baseline
            )
            self._baseline = None
            self._pause = _FIRST_PAUSE if is_better else min(2 * self._pause, _LONGEST_PAUSE)
            self._next_trial_at = now + self._pause
            if not is_better:
                self._switch(outstanding)
        elif is_waiting and now >= self._next_trial_at:
            self._baseline = throughput
            self._switch(outstanding)

    def _switch(self, outstanding: int) -> None:
        self._is_compressing = not self._is_compressing
        self._ignored_replies = outstanding
