"""Memory copies; large ones use two threads, as one core does not saturate the memory bandwidth."""

from __future__ import annotations

import ctypes
import os
import threading

from headrace.threads import start_thread

__all__ = ["copy_memory"]

_PARALLEL_COPY_BYTES = 16 << 20
"""Smallest size of a parallel copy: half of it takes many times as long as a thread start."""
_CACHE_LINE_BYTES = 64


def copy_memory(to: int, source: int, size: int) -> None:
    """Copy bytes from one address to another, without holding the GIL.

    Args:
        to: Destination address; the ranges must not overlap.
        source: Source address.
        size: Number of bytes.
    """
    if size < _PARALLEL_COPY_BYTES or (os.cpu_count() or 1) < 2:
        ctypes.memmove(to, source, size)
        return
    own = size // 2 // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES
    rest = _SecondHalf(to + own, source + own, size - own)
    try:
        rest.begin()
        ctypes.memmove(to, source, own)
    finally:
        is_left = rest.take_back()
    if is_left:
        rest.copy()


class _SecondHalf:
    """The part of a copy that another thread takes, if it starts in time."""

    def __init__(self, to: int, source: int, size: int) -> None:
        self._where = to, source, size
        #: The thread that pops this copies.
        self._claim = [True]
        self._done = threading.Event()

    def begin(self) -> None:
        """Start a thread that copies; do nothing if no thread can be started."""
        helper = threading.Thread(target=self._run, name="headrace-copy", daemon=True)
        try:
            start_thread(helper)
        except RuntimeError:
            return

    def copy(self) -> None:
        """Copy on the current thread."""
        ctypes.memmove(*self._where)

    def take_back(self) -> bool:
        """Return True if the copy was not begun, and prevent it; else wait until it is done."""
        try:
            self._claim.pop()  # one list operation: two threads cannot both succeed
        except IndexError:
            self._wait()
            return False
        return True

    def _run(self) -> None:
        try:
            self._claim.pop()
        except IndexError:
            return
        self.copy()
        self._done.set()

    def _wait(self) -> None:
        """Wait in spite of interrupts: the memory may be reused afterwards."""
        interrupted: BaseException | None = None
        while not self._done.is_set():
            try:
                self._done.wait()
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
