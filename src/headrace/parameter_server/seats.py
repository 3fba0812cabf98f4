"""The two seats of a replicated store, and the positions that they have reached. Pure.

    vacant --Lead--> leading --a later epoch leads--> following (empty, then whole)
    vacant --Follow--> following --the leading seat is gone--> leading, in the next epoch

Rule 1. The leading seat carries out operations, and answers a write when the other has it as well.
Rule 2. A following seat that is whole becomes the leading one when somebody asks who cannot reach
        the other (`insists`). It takes nothing from the earlier one after that.
Rule 3. A store begins empty only where both seats are vacant: the leading one asks the other first.
Rule 4. A seat that has contents gives them up for nobody but a later epoch of the same life, and
        where it lacks operations that were acknowledged.

A position is a version vector with one entry for each replica of a store: how many operations that
replica has carried out as the leading one, `Settle` apart. Replicas that carry out an operation
together count it together. So a replica has everything that a position stands for if no entry of
its own is smaller, whatever pauses, takeovers and losses of connections came between.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

__all__ = [
    "PATIENCE",
    "START",
    "Acknowledged",
    "Admission",
    "Position",
    "Role",
    "Seat",
    "has_all",
    "joined",
]


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


PATIENCE = 5.0
"""Seconds for which a seat that stands still is waited for; one that ended is noticed at once."""


class Role(Enum):
    """What a seat does."""

    VACANT = "vacant"
    """It has nothing: its process has just begun, or its contents were given up."""
    FOLLOWING = "following"
    """It gets what the leading seat has and does."""
    LEADING = "leading"
    """It carries out what clients ask."""


class Admission(Enum):
    """What becomes of a client's request."""

    HERE = "here"
    """It is carried out."""
    PROMOTED = "promoted"
    """It is carried out, and this seat leads from now on."""
    ELSEWHERE = "elsewhere"
    """The other seat is to be asked."""
    VACANT = "vacant"
    """The other seat is to be asked: this one has nothing."""
    OUTDATED = "outdated"
    """It lacks operations that were acknowledged to whoever asks: its contents count as lost."""
    REBORN = "reborn"
    """It was meant for contents that are lost."""


@dataclass
class Seat:
    """One seat.

    Attributes:
        role: What it does.
        epoch: How often another seat became the leading one, this one included.
        life: Names the contents: those that begin empty have another one.
        is_whole: Whether it has all of them.
        position: Which operations are in them.
    """

    role: Role = Role.VACANT
    epoch: int = 0
    life: str = ""
    is_whole: bool = False
    position: Position = START

    def admit(self, life: str, *, insists: bool, seen: Position = START) -> Admission:
        """Say what becomes of a request.

        Args:
            life: Whose contents it is meant for; "": any.
            insists: Whoever asks found the other seat gone, or vacant.
            seen: Up to where operations on these contents are known to be acknowledged.
        """
        if self.role is Role.VACANT or not self.is_whole:
            return Admission.VACANT
        if life not in ("", self.life):
            return Admission.REBORN
        if self.role is Role.FOLLOWING and not insists:
            return Admission.ELSEWHERE
        if life and not has_all(self.position, seen):
            return Admission.OUTDATED
        if self.role is Role.LEADING:
            return Admission.HERE
        self.role = Role.LEADING
        self.epoch += 1
        return Admission.PROMOTED

    def lead(self, life: str) -> None:
        """Lead new contents, which the other seat has agreed to follow."""
        self.role, self.epoch, self.life, self.is_whole = Role.LEADING, 1, life, True
        self.position = START

    def advance(self, place: int, count: int) -> None:
        """Take note that this seat, the first or second one, has carried out operations."""
        first, second = self.position
        self.position = (first, second + count) if place else (first + count, second)

    def follow(self, epoch: int, life: str, position: Position = START) -> bool:
        """Give up what there is, and follow a leading seat; False: it does not lead any more."""
        if self.role is not Role.VACANT and self.is_whole:
            least = self.epoch + (self.role is Role.LEADING)
            if life != self.life or epoch < least:
                return False
        self.role, self.epoch, self.life, self.is_whole = Role.FOLLOWING, epoch, life, False
        self.position = position
        return True

    def outranks(self, epoch: int, life: str) -> bool:
        """Whether it leads, and follows no seat of this epoch."""
        is_later = life == self.life and epoch > self.epoch
        return self.role is Role.LEADING and not is_later

    def is_led_by(self, epoch: int, life: str) -> bool:
        """Whether it follows a leading seat."""
        return self.role is Role.FOLLOWING and (self.epoch, self.life) == (epoch, life)

    def vacate(self) -> None:
        """Have nothing any more."""
        self.role, self.is_whole, self.position = Role.VACANT, False, START
