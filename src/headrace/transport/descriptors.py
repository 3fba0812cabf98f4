"""Descriptors of ZeroMQ's own sockets, and the limit on open files.

ZeroMQ opens and closes its sockets on its own threads, so a number alone says little: the inode
next to it distinguishes a socket from a later one with the same number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
import struct
import sys
from typing import NamedTuple

__all__ = [
    "Descriptor",
    "closed_by_peer",
    "limit_receive_buffer",
    "raise_file_limit",
    "seconds_since_data",
    "warn_near_file_limit",
]

_log = logging.getLogger(__name__)

_IN_CACHE_BYTES = 512 << 10
_WARN_FRACTION = 0.9
#: Offset of `tcpi_last_data_recv` in Linux's `struct tcp_info`, and the number of bytes to read.
_LAST_DATA_RECEIVED = 52
_TCP_INFO_BYTES = 56
_MAX_FILE_LIMIT = 1 << 20
# Events that poll() reports for a connection that the other end has closed or reset, whatever is
# left to read.
_CLOSED_EVENTS = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Descriptor(NamedTuple):
    """A socket of this process: its number, and the inode that identifies it."""

    number: int
    inode: int

    @classmethod
    def of(cls, number: int) -> Descriptor | None:
        """Return the descriptor of the open socket with this number; None if it is closed."""
        try:
            return cls(number, os.fstat(number).st_ino)
        except OSError:
            return None

    def duplicate(self) -> socket.socket | None:
        """Return a duplicate of the socket; None if it is closed."""
        try:
            number = os.dup(self.number)
        except OSError:
            return None
        try:
            if os.fstat(number).st_ino == self.inode:
                return socket.socket(fileno=number)
        except OSError:
            pass
        os.close(number)
        return None

    def shut_down(self) -> None:
        """End the connection; to the socket's owner, it looks closed by the peer."""
        found = self.duplicate()
        if found is not None:
            with found, contextlib.suppress(OSError):  # the connection may have ended
                found.shutdown(socket.SHUT_RDWR)
        elif self == Descriptor.of(self.number):
            # No number is left for a duplicate, so the owner's number is used.
            own = socket.socket(fileno=self.number)
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
            own.detach()

    def close(self) -> None:
        """Close this number, if it still is that socket. Only for use in a forked process."""
        if self == Descriptor.of(self.number):
            os.close(self.number)


def closed_by_peer(connection: socket.socket) -> bool:
    """Return whether the other end of a connection closed or reset it, or its process ended."""
    poll = select.poll()
    poll.register(connection, _CLOSED_EVENTS)
    return bool(poll.poll(0))


def seconds_since_data(descriptor: Descriptor) -> float | None:
    """Return the seconds since data last arrived on a TCP connection.

    The kernel also counts data that ZeroMQ's own thread reads: a peer that answers pings is not
    silent. None is returned if the connection is closed, and on systems other than Linux.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None or not sys.platform.startswith("linux"):
        return None
    connection = descriptor.duplicate()
    if connection is None:
        return None
    with connection:
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
        except OSError:
            return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (milliseconds,) = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)
    return float(milliseconds) / 1000


def limit_receive_buffer(connection: socket.socket) -> None:
    """Limit the buffer of a connection within this host, so that data is read while it is cached.

    For long-distance connections the kernel lets a buffer grow to megabytes; such data has left the
    CPU caches when the other end copies it. Connections between hosts are left to the kernel.
    """
    with contextlib.suppress(OSError):  # the connection may have ended
        if connection.getpeername()[0] == connection.getsockname()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_CACHE_BYTES)


# --- limit on open files --------------------------------------------------------------------------

_warned = False


def raise_file_limit() -> None:
    """Raise this process's limit on open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = _MAX_FILE_LIMIT if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        except (OSError, ValueError) as error:
            _log.info("cannot raise the limit of %d open files: %s", soft, error)


def warn_near_file_limit(number: int) -> None:
    """Warn once if a newly opened descriptor shows that few are left.

    The kernel assigns the lowest free number, so a high one means that those below are taken.
    """
    global _warned
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _warned and soft != resource.RLIM_INFINITY and number >= _WARN_FRACTION * soft:
        _warned = True
        _log.warning(
            "%d of at most %d files of this process are open, and connections fail at "
            "the limit; raise it (ulimit -n)",
            number,
            soft,
        )
