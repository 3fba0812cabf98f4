"""Time as far as this process ran in it, for promises of what takes how long at most.

A promise such as "stops within a second" is of waits that end. On a machine where twenty others
want to run, all takes longer by what they take; that is no property of the code. So a thread that
sleeps for hundredths of a second counts them: where it is late, so is everything else here.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Stopwatch"]

_STEP = 0.01


class Stopwatch:
    """Counts from the beginning of its `with` block; `seconds` stand still after the end."""

    def __init__(self) -> None:
        self._steps = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)

    @property
    def seconds(self) -> float:
        """At most what the clock on the wall says, and as much where the machine is free."""
        return self._steps * _STEP

    def _count(self) -> None:
        while not self._is_over:
            time.sleep(_STEP)
            self._steps += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()
