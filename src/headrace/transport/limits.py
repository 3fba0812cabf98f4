"""Limits of what a server accepts from its peers and buffers for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_REQUEST_BYTES", "ServerLimits"]

MAX_REQUEST_BYTES = 64 << 20
"""Default size limit of a request, in bytes."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of the memory that peers can make a server use.

    A reply beyond `pending_reply_bytes` or `total_pending_reply_bytes` is replaced by an
    `UnavailableError`: the client reads the earlier replies and repeats the request. A peer that
    reads nothing for `stall_seconds` while a limit is reached is disconnected, and its buffered
    replies are dropped.
    """

    request_bytes: int = MAX_REQUEST_BYTES
    """Size limit of one request, with all its buffers. A single larger frame ends the connection; a
    larger request in several frames is answered with `FailedPreconditionError`.
    """
    pending_reply_bytes: int = 512 << 20
    """Size limit of replies to one peer that its connection has not taken yet. A single reply may
    always wait, whatever its size.
    """
    total_pending_reply_bytes: int = 2 << 30
    """The same limit for all peers of the server together."""
    stall_seconds: float = 10.0
    """Seconds that a peer may stall while a limit is reached."""
    keepalive_interval: float = 30.0
    """Seconds between pings of every peer. ZeroMQ answers a ping on a thread of its own, so an
    answer proves that the process runs, even while a function holds the GIL.
    """
    keepalive_timeout: float = 30.0
    """Seconds that a stopped or unreachable peer may be silent before it is disconnected; this
    may take twice as long. A peer that was only stopped reconnects when it continues.
    """

    def __post_init__(self) -> None:
        for name in ("request_bytes", "pending_reply_bytes", "total_pending_reply_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("stall_seconds", "keepalive_timeout", "keepalive_interval"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0")
