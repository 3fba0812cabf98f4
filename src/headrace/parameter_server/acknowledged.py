"""Acknowledged positions of a replicated store.

A position is a version vector with one entry for each replica of a store: how many operations that
replica has carried out as the leading one, `Settle` apart. Replicas that carry out an operation
together count it together. So a replica has everything that a position stands for if no entry of
its own is smaller, whatever pauses, takeovers and losses of connections came between.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["START", "Acknowledged", "Position", "has_all", "joined"]

Position: TypeAlias = tuple[int, int]

START: Position = (0, 0)


def has_all(position: Position, seen: Position) -> bool:
    """Whether a replica at `position` has everything that `seen` stands for."""
    return position[0] >= seen[0] and position[1] >= seen[1]


def joined(one: Position, other: Position) -> Position:
    """Return the position of a replica that has what both stand for."""
    return max(one[0], other[0]), max(one[1], other[1])


class Acknowledged(msgspec.Struct, frozen=True, array_like=True):
    """The highest acknowledged position of a store that one process knows.

    Attributes:
        life: Of the contents; "": nothing is known.
        writes: How many writes.
        position: Up to where.
    """

    life: str = ""
    writes: int = 0
    position: Position = START

    def joined(self, other: Acknowledged) -> Acknowledged:
        """Return what both know of the same contents."""
        return Acknowledged(
            self.life, max(self.writes, other.writes), joined(self.position, other.position)
        )
