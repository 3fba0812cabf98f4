"""The owner's side of shared memory: one arena for each reader, and a budget for all of them."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.transport.copying import copy_memory
from headrace.transport.free_list import PAGE, FreeList
from headrace.transport.shared_memory import (
    SEALS,
    BufferLocation,
    MemoryReport,
    ProcessIdentity,
    SegmentOffer,
    SharedMemoryOptions,
    align,
)

__all__ = ["Arena", "ArenaBudget"]

_log = logging.getLogger(__name__)

_APPENDED_BYTES = 64 << 10
"""Space after a buffer made in a slot, for small buffers sent with it, in bytes."""

_numbers = itertools.count(random.SystemRandom().getrandbits(62))


class ArenaBudget:
    """Limit of the memory of all arenas of one owner. Thread-safe."""

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        self._available = total

    @property
    def available(self) -> int:
        return self._available

    def reserve(self, requested: int, minimum: int) -> int:
        """Reserve up to `requested` bytes; return their number, or 0 if fewer than `minimum`."""
        with self._lock:
            granted = min(requested, self._available)
            granted -= granted % PAGE
            if granted < minimum:
                return 0
            self._available -= granted
            return granted

    def release(self, size: int) -> None:
        with self._lock:
            self._available += size


class _Segment:
    """A memfd, sealed, mapped and with its pages allocated."""

    def __init__(self, size: int) -> None:
        self.number = next(_numbers)
        self.free = FreeList(size)
        self.accepted = False
        #: Number of messages stored in it that have not been handed to the socket yet.
        self.unsent_messages = 0
        self.fd = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocated, not only reserved: a lack of memory is reported here, not as SIGBUS in the
            # middle of a copy.
            os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.mapping = mmap.mmap(
                self.fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            )
        except BaseException:
            os.close(self.fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self.mapping)
        self.memory = ctypes.addressof(self._anchor)
        self.offer = SegmentOffer(self.number, os.getpid(), self.fd, os.fstat(self.fd).st_ino, size)

    def close(self) -> None:
        del self._anchor
        self.mapping.close()
        os.close(self.fd)


class _Memory:
    """Memory of a segment as a NumPy array interface; its users must keep the segment alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, False),
        }


class _Slot(NamedTuple):
    segment: _Segment
    offset: int
    taken_at: float


