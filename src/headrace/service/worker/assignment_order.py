"""Assignment order: translates element ids from splits of the stream to the order of assignment.

The engine numbers splits by their index in the stream. Clients and the dispatcher number them in
the order in which the task received them. A split that is assigned to a task twice, because its
first part went to a departed client for example, has two numbers there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headrace.service.element_sets import ALL_ORDINALS, END_ORDINAL, ElementIdRun
from headrace.service.ranges import Ranges

__all__ = ["AssignmentOrder"]


_MIN_PRUNE_RUNS = 256


class AssignmentOrder:
    """Splits assigned to a task that ids may refer to, and their numbers in assignment order."""

    def __init__(self) -> None:
        self._num_assigned = 0
        #: Disjoint ascending runs (start, stop, number of the first split); and their starts.
        self._runs: list[tuple[int, int, int]] = []
        self._starts: list[int] = []
        #: Splits that were assigned in part or again: ordinals and number, latest first.
        self._reassigned: dict[int, list[tuple[Ranges, int]]] = {}
        #: Number of runs above which unneeded ones are removed.
        self._prune_above = _MIN_PRUNE_RUNS

    def assign(self, start: int, stop: int, ordinals: Ranges = ()) -> None:
        """Record the next assignment; `ordinals`, if not empty, restricts it to part of a split."""
        index = bisect_right(self._starts, start)
        is_new = not ordinals
        is_new = is_new and (not index or self._runs[index - 1][1] <= start)
        is_new = is_new and (index == len(self._runs) or stop <= self._runs[index][0])
        if is_new:
            self._runs.insert(index, (start, stop, self._num_assigned))
            self._starts.insert(index, start)
        else:
            for split in range(start, stop):
                number = self._num_assigned + split - start
                self._reassigned.setdefault(split, []).insert(0, (ordinals or ALL_ORDINALS, number))
        self._num_assigned += stop - start

    def forget(self, completed: int) -> None:
        """Drop splits before number `completed`: no elements or ends of them will follow.

        An iteration may be infinite, and its assignments grow.
        """
        if len(self._runs) + len(self._reassigned) < self._prune_above:
            return
        self._runs = [run for run in self._runs if run[2] + run[1] - run[0] > completed]
        self._starts = [run[0] for run in self._runs]
        remaining = {
            split: [each for each in assignments if each[1] >= completed]
            for split, assignments in self._reassigned.items()
        }
        self._reassigned = {
            split: assignments for split, assignments in remaining.items() if assignments
        }
        self._prune_above = max(_MIN_PRUNE_RUNS, 2 * (len(self._runs) + len(self._reassigned)))

    def element_ids(
        self, runs: Iterable[ElementIdRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[ElementIdRun, ...]:
        """Return element ids in assignment order.

        Args:
            runs: Element ids by split of the stream.
            ended: Ends of splits as (split, number of splits, elements per split); splits that were
                forgotten are left out.
        """
        found: list[ElementIdRun] = []
        end_runs = (
            (split, num_splits, elements, END_ORDINAL - elements)
            for split, num_splits, elements in ended
        )
        known: dict[int, int] = {}  # interleaved splits occur repeatedly
        start, stop, newest = self._runs[-1] if self._runs and not self._reassigned else (0, 0, 0)
        for split, num_splits, first, number in (*runs, *end_runs):
            if start <= split and split + num_splits <= stop:  # usual case: the latest assignment
                found.append((newest + split - start, num_splits, first, number))
                continue
            if num_splits == 1 and (known_number := known.get(split)) is not None:
                found.append((known_number, 1, first, number))
                continue
            while num_splits:
                assigned_number, length = self._locate(split, num_splits, first)
                if assigned_number is not None:
                    found.append((assigned_number, length, first, number))
                    if length == 1 and split not in self._reassigned:
                        known[split] = assigned_number
                else:
                    assert first + number == END_ORDINAL, (
                        f"split {split} has ended, but yields elements"
                    )
                split, num_splits = split + length, num_splits - length
        return tuple(found)

    def _locate(self, split: int, num_splits: int, ordinal: int) -> tuple[int | None, int]:
        """Return the number of the split that this ordinal belongs to, and the run length.

        The number is None if the splits were forgotten.
        """
        for ordinals, number in self._reassigned.get(split, ()):
            if any(start <= ordinal < stop for start, stop in ordinals):
                return number, 1
        index = bisect_right(self._starts, split) - 1
        if index < 0 or split >= self._runs[index][1]:
            if split in self._reassigned:
                # Only for a partly assigned split, an unassigned ordinal can be mentioned: the rest
                # after its end.
                return self._reassigned[split][0][1], 1
            is_last = self._reassigned or index + 1 == len(self._starts)
            return None, 1 if is_last else min(num_splits, self._starts[index + 1] - split)
        start, stop, first = self._runs[index]
        length = min(num_splits, stop - split)
        if self._reassigned:
            length = next((n for n in range(1, length) if split + n in self._reassigned), length)
        return first + split - start, length
