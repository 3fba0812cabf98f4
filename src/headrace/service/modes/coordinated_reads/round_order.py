"""Order of rounds: determines the task of each round, identically for all consumers.

A task numbers its rounds from 0; the rounds of an iteration are those of its tasks in turn. The
order depends on three facts only, which the dispatcher journals: the round at which each task
joined, the order in which they joined, and the number of rounds each had delivered when it ended or
was lost.

Rule 1. Tasks form a ring in the order in which they joined; each delivers its next round, then the
    next task has its turn.
Rule 2. A task joins with the round `starting_round`. No consumer passes the *horizon*: the
    dispatcher has announced all tasks that join before it; later tasks join there.
Rule 3. A task without further rounds leaves the ring when its turn comes.
Rule 4. If the ring is empty, the order continues at the `starting_round` of the next task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["RoundOrder"]


@dataclass
class _Ring:
    """Position in the order of rounds."""

    next_round: int = 0
    """Number of the next round."""
    members: list[int] = field(default_factory=list)
    next_member: int = 0
    """Index in `members` of the task whose turn it is; after the last one, the first follows."""
    rounds_taken: dict[int, int] = field(default_factory=dict)
    """Number of rounds each task has delivered, by task."""
    joining: list[tuple[int, int]] = field(default_factory=list)
    """Tasks that have not joined, as sorted pairs (starting round, task)."""

    def copy(self) -> _Ring:
        """Return a copy."""
        return _Ring(
            self.next_round,
            [*self.members],
            self.next_member,
            {**self.rounds_taken},
            [*self.joining],
        )


class RoundOrder:
    """Turns of the tasks of one iteration."""

    def __init__(self) -> None:
        self.horizon: float = 0
        """First round whose tasks may not all be known."""
        self._ring = _Ring()
        #: Total number of rounds of each task, where known.
        self._round_counts: dict[int, int] = {}
        self._task_ids: set[int] = set()

    # --- inputs -----------------------------------------------------------------------------------

    def add_task(self, task_id: int, starting_round: int) -> None:
        """Add a task. Idempotent."""
        if task_id not in self._task_ids:
            self._task_ids.add(task_id)
            self._ring.joining.append((starting_round, task_id))
            self._ring.joining.sort()

    def extend_horizon(self, horizon: float) -> None:
        """Record that all tasks up to this round are known."""
        self.horizon = max(self.horizon, horizon)

    def set_round_count(self, task_id: int, rounds: int) -> None:
        """Record the total number of rounds of a task."""
        self._round_counts.setdefault(task_id, rounds)

    # --- results ----------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """Number of the next round."""
        return self._ring.next_round

    @property
    def furthest_round(self) -> int | None:
        """The next round as far as known, even if beyond the horizon; None without tasks."""
        ring = self._ring
        if self.next_turn() is None and not ring.members:
            return ring.joining[0][0] if ring.joining else None
        return ring.next_round

    def has_round_count(self, task_id: int) -> bool:
        """Return whether the total number of rounds of a task is known."""
        return task_id in self._round_counts

    def next_turn(self) -> tuple[int, int] | None:
        """Return the task of the next round and the task's round number; None if unknown."""
        return self._find_turn(self._ring)

    def advance(self) -> None:
        """Advance to the next round."""
        turn = self._find_turn(self._ring)
        assert turn is not None, "the next round has no task"
        _advance(self._ring)

    def upcoming(self, limit: int) -> list[tuple[int, int]]:
        """Return the next known rounds, as tasks and their round numbers."""
        ring = self._ring.copy()
        turns: list[tuple[int, int]] = []
        while len(turns) < limit and (turn := self._find_turn(ring)) is not None:
            turns.append(turn)
            _advance(ring)
        return turns

    def _find_turn(self, ring: _Ring) -> tuple[int, int] | None:
        """Let tasks join and leave until the task of the next round is known."""
        while ring.next_round < self.horizon:
            while ring.joining and ring.joining[0][0] <= ring.next_round:
                ring.members.append(ring.joining.pop(0)[1])
            if not ring.members:
                ring.next_member = 0
                if not (ring.joining and ring.joining[0][0] < self.horizon):
                    return None
                ring.next_round = ring.joining[0][0]
                continue
            if ring.next_member >= len(ring.members):
                # First, joining tasks have their turn after the last member: some consumers do not
                # know that another member followed, which delivered no round.
                ring.next_member = 0
            task_id = ring.members[ring.next_member]
            num_taken = ring.rounds_taken.get(task_id, 0)
            if num_taken < self._round_counts.get(task_id, math.inf):
                return task_id, num_taken
            del ring.members[ring.next_member]
        return None


def _advance(ring: _Ring) -> None:
    task_id = ring.members[ring.next_member]
    ring.rounds_taken[task_id] = ring.rounds_taken.get(task_id, 0) + 1
    ring.next_round += 1
    ring.next_member += 1
