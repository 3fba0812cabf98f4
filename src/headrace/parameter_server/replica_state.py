"""State machine of a store replica, and positions as version vectors. Pure.

    empty --LeadEmptyStore--> leader --a later term leads--> follower (incomplete, then complete)
    empty --FollowLeader--> follower --the leader is unavailable--> leader, in the next term

Rule 1. The leader executes operations, and replies to a write when the follower has it as well.
Rule 2. A complete follower becomes leader when a client reports that the leader is unavailable
        (`peer_unavailable`). It then rejects everything from the former leader.
Rule 3. A store starts empty only if both replicas are empty: the new leader asks the other first.
Rule 4. A replica with contents discards them only for a later term of the same state, or if they
        lack acknowledged operations.

A position is a version vector with one entry for each replica of a store: the number of operations,
without `ForgetWriteKeys`, that the replica executed as leader. Replicas that execute an operation
together count it together. So a replica contains everything that a position stands for if none of
its own entries is smaller, whatever pauses, takeovers and lost connections lie between.
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
    """Return whether a replica at `position` contains everything that `required` stands for."""
    return position[0] >= required[0] and position[1] >= required[1]


def merge_positions(first: Position, second: Position) -> Position:
    """Return the position of a replica that contains what both stand for."""
    return max(first[0], second[0]), max(first[1], second[1])


class AcknowledgedState(msgspec.Struct, frozen=True, array_like=True):
    """The highest acknowledged position of a store that one process knows.

    Attributes:
        state_id: Id of the state; "" if none is known.
        writes: Number of acknowledged writes.
        position: Acknowledged position.
    """

    state_id: str = ""
    writes: int = 0
    position: Position = INITIAL_POSITION

    def merge(self, other: AcknowledgedState) -> AcknowledgedState:
        """Return the combined knowledge about the same state."""
        return AcknowledgedState(
            self.state_id,
            max(self.writes, other.writes),
            merge_positions(self.position, other.position),
        )


REPLICA_TIMEOUT_SECONDS = 5.0
"""Seconds to wait for an unresponsive replica; a process that ended is detected at once."""


class ReplicaRole(Enum):
    """Role of a replica."""

    EMPTY = "empty"
    """Without contents: its process has just started, or it discarded them."""
    FOLLOWER = "follower"
    """Receives the leader's contents and operations."""
    LEADER = "leader"
    """Executes the requests of clients."""


class RequestDecision(Enum):
    """Decision about a client's request."""

    EXECUTE = "execute"
    """Execute it."""
    TAKE_OVER = "take_over"
    """Execute it; this replica leads from now on."""
    NOT_LEADER = "not_leader"
    """Refer the client to the other replica."""
    NO_STATE = "no_state"
    """Refer the client to the other replica: this one is empty."""
    STALE_STATE = "stale_state"
    """This replica lacks operations acknowledged to the client: its contents count as lost."""
    STATE_LOST = "state_lost"
    """The request was meant for a state that is lost."""


@dataclass
class ReplicaState:
    """State of one replica.

    Attributes:
        role: Current role.
        term: Number of the leadership period.
        state_id: Id of the contents; a store that starts empty gets a new one.
        is_complete: Whether it has all of the contents.
        position: Operations that the contents include.
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
        """Decide about a request; become leader if it asks for a takeover.

        Args:
            state_id: State that the request is meant for; "" accepts any.
            peer_unavailable: Whether the client found the other replica unreachable or empty.
            required_position: Acknowledged position of that state, as the client knows it.
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
        """Lead a new state, which the other replica has agreed to follow."""
        self.role, self.term, self.state_id, self.is_complete = (
            ReplicaRole.LEADER,
            1,
            state_id,
            True,
        )
        self.position = INITIAL_POSITION

    def advance_position(self, replica_index: int, count: int) -> None:
        """Record that replica 0 or 1 has executed `count` operations."""
        first, second = self.position
        self.position = (first, second + count) if replica_index else (first + count, second)

    def become_follower(
        self, term: int, state_id: str, position: Position = INITIAL_POSITION
    ) -> bool:
        """Discard the contents and follow a leader; return False if that one no longer leads."""
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
        """Return whether this replica leads and does not yield to a leader of this term."""
        is_later = state_id == self.state_id and term > self.term
        return self.role is ReplicaRole.LEADER and not is_later

    def is_following(self, term: int, state_id: str) -> bool:
        """Return whether this replica follows the leader of this term and state."""
        return self.role is ReplicaRole.FOLLOWER and (self.term, self.state_id) == (term, state_id)

    def discard_state(self) -> None:
        """Discard the contents."""
        self.role, self.is_complete, self.position = ReplicaRole.EMPTY, False, INITIAL_POSITION
