"""How much a server takes from its peers, and keeps for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_REQUEST_BYTES", "ServerLimits"]

MAX_REQUEST_BYTES = 64 << 20
"""Bytes of the largest request that a server takes, unless it is configured otherwise."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What bounds the memory that peers can make a server hold.

    An answer beyond `pending_reply_bytes` or `total_pending_reply_bytes` is dropped, and an
    `UnavailableError` goes in its place: whoever asked reads what was sent before and asks again. A
    peer that reads nothing for `stall_seconds` while a bound is reached loses its connection, and
    what is kept for it goes.
    """

    request_bytes: int = MAX_REQUEST_BYTES
    """One request, with all its buffers. A single frame that is larger ends the connection; a
    larger request in several frames is answered with `FailedPreconditionError`."""
    pending_reply_bytes: int = 512 << 20
    """Answers to one peer that its connection has not taken yet. One answer may always wait, of
    whatever size."""
    total_pending_reply_bytes: int = 2 << 30
    """Such answers to all peers of the server together."""
    stall_seconds: float = 10.0
    """How long a peer may stand still while a bound is reached."""
    keepalive_interval: float = 30.0
    """How often every peer is pinged. ZeroMQ answers a ping on a thread of its own, so that an
    answer proves that the process runs, even while a function holds the interpreter's lock."""
    keepalive_timeout: float = 30.0
    """How long a peer may be silent, be it stopped or unreachable, before its connection is ended;
    it may take twice as long. One that was only stopped connects again when it goes on."""

    def __post_init__(self) -> None:
        for name in ("request_bytes", "pending_reply_bytes", "total_pending_reply_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("stall_seconds", "keepalive_timeout", "keepalive_interval"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0")
