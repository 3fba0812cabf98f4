"""Whether answers are to be packed on their way: found out by trying. No thread, socket or clock.

While the consumer waits for most of the time, the bytes of elements that arrive in a second are
measured with and without packing, and the better way is kept. So all that bears on it is in the
measure: the wire, the data, both ends' processors. Where the consumer does not wait, nothing is to
be gained; where the worker is what is waited for, packing does not help, and is left again.
"""

from __future__ import annotations

__all__ = ["PackingPace"]

_PERIOD = 0.5
"""Seconds in which a way is measured."""
_WAITS = 0.5
"""The part of a period that the consumer waits, at least, where something is to be gained."""
_GAIN = 1.15
"""How much better packing must be: it costs both ends something."""
_FIRST_PAUSE = 10.0
_LONGEST_PAUSE = 600.0
"""Seconds until the other way is tried again; twice as long each time that it is not better."""


class PackingPace:
    """Chooses for one reader.

    Args:
        codec: What both ways differ in; empty: nothing is ever packed.
        now: The time.
    """

    def __init__(self, codec: str, now: float) -> None:
        self._offered = codec
        self._packs = False
        self._since = now
        self._bytes, self._waited, self._answers = 0, 0.0, 0
        #: The pace of the way that was kept, while the other one is tried.
        self._kept: float | None = None
        #: Answers to requests from before the change are still on their way.
        self._settles = 0
        self._try_at = now
        self._pause = _FIRST_PAUSE

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self._offered)

    @property
    def codec(self) -> str:
        """What the next answers are to be packed with; empty: nothing."""
        return self._offered if self._packs else ""

    def arrived(self, size: int, waited: float, outstanding: int, now: float) -> None:
        """Take note of an answer.

        Args:
            size: Bytes of its elements.
            waited: Seconds for which the consumer had waited for it.
            outstanding: Requests that are under way.
            now: The time.
        """
        if not self._offered:
            return
        if self._settles:
            self._settles -= 1
            self._begin(now)
            return
        self._bytes += size
        self._waited += waited
        self._answers += 1
        if now - self._since >= _PERIOD and self._answers >= 3:
            self._judge(outstanding, now)

    def _begin(self, now: float) -> None:
        self._since, self._bytes, self._waited, self._answers = now, 0, 0.0, 0

    def _judge(self, outstanding: int, now: float) -> None:
        seconds = now - self._since
        pace, starves = self._bytes / seconds, self._waited >= _WAITS * seconds
        self._begin(now)
        if self._kept is not None:
            better = pace > self._kept * _GAIN if self._packs else pace * _GAIN > self._kept
            self._kept = None
            self._pause = _FIRST_PAUSE if better else min(2 * self._pause, _LONGEST_PAUSE)
            self._try_at = now + self._pause
            if not better:
                self._change(outstanding)
        elif starves and now >= self._try_at:
            self._kept = pace
            self._change(outstanding)

    def _change(self, outstanding: int) -> None:
        self._packs = not self._packs
        self._settles = outstanding
