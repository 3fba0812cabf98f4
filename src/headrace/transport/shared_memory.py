"""Exchange of buffers between two processes of one host, through memory that both map.

The sender owns an *arena* (`arena`): a few *segments* whose pages are allocated once and reused,
because page faults, not copies, are the cost of shared memory. The buffers of a message are copied
once, into a *slot* of a segment; the other end (`mappings`) returns views of the slot, and releases
it when the last view is dropped. A server has an arena for the replies to each channel; a channel
has one for its requests, once the server has reported that it could open it. This module has the
messages between the two ends. In the rules, the *owner* has the arena and the *reader* its views.

Rule 1. A segment has no name in any file system: it is a memfd that the reader opens through
        /proc/<pid>/fd/<fd>. When both processes have ended, its memory is freed.
Rule 2. Nothing is placed in a segment before the reader has reported that it could open it.
Rule 3. A message never waits for a free slot: if there is none, it is sent over the socket.
Rule 4. Numbers of segments and slots are never reused, not even by another server, so late reports
        about forgotten ones are harmless.
Rule 5. An arena lives as long as its connection. If a slot is held for longer than a lease, its
        segment is removed from the arena: the memory is then left to the reader, and is freed with
        the last view.
"""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

__all__ = [
    "SEALS",
    "BufferLocation",
    "MemoryReport",
    "ProcessIdentity",
    "SegmentOffer",
    "SharedMemoryOptions",
    "align",
    "current_process_identity",
]

_log = logging.getLogger(__name__)

_ALIGNMENT = 64

# Prevents each end from truncating memory that the other has mapped, which would kill it with
# SIGBUS.
SEALS: int = (
    getattr(fcntl, "F_SEAL_SHRINK", 0)
    | getattr(fcntl, "F_SEAL_GROW", 0)
    | getattr(fcntl, "F_SEAL_SEAL", 0)
)
"""Seals of a segment's memfd."""


def align(length: int) -> int:
    """Round a buffer's length up, so that the next one is aligned for vector instructions."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _default_server_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(2 << 30, memory // 4)


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions:
    """Limits of the memory of a server's arenas, or of those of a process's channels."""

    segment_bytes: int = 64 << 20
    """Size of a segment, in bytes; a segment for larger replies has space for four of them."""
    total_bytes: int = 512 << 20
    """Limit for all segments of one channel together, in bytes."""
    server_bytes: int = field(default_factory=_default_server_bytes)
    """Limit for all segments of all channels of one server, and for those of all channels of one
    process, in bytes: 2 GiB, or a quarter of the machine's memory if that is less.
    """
    smallest_reply: int = 16 << 10
    """Messages with fewer bytes of buffers are sent over the socket, which is as fast for them."""
    lease_seconds: float = 60.0
    """Seconds that a channel may hold a slot before its segment is removed from the arena."""

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "total_bytes", "server_bytes", "smallest_reply"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not self.lease_seconds > 0:
            raise ValueError(f"lease_seconds={self.lease_seconds} must be greater than 0")


# --- messages -------------------------------------------------------------------------------------


class ProcessIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Identity of a process and its host."""

    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    start_time: int
    """In clock ticks since boot; distinguishes a process from a later one with the same pid."""

    def shares_memory_with(self, other: ProcessIdentity) -> bool:
        """Return whether the two processes may open each other's memory."""
        return (self.boot_id, self.pid_namespace, self.uid) == (
            other.boot_id,
            other.pid_namespace,
            other.uid,
        )

    def is_alive(self) -> bool:
        """Return whether this process, which must be on this host, is running."""
        try:
            return _start_time(self.pid) == self.start_time
        except (OSError, ValueError, IndexError):
            return False


class SegmentOffer(msgspec.Struct, array_like=True, frozen=True):
    """Offer of a segment that the reader may open."""

    segment: int
    pid: int
    fd: int
    inode: int
    size: int


class BufferLocation(msgspec.Struct, array_like=True, frozen=True):
    """Location of a message's buffers."""

    segment: int
    slot: int
    offset: int
    lengths: tuple[int, ...]


class MemoryReport(msgspec.Struct, array_like=True, frozen=True):
    """Report of a reader about the owner's memory, sent along with its messages."""

    identity: ProcessIdentity | None = None
    """Present in the first request of a connection that wants shared memory, and in the first reply
    of a server that supports it.
    """
    accepted: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


def current_process_identity() -> ProcessIdentity | None:
    """Return the identity of this process; None if it is unavailable or memfd unsupported."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return ProcessIdentity(
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/pid").readlink()),
            os.getuid(),
            os.getpid(),
            _start_time(os.getpid()),
        )
    except (OSError, ValueError, IndexError) as error:
        _log.info("shared memory disabled, /proc does not show this process's identity: %s", error)
        return None


def _start_time(pid: int) -> int:
    # proc_pid_stat(5): the name in parentheses may contain anything; the start time is field 22.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return -1
    return int(fields[19])
