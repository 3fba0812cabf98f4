"""What the iterators of one plan share: chance, options, its iteration, where units come from."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.execution.dealer import Dealer
from headrace.forks import in_each_child
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.source import Source
from headrace.plan.traverse import fold, walk

__all__ = [
    "Context",
    "GivesWholeUnits",
    "Iteration",
    "UnitReader",
    "UnitSource",
    "check_meetings",
    "counters_of",
    "meets_others",
    "next_iteration",
    "with_occurrences",
]

# --- Numbers of the iterations over jobs that several clients share -------------------------------
#
# A job's iteration has a number, and all clients that open the same number share its elements. So
# the number belongs to the dataset that `distribute` returned, and not to what is derived from it:
# a counter in the source counts how often it was opened, by whichever dataset.

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


# --- Where the client's half of a plan gets the elements of units from: the contract --------------
#
# Rule 1. A reader gives the elements of one unit in order, each with its origin (`chunk.places`, as
#         `element.places.named` makes it), and with its place if the half of the plan wants that
#         (`Cut.wants_places`). Ordinals that are missing were left out by filters, or failed. An
#         error that it raises has its origin (`origins`).
# Rule 2. After the end it says how many elements the unit had at the root, those left out too.
# Rule 3. Units are opened in any order, several at once, and perhaps the same one again.


class UnitReader(Protocol):
    """Reads the elements of one unit, in order."""

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, with origins; None at the end.

        An element that fails raises when its turn comes; the next call goes on after it.
        """

    @property
    def elements(self) -> int:
        """How many elements the unit had at the root. Asked for after the end alone."""

    def close(self) -> None:
        """Let go of it. May be called twice."""


class UnitSource(Protocol):
    """Opens units of a plan's lower half."""

    def open(self, unit: int, first: int) -> UnitReader:
        """Return a reader of a unit from an ordinal on.

        Args:
            unit: Its number in the stream of the plan.
            first: Nothing before this ordinal has failed that was raised, and all of it was read.
                The error of the element before it may come again.
        """


@runtime_checkable
class GivesWholeUnits(Protocol):
    """A source of units that may have many small ones at hand."""

    def whole(self, unit: int, most: int, limit: int) -> tuple[Chunk, int] | None:
        """Return units in a row, each whole and with as many elements, which are read with that.

        Args:
            unit: The first.
            most: The most units.
            limit: The most elements.

        Returns:
            The elements, at least one of each, and how many units they are of; None: open the unit.
        """


# --- The context of a node ------------------------------------------------------------------------


def _as_it_is(node: Node, iterator: Any) -> Any:
    return iterator


