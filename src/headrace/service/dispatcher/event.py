"""The base class of facts: everything that the dispatcher must remember, in the past tense.

Rule 1. A fact is complete: applying it needs the state before it and nothing else, no clock and no
        chance, so the same facts always add up to the same state.
Rule 2. A fact that was ever written to a journal keeps its name and its fields; new fields have
        defaults. What a fact means never changes.

Facts that all modes share are in `updates`; those of one mode in its `records`.
"""

from __future__ import annotations

import msgspec

__all__ = ["Event", "require"]


class Event(msgspec.Struct, frozen=True, tag=True):
    """One thing that happened; its class name is kept as its tag."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError with what contradicts a fact, unless it holds."""
    if not condition:
        raise ValueError(message)
