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
replica has carried out as the leading one, `ForgetWriteKeys` apart. Replicas that carry out an
operation together count it together. So a replica has everything that a position stands for if no
entry of its own is smaller, whatever pauses, takeovers and losses of connections came between.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

__all__ = [
    "INITIAL_POSITION",
    "REPLICA_TIMEOUT_SECONDS",
    "AcknowledgedState",
    "Position",
    "ReplicaRole",
    "ReplicaState",
    "RequestDecision",
    "has_reached",
    "merge_positions",
]


Position: TypeAlias = tuple[int, int]

INITIAL_POSITION: Position = (0, 0)


def has_reached(position: Position, required: Position) -> bool:
    """Whether a replica at `position` has everything that `required` stands for."""
    return position[0] >= required[0] and position[1] >= required[1]


def merge_positions(first: Position, second: Position) -> Position:
    """Return the position of a replica that has what both stand for."""
    return max(first[0], second[0]), max(first[1], second[1])


class AcknowledgedState(msgspec.Struct, frozen=True, array_like=True):
    """The highest acknowledged position of a store that one process knows.

    Attributes:
        state_id: Of the contents; "": nothing is known.
        writes: How many writes.
        position: Up to where.
    """

    state_id: str = ""
    writes: int = 0
    position: Position = INITIAL_POSITION

    def merge(self, other: AcknowledgedState) -> AcknowledgedState:
        """Return what both know of the same contents."""
        return AcknowledgedState(
            self.state_id,
            max(self.writes, other.writes),
            merge_positions(self.position, other.position),
        )


REPLICA_TIMEOUT_SECONDS = 5.0
"""Seconds for which a seat that stands still is waited for; one that ended is noticed at once."""


class ReplicaRole(Enum):
    """What a seat does."""

    EMPTY = "empty"
    """It has nothing: its process has just begun, or its contents were given up."""
    FOLLOWER = "follower"
    """It gets what the leading seat has and does."""
    LEADER = "leader"
    """It carries out what clients ask."""


class RequestDecision(Enum):
    """What becomes of a client's request."""

    EXECUTE = "execute"
    """It is carried out."""
    TAKE_OVER = "take_over"
    """It is carried out, and this seat leads from now on."""
    NOT_LEADER = "not_leader"
    """The other seat is to be asked."""
    NO_STATE = "no_state"
    """The other seat is to be asked: this one has nothing."""
    STALE_STATE = "stale_state"
    """It lacks operations that were acknowledged to whoever asks: its contents count as lost."""
    STATE_LOST = "state_lost"
    """It was meant for contents that are lost."""


@dataclass
class ReplicaState:
    """One seat.

    Attributes:
        role: What it does.
        term: How often another seat became the leading one, this one included.
        state_id: Names the contents: those that begin empty have another one.
        is_complete: Whether it has all of them.
        position: Which operations are in them.
    """

    role: ReplicaRole = ReplicaRole.EMPTY
    term: int = 0
    state_id: str = ""
    is_complete: bool = False
    position: Position = INITIAL_POSITION

    def decide(
        self,
        state_id: str,
        *,
        peer_unavailable: bool,
        required_position: Position = INITIAL_POSITION,
    ) -> RequestDecision:
        """Say what becomes of a request.

        Args:
            state_id: Whose contents it is meant for; "": any.
            peer_unavailable: Whoever asks found the other seat gone, or vacant.
            required_position: Up to where operations on these contents are known to be
                acknowledged.
        """
        if self.role is ReplicaRole.EMPTY or not self.is_complete:
            return RequestDecision.NO_STATE
        if state_id not in ("", self.state_id):
            return RequestDecision.STATE_LOST
        if self.role is ReplicaRole.FOLLOWER and not peer_unavailable:
            return RequestDecision.NOT_LEADER
        if state_id and not has_reached(self.position, required_position):
            return RequestDecision.STALE_STATE
        if self.role is ReplicaRole.LEADER:
            return RequestDecision.EXECUTE
        self.role = ReplicaRole.LEADER
        self.term += 1
        return RequestDecision.TAKE_OVER

    def become_leader(self, state_id: str) -> None:
        """Lead new contents, which the other seat has agreed to follow."""
        self.role, self.term, self.state_id, self.is_complete = (
            ReplicaRole.LEADER,
            1,
            state_id,
            True,
        )
        self.position = INITIAL_POSITION

    def advance_position(self, replica_index: int, count: int) -> None:
        """Take note that this seat, the first or second one, has carried out operations."""
        first, second = self.position
        self.position = (first, second + count) if replica_index else (first + count, second)

    def become_follower(
        self, term: int, state_id: str, position: Position = INITIAL_POSITION
    ) -> bool:
        """Give up what there is, and follow a leading seat; False: it does not lead any more."""
        if self.role is not ReplicaRole.EMPTY and self.is_complete:
            least = self.term + (self.role is ReplicaRole.LEADER)
            if state_id != self.state_id or term < least:
                return False
        self.role, self.term, self.state_id, self.is_complete = (
            ReplicaRole.FOLLOWER,
            term,
            state_id,
            False,
        )
        self.position = position
        return True

    def outranks(self, term: int, state_id: str) -> bool:
        """Whether it leads, and follows no seat of this epoch."""
        is_later = state_id == self.state_id and term > self.term
        return self.role is ReplicaRole.LEADER and not is_later

    def is_following(self, term: int, state_id: str) -> bool:
        """Whether it follows a leading seat."""
        return self.role is ReplicaRole.FOLLOWER and (self.term, self.state_id) == (term, state_id)

    def discard_state(self) -> None:
        """Have nothing any more."""
        self.role, self.is_complete, self.position = ReplicaRole.EMPTY, False, INITIAL_POSITION
