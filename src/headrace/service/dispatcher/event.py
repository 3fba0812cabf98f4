"""Base class of events: everything that the dispatcher must remember, in the past tense.

Rule 1. An event is complete: applying it needs only the state before it, no clock and no
        randomness, so that the same events always produce the same state.
Rule 2. The name and fields of an event that was ever journaled never change; new fields have
        defaults. The meaning of an event never changes.

Events that all modes share are in `events`; those of one mode in its `events` or `records`.
"""

from __future__ import annotations

import msgspec

__all__ = ["Event", "require"]


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base class of events; the class name is journaled as the tag."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message about an invalid event, unless the condition holds."""
    if not condition:
        raise ValueError(message)
