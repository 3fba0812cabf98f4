"""Rounds: whose turn each is. Every consumer finds the same, from what the dispatcher journals.

A task numbers its rounds from 0; the rounds of an iteration are those of its tasks in turn. Whose
turn it is depends on three things alone, which are the same for all consumers: in which round each
task joined, in which order, and how many rounds it gave until it ended or was lost.

Rule 1. Tasks stand in a ring, in the order in which they joined; each gives its next round, then it
        is the turn of the one after it.
Rule 2. A task joins with the round `starting_round`. No consumer goes beyond the *horizon*, up to
        which the dispatcher has said which tasks there are; tasks that come later join there.
Rule 3. A task that is over, which shows when its turn comes, leaves the ring.
Rule 4. Where the ring is empty, the next round is the one with which the next task joins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Rounds"]


@dataclass
class _Ring:
    """Where the rounds stand."""

    round: int = 0
    """Number of the next one."""
    members: list[int] = field(default_factory=list)
    turn: int = 0
    """Whose turn it is, as a place in `members`; after the last one: the first's."""
    taken: dict[int, int] = field(default_factory=dict)
    """Task -> how many rounds it gave."""
    joining: list[tuple[int, int]] = field(default_factory=list)
    """Tasks that have not joined: (starting round, task), in this order."""

    def copy(self) -> _Ring:
        """Return another one that stands where this one does."""
        return _Ring(self.round, [*self.members], self.turn, {**self.taken}, [*self.joining])


class Rounds:
    """The turns of one iteration's tasks."""

    def __init__(self) -> None:
        self.horizon: float = 0
        """The first round of which it is not known which tasks there are."""
        self._ring = _Ring()
        #: Task -> how many rounds it gives in all, where that is known.
        self._lengths: dict[int, int] = {}
        self._known: set[int] = set()

    # --- what becomes known ---------------------------------------------------------------------

    def add(self, task_id: int, starting_round: int) -> None:
        """Take note of a task. May be said twice."""
        if task_id not in self._known:
            self._known.add(task_id)
            self._ring.joining.append((starting_round, task_id))
            self._ring.joining.sort()

    def extend(self, horizon: float) -> None:
        """Take note up to which round it is known which tasks there are."""
        self.horizon = max(self.horizon, horizon)

    def end(self, task_id: int, rounds: int) -> None:
        """Take note that a task gives so many rounds in all."""
        self._lengths.setdefault(task_id, rounds)

    # --- what follows ---------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the next round."""
        return self._ring.round

    @property
    def reached(self) -> int | None:
        """The round that comes next as far as is known, be it beyond the horizon; None: no task."""
        ring = self._ring
        if self.next() is None and not ring.members:
            return ring.joining[0][0] if ring.joining else None
        return ring.round

    def is_known_to_end(self, task_id: int) -> bool:
        """Whether it is known how many rounds a task gives in all."""
        return task_id in self._lengths

    def next(self) -> tuple[int, int] | None:
        """Return the task whose turn it is, and which of its rounds; None: nobody's, as yet."""
        return self._settle(self._ring)

    def take(self) -> None:
        """Take the next round."""
        found = self._settle(self._ring)
        assert found is not None, "nobody's turn"
        _pass_on(self._ring)

    def upcoming(self, limit: int) -> list[tuple[int, int]]:
        """Return the next rounds, as far as that is known: tasks, and which of their rounds."""
        ring = self._ring.copy()
        found: list[tuple[int, int]] = []
        while len(found) < limit and (due := self._settle(ring)) is not None:
            found.append(due)
            _pass_on(ring)
        return found

    def _settle(self, ring: _Ring) -> tuple[int, int] | None:
        """Let tasks join and leave until it is known whose turn it is."""
        while ring.round < self.horizon:
            while ring.joining and ring.joining[0][0] <= ring.round:
                ring.members.append(ring.joining.pop(0)[1])
            if not ring.members:
                ring.turn = 0
                if not (ring.joining and ring.joining[0][0] < self.horizon):
                    return None
                ring.round = ring.joining[0][0]
                continue
            if ring.turn >= len(ring.members):
                # Not before those who joined had their turn after the last one: to some consumers
                # it is not known that this one was followed by another, which gave no round.
                ring.turn = 0
            task_id = ring.members[ring.turn]
            taken = ring.taken.get(task_id, 0)
            if taken < self._lengths.get(task_id, math.inf):
                return task_id, taken
            del ring.members[ring.turn]
        return None


def _pass_on(ring: _Ring) -> None:
    task_id = ring.members[ring.turn]
    ring.taken[task_id] = ring.taken.get(task_id, 0) + 1
    ring.round += 1
    ring.turn += 1
