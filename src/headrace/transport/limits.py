"""How much a server takes from its peers, and keeps for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LARGEST_REQUEST", "ServerLimits"]

LARGEST_REQUEST = 64 << 20
"""Bytes of the largest request that a server takes, unless it is configured otherwise."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What bounds the memory that peers can make a server hold.

    An answer beyond `unread_bytes` or `all_unread_bytes` is dropped, and an `UnavailableError` goes
    in its place: whoever asked reads what was sent before and asks again. A peer that reads nothing
    for `stall_seconds` while a bound is reached loses its connection, and what is kept for it goes.
    """

    request_bytes: int = LARGEST_REQUEST
    """One request, with all its buffers. A single frame that is larger ends the connection; a
    larger request in several frames is answered with `FailedPreconditionError`."""
    unread_bytes: int = 512 << 20
    """Answers to one peer that its connection has not taken yet. One answer may always wait, of
    whatever size."""
    all_unread_bytes: int = 2 << 30
    """Such answers to all peers of the server together."""
    stall_seconds: float = 10.0
    """How long a peer may stand still while a bound is reached."""
    ping_seconds: float = 30.0
    """How often every peer is pinged. ZeroMQ answers a ping on a thread of its own, so that an
    answer proves that the process runs, even while a function holds the interpreter's lock."""
    silence_seconds: float = 30.0
    """How long a peer may be silent, be it stopped or unreachable, before its connection is ended;
    it may take twice as long. One that was only stopped connects again when it goes on."""

    def __post_init__(self) -> None:
        for name in ("request_bytes", "unread_bytes", "all_unread_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("stall_seconds", "silence_seconds", "ping_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}={value} must be greater than 0")
