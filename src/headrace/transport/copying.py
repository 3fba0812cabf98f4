"""Copies of memory; large ones by two threads, as one core does not fill the way to the memory."""

from __future__ import annotations

import ctypes
import os
import threading

from headrace.threads import start_thread

__all__ = ["copy_memory"]

_PARALLEL_COPY_BYTES = 16 << 20
"""Bytes whose halves take many times as long to copy as a thread to start."""
_CACHE_LINE_BYTES = 64


def copy_memory(to: int, source: int, size: int) -> None:
    """Copy bytes from one address to another; other threads run meanwhile.

    Args:
        to: Where they go; the two do not overlap.
        source: Where they are.
        size: How many.
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
    """What another thread copies, if it comes to it in time."""

    def __init__(self, to: int, source: int, size: int) -> None:
        self._where = to, source, size
        #: Who takes this copies.
        self._claim = [True]
        self._done = threading.Event()

    def begin(self) -> None:
        """Have another thread copy, soon; there may be no more threads."""
        helper = threading.Thread(target=self._run, name="headrace-copy", daemon=True)
        try:
            start_thread(helper)
        except RuntimeError:
            return

    def copy(self) -> None:
        """Copy, on this thread."""
        ctypes.memmove(*self._where)

    def take_back(self) -> bool:
        """Return whether nobody has begun it, or will; else wait until it is done."""
        try:
            self._claim.pop()  # One list operation: two threads cannot both succeed.
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
        """Wait, whoever interrupts: the memory may be somebody else's afterwards."""
        interrupted: BaseException | None = None
        while not self._done.is_set():
            try:
                self._done.wait()
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
