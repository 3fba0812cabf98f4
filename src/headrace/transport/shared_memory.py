"""Buffers between two processes of one host, through memory that both map.

Whoever sends owns an *arena* (`arena`): a few *segments*, touched once and used again and again,
because page faults, not copies, are what shared memory costs. The buffers of a message are copied
once, into a *slot* of a segment; the other end (`mappings`) hands out views of the slot and gives
it back when the last view is gone. A server has an arena for the replies to each channel, and a
channel one for its requests, once the server has said that it could open it. This file has the
words that the two ends exchange; below, the *owner* has the arena and the *reader* its views.

Rule 1. A segment has no name in any file system: it is a memfd that the reader opens through
        /proc/<pid>/fd/<fd>. When both processes are gone, so is the memory.
Rule 2. Nothing is placed in a segment before the reader has said that it could open it.
Rule 3. No free slot is no reason to wait: that message goes through the socket.
Rule 4. Numbers of segments and slots are never used twice, not even by another server, so news
        about forgotten ones is harmless.
Rule 5. An arena lives as long as its connection. A slot that is held for longer than a lease takes
        its segment out of the arena: the memory is the reader's then, and goes with the last view.
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

# Neither end can shorten what the other has mapped, which would kill it with SIGBUS.
SEALS: int = (
    getattr(fcntl, "F_SEAL_SHRINK", 0)
    | getattr(fcntl, "F_SEAL_GROW", 0)
    | getattr(fcntl, "F_SEAL_SEAL", 0)
)
"""What a segment's memfd is sealed with."""


def align(length: int) -> int:
    """Round a buffer's length up, so that the next one begins where vector instructions like it."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _default_server_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(2 << 30, memory // 4)


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions:
    """How much memory the arenas of a server, or of the channels of a process, may take."""

    segment_bytes: int = 64 << 20
    """Size of a segment; one for larger replies has room for four of them."""
    total_bytes: int = 512 << 20
    """All segments of one channel together."""
    server_bytes: int = field(default_factory=_default_server_bytes)
    """All segments of all channels of one server together, and of all channels of one process: 2
    GiB, or a quarter of the machine's memory where that is less."""
    smallest_reply: int = 16 << 10
    """Messages with fewer bytes of buffers go through the socket, which is as fast for them."""
    lease_seconds: float = 60.0
    """How long a channel may hold a slot before its segment is no longer the arena's."""

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "total_bytes", "server_bytes", "smallest_reply"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not self.lease_seconds > 0:
            raise ValueError(f"lease_seconds={self.lease_seconds} must be greater than 0")


# --- words -----------------------------------------------------------------------------------


class ProcessIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Which process this is, and on which host."""

    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    start_time: int
    """In clock ticks since boot; tells a process from a later one with the same pid."""

    def shares_memory_with(self, other: ProcessIdentity) -> bool:
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


class SegmentOffer(msgspec.Struct, array_like=True, frozen=True):
    """A segment that the reader may open."""

    segment: int
    pid: int
    fd: int
    inode: int
    size: int


class BufferLocation(msgspec.Struct, array_like=True, frozen=True):
    """Where a message's buffers lie."""

    segment: int
    slot: int
    offset: int
    lengths: tuple[int, ...]


class MemoryReport(msgspec.Struct, array_like=True, frozen=True):
    """What a reader has to say about memory, piggybacked on its messages."""

    identity: ProcessIdentity | None = None
    """Present in the first request of a connection that would like shared memory, and in the first
    answer of a server that shares it."""
    accepted: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


def current_process_identity() -> ProcessIdentity | None:
    """Describe the calling process; None where the system does not tell, or has no memfd."""
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
        _log.info("no shared memory, /proc does not tell who this process is: %s", error)
        return None


def _start_time(pid: int) -> int:
    # proc_pid_stat(5): the name in parentheses may hold anything; start time is field 22.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return -1
    return int(fields[19])
