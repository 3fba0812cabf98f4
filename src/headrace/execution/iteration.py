"""Numbers of the iterations over jobs that several clients share.

A job's iteration has a number, and all clients that open the same number share its elements. So the
number belongs to the dataset that `distribute` returned, and not to what is derived from it: a
counter in the source counts how often it was opened, by whichever dataset.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence

from headrace.errors import FailedPreconditionError
from headrace.forks import in_each_child
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.traverse import fold, walk

__all__ = [
    "Iteration",
    "check_meetings",
    "counters_of",
    "meets_others",
    "next_iteration",
    "with_occurrences",
]

_MOST_NESTED = 1024
"""Openings of one source by functions that an iteration remembers; the oldest are forgotten."""

_lock = threading.Lock()


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


in_each_child(_unlock)


class Iteration:
    """One iteration over a plan, and the number that shared jobs know it by.

    The number is drawn when it is first asked for: an iterator that is restored before it reads
    uses up none. Every step is idempotent, so an interruption skips no number.

    Args:
        plan: The plan; None: one without sources that count.
        least: Numbers below it are not used.
    """

    def __init__(self, plan: Node | None = None, least: int = 0) -> None:
        self._counters = Counter[IterationCounter]() if plan is None else counters_of(plan)
        self._number = least
        self._is_drawn = self._is_counted = False
        #: By source, and by where it was opened, the numbers of those that functions opened.
        self._nested: weakref.WeakKeyDictionary[
            IterationCounter, OrderedDict[tuple[int, ...], int]
        ] = weakref.WeakKeyDictionary()

    @property
    def number(self) -> int:
        """The number of this iteration."""
        if not self._is_counted:
            with _lock:
                if not self._is_drawn:
                    self._number = _next(self._counters, self._number)
                    self._is_drawn = True
                self._count()
        return self._number

    def resume(self, number: int) -> None:
        """Make this the iteration of that number, which a saved state is of."""
        with _lock:
            self._number, self._is_drawn = number, True
            self._count()
            for counter in self._counters:
                counter.note_restored(number)

    def _count(self) -> None:
        for counter, occurrences in self._counters.items():
            counter.advance(self._number + occurrences - 1)
        self._is_counted = True

    def nested(self, counter: IterationCounter, opened_at: Sequence[int], least: int) -> int:
        """Return the number for a source in a dataset that a function returned.

        Args:
            counter: That of the source.
            opened_at: Where in this iteration it is opened: opened there again, as after an
                interruption, it has the same number.
            least: Numbers below it are not used.
        """
        with _lock:
            known = self._nested.setdefault(counter, OrderedDict())
            number = known.setdefault(tuple(opened_at), max(least, counter.next))
            counter.advance(number)
            if len(known) > _MOST_NESTED:
                known.popitem(last=False)
            return number


def check_meetings(plan: Node) -> None:
    """Refuse a plan that reads in turn what waits for each other.

    Raises:
        FailedPreconditionError: The first of several consumers of a job would wait for the second
            forever.
    """
    sources = (node.source for node in walk(plan) if isinstance(node, FromSource))
    jobs = Counter(source.meets_in for source in sources if source.meets_in)
    for job, count in jobs.items():
        if count > 1:
            raise FailedPreconditionError(
                f"the dataset reads {count} consumers of job {job!r} in turn, and consumers wait "
                "for each other: the first would wait for the second forever. Use "
                "Dataset.range(n).interleave(consumer, cycle_length=n, num_parallel_calls=n), or a "
                "thread or process for each consumer"
            )


def meets_others(plan: Node) -> bool:
    """Say whether elements of a plan wait for those that other readers take."""
    return any(isinstance(node, FromSource) and node.source.meets_in for node in walk(plan))


def next_iteration(plan: Node, least: int = 0) -> int:
    """Return the number that the next iteration over a plan will have."""
    return _next(counters_of(plan), least)


def with_occurrences(plan: Node) -> Node:
    """Return the plan with a number for each of several places of a source that counts.

    `Dataset.zip(ds, ds)` opens the source twice, and each opening is an iteration of its own.
    """
    if all(count == 1 for count in counters_of(plan).values()):
        return plan
    seen = Counter[IterationCounter]()

    def numbered(node: Node, inputs: list[Node]) -> Node:
        made = node.over(inputs)
        if not isinstance(made, FromSource) or made.source.counter is None:
            return made
        occurrence = seen[made.source.counter]
        seen[made.source.counter] += 1
        if not occurrence:
            return made
        return dataclasses.replace(made, source=made.source.at_occurrence(occurrence))

    return fold(plan, numbered)


def counters_of(plan: Node) -> Counter[IterationCounter]:
    """Return the counters of a plan's sources, and how many times each source stands in it."""
    sources = (node.source for node in walk(plan) if isinstance(node, FromSource))
    return Counter(source.counter for source in sources if source.counter is not None)


def _next(counters: Counter[IterationCounter], least: int) -> int:
    return max([least, *(counter.next for counter in counters)])