@dataclass(frozen=True, kw_only=True)
class Context:
    """The circumstances in which a node's iterator is made."""

    build: Callable[[Node, Context], Any]
    """Makes the iterator of a dataset that a user's function returned, from its plan as written,
    in the context that `nested` gives."""
    watch: Callable[[Node, Any], Any] = field(default=_as_it_is)
    """Returns what stands in the place of a node's iterator (`iterator.Watched`)."""
    seed: int
    """What random steps without a seed of their own draw from."""
    passes: tuple[int, ...] = (0,)
    """Which pass this is: the user's iteration, then that of each `repeat` around the node; in a
    nested dataset also the number of the outer element's place."""
    repetitions: tuple[int, ...] = ()
    """The numbers in `passes` that are those of a `repeat`."""
    job_passes: tuple[int, ...] | None = None
    """`passes` as shared jobs know them; None: the same. A cache makes its first pass in each, but
    a job's iteration can be read only once."""
    iteration: Iteration = field(default_factory=Iteration)
    """Numbers what datasets that functions return read of shared jobs."""
    outer_passes: int = 0
    """How many of `passes` a nested dataset was opened with; those of its own repeats follow."""
    outer: tuple[int, ...] = ()
    """Numbers of the steps that opened this dataset, outermost first; () for the plan itself."""
    places: tuple[int, ...] = ()
    """Numbers of the places of the outer elements that it was opened for, outermost first."""
    wants_places: bool = False
    """Whether chunks are to carry the numbers of their elements' places (`places`): a step above
    opens datasets for the elements."""
    names_units: bool = False
    """Whether places are to say which dealt unit they are of: a root above counts them."""
    options: Options = field(default_factory=Options)
    """The options of the whole plan."""
    free: frozenset[int] = frozenset()
    """`id` of each step that yields elements as they are ready (`plan.determinism`)."""
    dealer: Dealer | None = None
    """Deals units of the plan to its leaves; None: they are read whole."""
    unit_source: UnitSource | None = None
    """Where elements come from that the other half of the plan makes."""
    units_have_places: bool = False
    """Whether what comes from there has places, for some step opens datasets for it."""
    lending: frozenset[int] = frozenset()
    """`id` of each step that may lend what it keeps: its elements are only read
    (`plan.traverse`)."""
    parts_passes: bool = False
    """Whether a chunk of numbers that are repeated ends with a pass: rows in order are lent."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """`id` of a leaf node -> its number in the deal."""
    cache_seeds: dict[Any, int] = field(default_factory=dict)
    """Key of a cache -> the seed of the elements that it has in this iteration, once decided: in
    all passes the same."""
    fills_cache: bool = False
    """Whether a cache is filled: caches below have the elements of this context's seed, too."""
    contain_exits: bool = False
    """Whether KeyboardInterrupt, SystemExit and the like from a user's function become a
    UserFunctionError."""
    parallelism: int = 2
    """Threads that AUTOTUNE stands for."""

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at what passes, so that each step is to have an iterator."""
        return self.watch is not _as_it_is

    def in_pass(self, number: int) -> Context:
        """Return the context of pass `number` within this one."""
        job_passes = None if self.job_passes is None else (*self.job_passes, number)
        return self._with(
            passes=(*self.passes, number),
            repetitions=(*self.repetitions, number),
            job_passes=job_passes,
        )

    def in_first_pass(self) -> Context:
        """Return the context of the first pass, whichever this is; shared jobs go on."""
        return self._with(passes=(0,) * len(self.passes), job_passes=self.job_passes or self.passes)

    def pass_over(self, source: Source) -> tuple[int, ...]:
        """Return the pass number that a source is to be opened with.

        Readers of one shared job agree on it wherever they stand in a plan: so the place of the
        outer element, which tells nested datasets apart, is no part of it there.
        """
        if source.counter is None:
            return self.passes
        first, *repetitions = self.job_passes or self.passes
        if not self.outer:
            return (first + source.occurrence, *repetitions)
        opened_at = (*self.passes[: self.outer_passes], source.occurrence)
        return (self.iteration.nested(source.counter, opened_at, first), *self.repetitions)

    def with_places(self, wanted: bool) -> Context:
        """Return the context in which chunks carry the places of their elements, or do not."""
        if wanted == self.wants_places:
            return self
        return self._with(wants_places=wanted)

    def with_passes_apart(self) -> Context:
        """Return the context in which chunks of numbers end with their pass."""
        return self._with(parts_passes=True)

    def nested(self, step: int, place: int) -> Context:
        """Return the context of a dataset that step number `step` opens for the element there."""
        return self._with(
            passes=(*self.passes, place),
            outer_passes=len(self.passes) + 1,
            outer=(*self.outer, step),
            places=(*self.places, place),
            free=_NONE,
            lending=_NONE,
            dealer=None,
            names_units=False,
            unit_source=None,
            leaves={},
            cache_seeds={},
        )

    def _with(self, **changes: Any) -> Context:
        # Without the checks of `replace`: there may be a pass, or a dataset, for each element.
        context = object.__new__(Context)
        context.__dict__.update(self.__dict__, **changes)
        return context

    def entropy(self, number: int | None) -> list[int]:
        """Return what step `number` of this dataset draws from, if it has no seed of its own."""
        path = (*self.outer, number or 0)
        return [2, self.seed & _MASK, len(path), *path, *self.passes]

    def iteration_entropy(self, number: int) -> list[int]:
        """Return what number `number` draws from, if it draws the same in all repetitions."""
        path = (*self.outer, number)
        passes = self.passes[: max(self.outer_passes, 1)]
        return [4, self.seed & _MASK, len(path), *path, *passes]

    def fixed_entropy(self, number: int | None, drawn_seed: int | None) -> list[int]:
        """Return what step `number` draws from, if it is to draw the same in each pass.

        Args:
            number: Of a step without a seed of its own.
            drawn_seed: What was drawn for it when it was made. A nested dataset is made for each
                outer element, so there the place of that element decides.
        """
        if not self.outer and drawn_seed is not None:
            return [3, drawn_seed & _MASK]
        path = (*self.outer, number or 0)
        return [3, self.seed & _MASK, len(path), *path, *self.places]

    def threads(self, calls: int) -> int:
        """Return the number of threads that `num_parallel_calls` asks for."""
        return self.parallelism if calls < 0 else calls


_NONE: frozenset[int] = frozenset()
_MASK = (1 << 64) - 1
