"""Places: what the clients of one iteration say to find the one at which all of them stand."""

from __future__ import annotations

from headrace.serving.call import Message, Question

__all__ = ["ContributeCheckpoint", "ContributeCheckpointReply"]


class ContributeCheckpointReply(Message, frozen=True):
    """The reply to `ContributeCheckpoint`."""

    missing_clients: tuple[str, ...] = ()
    """Not empty: clients that have not said where they stand. Ask again soon; the rest is empty."""
    delivered: tuple[tuple[int, int], ...] = ()
    """Units of which all elements came to one client or another."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Others of which some came, with ranges of their ordinals."""


class ContributeCheckpoint(Question[ContributeCheckpointReply], frozen=True):
    """Say where this client stands, and ask where all clients of its iteration stand together: when
    each of them has said it. An error says that this cannot be known."""

    client_id: str
    token: str
    """Of this question; repeated with it."""
    delivered: tuple[tuple[int, int], ...]
    """Units of the stream of which all elements came to it, or before it began."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Others of which some did, with ranges of their ordinals."""
