"""Places of an iterator that are kept by whoever may ask for their states."""

from __future__ import annotations

import weakref

from headrace.element.chunk import States
from headrace.execution.iterator import State

__all__ = ["Mark", "Marks"]


class Mark:
    """A place of an iterator. Taking it is free: the state is made when somebody asks.

    Args:
        states: Return the states at, and after, some place.
        offset: How many elements after that place it is.
    """

    __slots__ = ("__weakref__", "offset", "states")

    def __init__(self, states: States, offset: int) -> None:
        self.states = states
        self.offset = offset

    @property
    def state(self) -> State:
        """What the steps of the plan say of it; None: it is the beginning, which has no name."""
        return self.states(self.offset)


class Marks:
    """The marks of an iterator that somebody still holds, in the order of their places."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Mark]] = []

    def add(self, mark: Mark) -> None:
        """Take note of a mark that is taken now."""
        self._held = [each for each in self._held if each() is not None]
        self._held.append(weakref.ref(mark))

    def oldest(self) -> Mark | None:
        """Return the first that is held."""
        return next((mark for each in self._held if (mark := each()) is not None), None)
