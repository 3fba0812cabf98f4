"""Stopwatch that excludes time in which this process did not run, for upper bounds in tests.

A bound such as "stops within a second" is about waits in the code. On a busy machine everything
takes longer, which is not a property of the code. So a thread that sleeps for hundredths of a
second counts its sleeps: if it is late, so is the rest of the process.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Stopwatch"]

_STEP = 0.01


class Stopwatch:
    """Counts `seconds` during its `with` block."""

    def __init__(self) -> None:
        self._steps = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)

    @property
    def seconds(self) -> float:
        """Elapsed seconds: at most the wall-clock time, and equal to it on an idle machine."""
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
