"""Buffers between two processes of one host, through memory that both map.

The server owns an *arena* for each channel: a few *segments*, touched once and used again and
again, because page faults, not copies, are what shared memory costs. A reply's buffers are copied
once, into a *slot* of a segment; the channel hands out views of the slot and gives it back when the
last view is gone.

Rule 1. A segment has no name in any file system: it is a memfd that the channel opens through
        /proc/<pid>/fd/<fd>. When both processes are gone, so is the memory.
Rule 2. Nothing is placed in a segment before the channel has said that it could open it.
Rule 3. No free slot is no reason to wait: that reply goes through the socket.
Rule 4. Numbers of segments and slots are never used twice, not even by another server, so news
        about forgotten ones is harmless.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from headrace.transport.free_list import PAGE, FreeList

__all__ = [
    "Arena",
    "HostIdentity",
    "Mappings",
    "MemoryReport",
    "Offer",
    "Placement",
    "SharedMemoryOptions",
    "this_process",
]

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_numbers = itertools.count(random.SystemRandom().getrandbits(62))


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions:
    """How much memory one channel's arena may take."""

    segment_bytes: int = 64 << 20
    """Size of a segment; one for larger replies has room for four of them."""
    total_bytes: int = 512 << 20
    """All segments of one channel together."""
    smallest_reply: int = 16 << 10
    """Replies with fewer bytes of buffers go through the socket, which is as fast for them."""

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "total_bytes", "smallest_reply"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


# --- words -----------------------------------------------------------------------------------


class HostIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Which process this is, and on which host."""

    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    start_time: int
    """In clock ticks since boot; tells a process from a later one with the same pid."""

    def shares_memory_with(self, other: HostIdentity) -> bool:
        """Whether the two may open each other's memory."""
        return (self.boot_id, self.pid_namespace, self.uid) == (
            other.boot_id,
            other.pid_namespace,
            other.uid,
        )

    def is_alive(self) -> bool:
        """Whether this process, of this host, still runs."""
        try:
            return _start_time(self.pid) == self.start_time
        except (OSError, ValueError, IndexError):
            return False


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """A segment that the channel may open."""

    segment: int
    pid: int
    fd: int
    inode: int
    size: int


class Placement(msgspec.Struct, array_like=True, frozen=True):
    """Where a reply's buffers lie."""

    segment: int
    slot: int
    offset: int
    lengths: tuple[int, ...]


class MemoryReport(msgspec.Struct, array_like=True, frozen=True):
    """What the channel's end has to say about memory, piggybacked on requests."""

    identity: HostIdentity | None = None
    """Present in the first request of a connection that would like shared memory."""
    accepted: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


