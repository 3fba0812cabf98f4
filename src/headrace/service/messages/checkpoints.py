"""Messages by which the clients of an iteration find their common iterator position."""

from __future__ import annotations

from headrace.serving.rpc import Message, TypedRequest

__all__ = ["ContributeCheckpoint", "ContributeCheckpointReply"]


class ContributeCheckpointReply(Message, frozen=True):
    """Reply to `ContributeCheckpoint`."""

    missing_clients: tuple[str, ...] = ()
    """Clients that have not contributed their position yet. If not empty, the client requests again
    soon, and the other fields are empty."""
    delivered: tuple[tuple[int, int], ...] = ()
    """Splits whose elements were all delivered, to any clients."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Other splits that were delivered in part, with ranges of the delivered ordinals."""


class ContributeCheckpoint(TypedRequest[ContributeCheckpointReply], frozen=True):
    """Contribute this client's position, and request the common position of all clients of its
    iteration.

    The reply is complete when each client has contributed. An error means that the common position
    cannot be determined.
    """

    client_id: str
    token: str
    """Token of this request; equal when it is repeated."""
    delivered: tuple[tuple[int, int], ...]
    """Splits of the stream whose elements were all delivered to this client, or before it started.
    """
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Other splits that were delivered in part, with ranges of the delivered ordinals."""
