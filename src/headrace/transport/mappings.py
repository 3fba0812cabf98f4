"""The reader's side of shared memory: opened segments and held slots."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np

from headrace.process_metrics import count_shared_memory_refused
from headrace.transport.shared_memory import (
    SEALS,
    BufferLocation,
    MemoryReport,
    ProcessIdentity,
    SegmentOffer,
    align,
)

__all__ = ["SegmentMappings"]

_log = logging.getLogger(__name__)

_SEGMENT_FILE_PREFIX = "/memfd:headrace"


class _NotASegmentError(Exception):
    """The file that an offer names is not a segment of Headrace."""


class SegmentMappings:
    """Segments that a reader has opened, and the slots in them that it holds.

    One thread opens segments; any thread may take a report, since a server creates replies on many
    threads.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        self._accepted: deque[int] = deque()
        self._refused: deque[int] = deque()
        self._held: dict[int, weakref.ref[np.ndarray]] = {}
        # Filled by the thread that drops the last view, possibly during garbage collection: no
        # lock.
        self._released: deque[int] = deque()

    def open_segment(self, offer: SegmentOffer) -> None:
        """Open a segment, and record for the next report whether that succeeded."""
        try:
            self._mappings[offer.segment] = _open_mapping(offer)
        except _NotASegmentError as error:
            count_shared_memory_refused()
            _log.warning("refused shared memory of process %d: %s", offer.pid, error)
            self._refused.append(offer.segment)
        except (OSError, ValueError, OverflowError) as error:
            _log.info("cannot share memory with process %d: %s", offer.pid, error)
            self._refused.append(offer.segment)
        else:
            self._accepted.append(offer.segment)

    def close_segments(self, segments: Iterable[int]) -> None:
        """Drop segments that the owner dropped; their memory is freed with the last view of it."""
        for number in segments:
            self._mappings.pop(number, None)

    def view(self, location: BufferLocation) -> list[memoryview]:
        """Return views of a message's buffers; the slot is held until the last view is dropped.

        Raises:
            KeyError: If the segment has not been opened.
            ValueError: If the location exceeds the segment.
        """
        mapping = self._mappings[location.segment]
        size = sum(map(align, location.lengths))
        # NumPy and other users keep the memoryview, which keeps this array, which keeps the
        # mapping: when the array dies, no view of the slot is left.
        whole = np.frombuffer(mapping, np.uint8, size, location.offset)
        slot, released, held = location.slot, self._released, self._held

        def let_go(_: object) -> None:
            held.pop(slot, None)
            released.append(slot)

        held[slot] = weakref.ref(whole, let_go)
        view = memoryview(whole.data)
        views = []
        at = 0
        for length in location.lengths:
            views.append(view[at : at + length])
            at += align(length)
        return views

    @property
    def slots_held(self) -> int:
        return len(self._held)

    @property
    def num_pending_releases(self) -> int:
        return len(self._released)

    def release(self, location: BufferLocation) -> None:
        """Release the slot of a message that is not awaited any longer."""
        self._released.append(location.slot)

    def take_report(self, identity: ProcessIdentity | None = None) -> MemoryReport | None:
        """Return the changes since the last call, or None if there are none."""
        if not (identity or self._released or self._accepted or self._refused):
            return None
        return MemoryReport(
            identity, _drain(self._accepted), _drain(self._refused), _drain(self._released)
        )

    def clear(self) -> None:
        """Drop all segments; held views stay valid, but their release is not reported."""
        self._mappings.clear()
        self._accepted.clear()
        self._refused.clear()
        self._held.clear()
        self._released.clear()


def _drain(numbers: deque[int]) -> tuple[int, ...]:
    found = []
    while numbers:
        try:
            found.append(numbers.popleft())
        except IndexError:  # another thread may be draining; each number is taken once
            break
    return tuple(found)


def _open_mapping(offer: SegmentOffer) -> mmap.mmap:
    """Map the segment of an offer.

    Raises:
        OSError: If it cannot be opened from this process.
        _NotASegmentError: If the file is something else. It could be any file that this user can
            open, so it is checked before it is opened.
    """
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    _check_name(path, offer)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        # Check again: the number may belong to another file by now.
        _check_name(f"/proc/self/fd/{fd}", offer)
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (offer.inode, offer.size):
            raise _NotASegmentError(f"{path} is a different file, of {found.st_size:,} bytes")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise _NotASegmentError(
                f"{path} is not sealed, so that it could be truncated while in use"
            )
        return mmap.mmap(fd, offer.size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(fd)


def _check_name(path: str, offer: SegmentOffer) -> None:
    name = os.readlink(path)
    if not name.startswith(_SEGMENT_FILE_PREFIX):
        raise _NotASegmentError(
            f"file descriptor {offer.fd} refers to {name}, which is not a Headrace segment"
        )