def this_process() -> HostIdentity | None:
    """Describe the calling process; None where the system does not tell, or has no memfd."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return HostIdentity(
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/pid").readlink()),
            os.getuid(),
            os.getpid(),
            _start_time(os.getpid()),
        )
    except (OSError, ValueError, IndexError) as error:
        _log.info("no shared memory, /proc does not tell who this process is: %s", error)
        return None


def _start_time(pid: int) -> int:
    # proc_pid_stat(5): the name in parentheses may hold anything; start time is field 22.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return -1
    return int(fields[19])


# --- which bytes are free --------------------------------------------------------------------


# --- the server's end ------------------------------------------------------------------------


class _Segment:
    """One memfd, mapped and touched."""

    def __init__(self, size: int) -> None:
        self.number = next(_numbers)
        self.free = FreeList(size)
        self.accepted = False
        self.fd = os.memfd_create("headrace", os.MFD_CLOEXEC)
        try:
            # Reserved, not only promised: a machine without that much memory says so here
            # instead of with SIGBUS in the middle of a copy.
            os.posix_fallocate(self.fd, 0, size)
            self.mapping = mmap.mmap(
                self.fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            )
        except BaseException:
            os.close(self.fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self.mapping)
        self.memory = ctypes.addressof(self._anchor)
        self.offer = Offer(self.number, os.getpid(), self.fd, os.fstat(self.fd).st_ino, size)

    def close(self) -> None:
        del self._anchor
        self.mapping.close()
        os.close(self.fd)


class Arena:
    """The memory that a server keeps for one channel. Any thread may call any method."""

    def __init__(self, identity: HostIdentity, options: SharedMemoryOptions) -> None:
        self.identity = identity
        self._options = options
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._slots: dict[int, tuple[_Segment, int]] = {}
        self._usable = True
        self._copying = 0
        self._closed = False

    def place(self, buffers: Sequence[memoryview]) -> Placement | Offer | None:
        """Copy buffers into a slot.

        Returns:
            Where they lie; or, where there was no room, a new segment to offer to the channel or
            None, and the buffers must travel another way.
        """
        lengths = tuple(view.nbytes for view in buffers)
        size = sum(_aligned(length) for length in lengths)
        if size < self._options.smallest_reply:
            return None
        with self._lock:
            if not self._usable:
                return None
            taken = self._take(size)
            if taken is None:
                return self._grow(size)
            segment, offset = taken
            slot = next(_numbers)
            self._slots[slot] = taken
            self._copying += 1
        try:
            # Outside the lock: memmove lets other threads run.
            at = segment.memory + offset
            for view, length in zip(buffers, lengths, strict=True):
                if length:
                    source = np.frombuffer(view, np.uint8)
                    ctypes.memmove(at, source.ctypes.data, length)
                at += _aligned(length)
        finally:
            with self._lock:
                self._copying -= 1
                if self._closed and not self._copying:
                    self._let_go()
        return Placement(segment.number, slot, offset, lengths)

    def _take(self, size: int) -> tuple[_Segment, int] | None:
        for segment in self._segments.values():
            if segment.accepted and (offset := segment.free.take(size)) is not None:
                return segment, offset
        return None

    def _grow(self, size: int) -> Offer | None:
        if any(not segment.accepted for segment in self._segments.values()):
            return None  # One offer at a time.
        allowed = self._options.total_bytes - sum(s.free.size for s in self._segments.values())
        pages = -(-size // PAGE) * PAGE
        wanted = min(max(self._options.segment_bytes, 4 * pages), allowed)
        wanted -= wanted % PAGE
        if wanted < pages:
            return None
        try:
            segment = _Segment(wanted)
        except OSError as error:
            self._usable = False
            _log.info("no shared memory with process %d: %s", self.identity.pid, error)
            return None
        self._segments[segment.number] = segment
        return segment.offer

    def hear(self, report: MemoryReport) -> None:
        """Take note of what the channel's end says."""
        with self._lock:
            for number in report.accepted:
                if number in self._segments:
                    self._segments[number].accepted = True
            for slot in report.released:
                if (taken := self._slots.pop(slot, None)) is not None:
                    taken[0].free.put_back(taken[1])
            for number in report.refused:
                segment = self._segments.get(number)
                if segment is not None and not segment.accepted:
                    del self._segments[number]
                    segment.close()
                    self._usable = False

    def take_back(self, placement: Placement) -> None:
        """Free the slot of a reply that was not sent."""
        self.hear(MemoryReport(released=(placement.slot,)))

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    def close(self) -> None:
        """Let the memory go; what the channel's end still holds stays valid there."""
        with self._lock:
            self._usable = False
            if not self._closed:
                self._closed = True
                if not self._copying:
                    self._let_go()

    def _let_go(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._slots.clear()


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


# --- the channel's end -----------------------------------------------------------------------


class Mappings:
    """The segments that a channel has opened, and the slots of them that it holds."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        self._accepted: list[int] = []
        self._refused: list[int] = []
        self._held: dict[int, weakref.ref[np.ndarray]] = {}
        # Filled by whichever thread drops the last view, maybe in a garbage collection: no lock.
        self._released: deque[int] = deque()

    def consider(self, offer: Offer) -> None:
        """Open a segment, and remember to tell whether that worked."""
        try:
            fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_ino, found.st_size) != (offer.inode, offer.size):
                    raise OSError("the file there is another one")
                self._mappings[offer.segment] = mmap.mmap(
                    fd, offer.size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                )
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            _log.info("no shared memory with process %d: %s", offer.pid, error)
            self._refused.append(offer.segment)
        else:
            self._accepted.append(offer.segment)

    def view(self, placement: Placement) -> list[memoryview]:
        """View the buffers of a reply; the slot is held until the last view of them is gone.

        Raises:
            KeyError: The segment is not one that was opened.
            ValueError: The placement reaches beyond the segment.
        """
        mapping = self._mappings[placement.segment]
        size = sum(_aligned(length) for length in placement.lengths)
        # NumPy and others keep the memoryview, the memoryview keeps this array, and this array
        # keeps the mapping: when it dies, no view of the slot is left.
        whole = np.frombuffer(mapping, np.uint8, size, placement.offset)
        slot, released, held = placement.slot, self._released, self._held

        def let_go(_: object) -> None:
            held.pop(slot, None)
            released.append(slot)

        held[slot] = weakref.ref(whole, let_go)
        view = memoryview(whole.data)
        views = []
        at = 0
        for length in placement.lengths:
            views.append(view[at : at + length])
            at += _aligned(length)
        return views

    @property
    def slots_held(self) -> int:
        return len(self._held)

    @property
    def releases_waiting(self) -> int:
        return len(self._released)

    def drop(self, placement: Placement) -> None:
        """Give back the slot of a reply that nobody waits for any more."""
        self._released.append(placement.slot)

    def take_report(self, identity: HostIdentity | None = None) -> MemoryReport | None:
        """Return the news since the last call, if there is any."""
        if not (identity or self._released or self._accepted or self._refused):
            return None
        released = []
        while self._released:
            released.append(self._released.popleft())
        report = MemoryReport(
            identity, tuple(self._accepted), tuple(self._refused), tuple(released)
        )
        self._accepted.clear()
        self._refused.clear()
        return report

    def forget(self) -> None:
        """Drop all segments; views that are held stay valid, but are given back to nobody."""
        self._mappings.clear()
        self._accepted.clear()
        self._refused.clear()
        self._held.clear()
        self._released.clear()
