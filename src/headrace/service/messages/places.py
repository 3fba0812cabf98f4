"""Places: what the clients of one iteration say to find the one at which all of them stand."""

from __future__ import annotations

from headrace.serving.call import Message, Question

__all__ = ["GatherPlace", "PlaceGathered"]


class PlaceGathered(Message, frozen=True):
    """The reply to `GatherPlace`."""

    missing: tuple[str, ...] = ()
    """Not empty: clients that have not said where they stand. Ask again soon; the rest is empty."""
    delivered: tuple[tuple[int, int], ...] = ()
    """Units of which all elements came to one client or another."""
    parts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Others of which some came, with ranges of their ordinals."""


class GatherPlace(Question[PlaceGathered], frozen=True):
    """Say where this client stands, and ask where all clients of its iteration stand together: when
    each of them has said it. An error says that this cannot be known."""

    client_id: str
    token: str
    """Of this question; repeated with it."""
    delivered: tuple[tuple[int, int], ...]
    """Units of the stream of which all elements came to it, or before it began."""
    parts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Others of which some did, with ranges of their ordinals."""