class Arena:
    """Memory that an owner shares with one reader. Thread-safe.

    Args:
        identity: Identity of the reader's process.
        options: Size limits.
        budget: Budget shared with the owner's other arenas; None creates a separate one.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        options: SharedMemoryOptions,
        budget: ArenaBudget | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self._options = options
        self._budget = budget or ArenaBudget(options.server_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._slots: dict[int, _Slot] = {}
        self._is_usable = True
        self._closed = False

    def write(self, buffers: Sequence[memoryview]) -> BufferLocation | SegmentOffer | None:
        """Copy buffers into a slot. A returned `BufferLocation` must be passed to `mark_sent`.

        Returns:
            The location of the buffers. If there is no space, a new segment to offer to the reader,
            or None; the buffers must then be sent another way.
        """
        placement = self._reserve(tuple([view.nbytes for view in buffers]))
        if not isinstance(placement, BufferLocation):
            return placement
        try:
            # Outside the lock: a copy releases the GIL.
            self._copy(buffers, self._address(placement))
        except BaseException:
            self.release(placement)
            self.mark_sent(placement)
            raise
        return placement

    def allocate(self, size: int) -> tuple[BufferLocation, np.ndarray] | None:
        """Return a slot for one buffer to be filled, and its memory as bytes; None without space.

        The location must be passed to `mark_sent`; until then the memory may be written.
        """
        if size < self._options.smallest_reply:
            return None
        placement = self._reserve((size, _APPENDED_BYTES), may_grow=False)
        if not isinstance(placement, BufferLocation):
            return None
        return placement, np.asarray(_Memory(self._address(placement), size))

    def append(
        self, location: BufferLocation, buffers: Sequence[memoryview]
    ) -> BufferLocation | None:
        """Copy further buffers behind an allocated one; return None if they do not fit."""
        size = location.lengths[0]
        lengths = tuple([view.nbytes for view in buffers])
        if sum(map(align, lengths)) > _APPENDED_BYTES:
            return None
        self._copy(buffers, self._address(location) + align(size))
        return BufferLocation(location.segment, location.slot, location.offset, (size, *lengths))

    @staticmethod
    def _copy(buffers: Sequence[memoryview], at: int) -> None:
        # Buffers that are adjacent at both ends are copied at once: after each copy, a thread waits
        # for the GIL.
        start = size = 0
        for view in buffers:
            length = view.nbytes
            if not length:
                continue
            source = np.frombuffer(view, np.uint8).ctypes.data
            if source != start + size or size != align(size):
                if size:
                    copy_memory(at, start, size)
                    at += align(size)
                start, size = source, 0
            size += length
        copy_memory(at, start, size)

    def _reserve(
        self, lengths: tuple[int, ...], *, may_grow: bool = True
    ) -> BufferLocation | SegmentOffer | None:
        size = sum(map(align, lengths))
        if size < self._options.smallest_reply:
            return None
        with self._lock:
            if not self._is_usable:
                return None
            taken = self._allocate(size)
            if taken is None:
                return self._grow(size) if may_grow else None
            segment, offset, _ = taken
            number = next(_numbers)
            self._slots[number] = taken
            segment.unsent_messages += 1
        return BufferLocation(segment.number, number, offset, lengths)

    def _address(self, location: BufferLocation) -> int:
        """Return the address of a slot whose message has not been sent yet."""
        return self._segments[location.segment].memory + location.offset

    def mark_sent(self, location: BufferLocation) -> None:
        """Record that a message was handed to the socket, before any message that is sent later."""
        with self._lock:
            segment = self._segments[location.segment]
            segment.unsent_messages -= 1
            if self._closed and not segment.unsent_messages:
                self._close_segment(segment)

    def _allocate(self, size: int) -> _Slot | None:
        for segment in self._segments.values():
            if segment.accepted and (offset := segment.free.allocate(size)) is not None:
                return _Slot(segment, offset, self._clock())
        return None

    def _grow(self, size: int) -> SegmentOffer | None:
        if any(not segment.accepted for segment in self._segments.values()):
            return None  # one offer at a time
        allowed = self._options.total_bytes - sum(s.free.size for s in self._segments.values())
        pages = -(-size // PAGE) * PAGE
        requested = min(max(self._options.segment_bytes, 4 * pages), allowed)
        granted = self._budget.reserve(requested, pages)
        if not granted:
            return None
        try:
            segment = _Segment(granted)
        except OSError as error:
            self._budget.release(granted)
            self._is_usable = False
            _log.info("cannot share memory with process %d: %s", self.identity.pid, error)
            return None
        except BaseException:
            self._budget.release(granted)
            raise
        self._segments[segment.number] = segment
        return segment.offer

    def apply_report(self, report: MemoryReport) -> None:
        """Apply a report of the reader."""
        with self._lock:
            for number in report.accepted:
                if number in self._segments:
                    self._segments[number].accepted = True
            for number in report.released:
                if (slot := self._slots.pop(number, None)) is not None:
                    slot.segment.free.release(slot.offset)
            for number in report.refused:
                segment = self._segments.get(number)
                if segment is not None and not segment.accepted:
                    self._close_segment(segment)
                    self._is_usable = False

    def release(self, location: BufferLocation) -> None:
        """Free the slot of a message that was not sent."""
        self.apply_report(MemoryReport(released=(location.slot,)))

    def retire_overdue(self) -> tuple[int, ...]:
        """Drop segments with a slot that has been held for longer than the lease.

        Returns:
            Numbers of the segments. They must be sent to the reader after all messages sent so far;
            it drops the segments, too, so that their memory is freed with the last view of it.
        """
        oldest = self._clock() - self._options.lease_seconds
        with self._lock:
            overdue = {
                slot.segment.number: slot.segment
                for slot in self._slots.values()
                if slot.taken_at < oldest and not slot.segment.unsent_messages
            }
            for number, segment in overdue.items():
                self._slots = {n: s for n, s in self._slots.items() if s.segment is not segment}
                self._close_segment(segment)
                _log.debug(
                    "segment %d not returned in time; abandoned to process %d",
                    number,
                    self.identity.pid,
                )
        return tuple(overdue)

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    @property
    def bytes_mapped(self) -> int:
        return sum(segment.free.size for segment in list(self._segments.values()))

    def close(self) -> None:
        """Release the memory; views that the reader still holds stay valid there."""
        with self._lock:
            self._is_usable = False
            self._closed = True
            self._slots.clear()
            for segment in list(self._segments.values()):
                if not segment.unsent_messages:
                    self._close_segment(segment)

    def _close_segment(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        segment.close()
        self._budget.release(segment.free.size)
