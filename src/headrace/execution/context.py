"""Shared context of a plan's iterators: entropy, options, iteration, source of splits."""

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
from headrace.execution.error_counter import ErrorCounter
from headrace.execution.split_provider import SplitProvider
from headrace.forks import call_in_children
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.source import Source
from headrace.plan.traverse import fold, walk

__all__ = [
    "Context",
    "PlanIteration",
    "SplitReader",
    "SplitSource",
    "WholeSplitSource",
    "check_coordinated_readers",
    "count_counters",
    "next_iteration_number",
    "number_occurrences",
    "reads_coordinated_job",
]

# --- Iteration numbers of jobs shared by several clients ------------------------------------------
#
# All clients that open the same iteration number of a job share its elements. So the number belongs
# to the dataset that `distribute` returned, and not to datasets derived from it: a counter in the
# source counts how often it was opened, by any dataset.

_MAX_NESTED = 1024
"""Number of nested openings of a source that an iteration remembers; older ones are forgotten."""

_lock = threading.Lock()


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


call_in_children(_unlock)


class PlanIteration:
    """One iteration over a plan, and its number in shared jobs.

    The number is drawn on first use: an iterator that is restored before it reads uses none. Every
    step is idempotent, so an interruption skips no number.

    Args:
        plan: The plan, or None for one whose sources have no iteration counter.
        minimum: Smallest number to use.
    """

    def __init__(self, plan: Node | None = None, minimum: int = 0) -> None:
        self._counters = Counter[IterationCounter]() if plan is None else count_counters(plan)
        self._number = minimum
        self._is_drawn = self._is_counted = False
        #: Numbers of the sources opened by functions, by counter and by where they were opened.
        self._nested_numbers: weakref.WeakKeyDictionary[
            IterationCounter, OrderedDict[tuple[int, ...], int]
        ] = weakref.WeakKeyDictionary()

    @property
    def number(self) -> int:
        """The number of this iteration."""
        if not self._is_counted:
            with _lock:
                if not self._is_drawn:
                    self._number = _next_number(self._counters, self._number)
                    self._is_drawn = True
                self._advance_counters()
        return self._number

    def resume_at(self, number: int) -> None:
        """Set the number of this iteration to that of a saved state."""
        with _lock:
            self._number, self._is_drawn = number, True
            self._advance_counters()
            for counter in self._counters:
                counter.note_restored(number)

    def _advance_counters(self) -> None:
        for counter, occurrences in self._counters.items():
            counter.advance(self._number + occurrences - 1)
        self._is_counted = True

    def number_nested(
        self, counter: IterationCounter, opened_at: Sequence[int], minimum: int
    ) -> int:
        """Return the number for a source in a dataset that a function returned.

        Args:
            counter: Counter of the source.
            opened_at: Where in this iteration it is opened. Opened there again, for example after
                an interruption, it gets the same number.
            minimum: Smallest number to use.
        """
        with _lock:
            numbers = self._nested_numbers.setdefault(counter, OrderedDict())
            number = numbers.setdefault(tuple(opened_at), max(minimum, counter.next))
            counter.advance(number)
            if len(numbers) > _MAX_NESTED:
                numbers.popitem(last=False)
            return number


def check_coordinated_readers(plan: Node) -> None:
    """Reject a plan that reads several consumers of one coordinated job in turn.

    Raises:
        FailedPreconditionError: If the first consumer would wait for the second forever.
    """
    sources = (node.source for node in walk(plan) if isinstance(node, FromSource))
    jobs = Counter(source.coordinated_job for source in sources if source.coordinated_job)
    for job, count in jobs.items():
        if count > 1:
            raise FailedPreconditionError(
                f"the dataset reads {count} consumers of job {job!r} one after the other, but "
                "consumers wait for each other, so the first would block forever. Use "
                "Dataset.range(n).interleave(consumer, cycle_length=n, num_parallel_calls=n), "
                "or a thread or process for each consumer"
            )


def reads_coordinated_job(plan: Node) -> bool:
    """Return whether reading the plan waits for other consumers of a coordinated job."""
    if isinstance(plan, FromSource):  # as in most nested datasets
        return bool(plan.source.coordinated_job)
    return any(isinstance(node, FromSource) and node.source.coordinated_job for node in walk(plan))


def next_iteration_number(plan: Node, minimum: int = 0) -> int:
    """Return the number that the next iteration over a plan will have."""
    return _next_number(count_counters(plan), minimum)


def number_occurrences(plan: Node) -> Node:
    """Return the plan with numbered occurrences of sources that occur several times.

    `Dataset.zip(ds, ds)` opens the source twice, and each opening is a separate iteration.
    """
    if all(count == 1 for count in count_counters(plan).values()):
        return plan
    seen = Counter[IterationCounter]()

    def number_source(node: Node, inputs: list[Node]) -> Node:
        result = node.with_inputs(inputs)
        if not isinstance(result, FromSource) or result.source.counter is None:
            return result
        occurrence = seen[result.source.counter]
        seen[result.source.counter] += 1
        if not occurrence:
            return result
        return dataclasses.replace(result, source=result.source.with_occurrence(occurrence))

    return fold(plan, number_source)


def count_counters(plan: Node) -> Counter[IterationCounter]:
    """Return the counters of a plan's sources, with the number of occurrences of each source."""
    sources = (node.source for node in walk(plan) if isinstance(node, FromSource))
    return Counter(source.counter for source in sources if source.counter is not None)


def _next_number(counters: Counter[IterationCounter], minimum: int) -> int:
    return max([minimum, *(counter.next for counter in counters)])


# --- Interface of the client stage to the elements of splits --------------------------------------
#
# Rule 1. A reader returns the elements of one split in order, each with its element id
#         (`chunk.metadata`, made by `element.metadata.id_column`), and with its element number if
#         the client stage needs it (`PlanPartition.wants_element_numbers`). Missing ordinals were
#         dropped by filters or failed. Errors carry their position (`element_ids`).
# Rule 2. After the end it returns the number of elements of the split at the partition boundary,
#         including dropped ones.
# Rule 3. Splits are opened in any order, several at a time, and possibly repeatedly.


class SplitReader(Protocol):
    """Reads the elements of one split, in order."""

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, with element ids; None at the end.

        An element that fails raises its error in turn; the next call continues after it.
        """

    @property
    def num_elements(self) -> int:
        """Number of elements of the split at the partition boundary; valid only after the end."""

    def close(self) -> None:
        """Close the reader. Idempotent."""


class SplitSource(Protocol):
    """Opens splits of a plan's worker stage."""

    def open(self, split: int, first_ordinal: int) -> SplitReader:
        """Return a reader of a split from an ordinal on.

        Args:
            split: Split index.
            first_ordinal: All elements and errors before this ordinal were read. The error of the
                element just before it may be raised again.
        """


@runtime_checkable
class WholeSplitSource(Protocol):
    """A source of splits that can return many small splits at once."""

    def read_whole_splits(
        self, split: int, max_splits: int, limit: int
    ) -> tuple[Chunk, int] | None:
        """Return consecutive whole splits with the same number of elements; they count as read.

        Args:
            split: Index of the first split.
            max_splits: Maximum number of splits.
            limit: Maximum number of elements.

        Returns:
            The elements, at least one of each split, and the number of splits; None if the split
            has to be opened.
        """


# --- The context of a node ------------------------------------------------------------------------


def _not_instrumented(node: Node, iterator: Any) -> Any:
    return iterator


@dataclass(frozen=True, kw_only=True)
class Context:
    """The context in which a node's iterator is made."""

    build: Callable[[Node, Context], Any]
    """Makes the iterator of a dataset that a user's function returned.

    Takes its plan as written, and the context that `nested` returns.
    """
    instrument: Callable[[Node, Any], Any] = field(default=_not_instrumented)
    """Returns the replacement of a node's iterator (`iterator.InstrumentedIterator`)."""
    seed: int
    """Seed of random steps that have none."""
    epochs: tuple[int, ...] = (0,)
    """Epoch numbers: of the user's iteration, then of each `repeat` around the node.

    In a nested dataset also the element number of the outer element.
    """
    repeat_epochs: tuple[int, ...] = ()
    """The numbers in `epochs` that come from a `repeat`."""
    job_epochs: tuple[int, ...] | None = None
    """`epochs` for shared jobs; None if they are the same.

    A cache uses its first epoch in every epoch, but a job's iteration can be read only once.
    """
    iteration: PlanIteration = field(default_factory=PlanIteration)
    """Numbers the iterations of shared jobs that nested datasets read."""
    num_outer_epochs: int = 0
    """Length of `epochs` when a nested dataset was opened; its own repeats append to it."""
    outer_steps: tuple[int, ...] = ()
    """Numbers of the steps that opened this dataset, outermost first; () for the plan itself."""
    outer_numbers: tuple[int, ...] = ()
    """Element numbers of the outer elements that opened the dataset, outermost first."""
    wants_element_numbers: bool = False
    """Whether chunks carry element numbers (`element_numbers`): a step above opens datasets for
    the elements."""
    is_whole_pipeline: bool = True
    """Whether steps that join streams are not repeated in a client stage, as in ordered modes."""
    tracks_splits: bool = False
    """Whether metadata contains the split, because a partition boundary above counts it."""
    options: Options = field(default_factory=Options)
    """The options of the whole plan."""
    unordered_steps: frozenset[int] = frozenset()
    """`id` of each unordered step (`plan.determinism`)."""
    split_provider: SplitProvider | None = None
    """Provides the splits that the plan's leaves read; None reads everything."""
    split_source: SplitSource | None = None
    """Source of the elements computed by the worker stage."""
    splits_have_numbers: bool = False
    """Whether `split_source` supplies element numbers, for a step that opens nested datasets."""
    borrowing_steps: frozenset[int] = frozenset()
    """`id` of each step that may return borrowed buffers, because its elements are only read
    (`plan.traverse`).
    """
    aligns_chunks_to_epochs: bool = False
    """Whether chunks of repeated index plans end with an epoch, so that rows can be borrowed."""
    leaf_numbers: Mapping[int, int] = field(default_factory=dict)
    """Number of each leaf in the split space, by the leaf's `id`."""
    cache_seeds: dict[Any, int] = field(default_factory=dict)
    """Seed of the cached elements by cache key, once decided; the same in all epochs."""
    fills_cache: bool = False
    """Whether a cache is being filled; caches below then also use this context's seed."""
    contain_exits: bool = False
    """Whether KeyboardInterrupt, SystemExit and the like from a user's function become a
    UserFunctionError."""
    ignored_errors: ErrorCounter = field(default_factory=ErrorCounter)
    """Counts the elements that `ignore_errors` drops."""
    parallelism: int = 2
    """Number of processor cores, for AUTOTUNE."""

    @property
    def is_instrumented(self) -> bool:
        """Whether iterators are instrumented, so that each step needs its own."""
        return self.instrument is not _not_instrumented

    def in_epoch(self, number: int) -> Context:
        """Return the context of epoch `number` within this one."""
        job_epochs = None if self.job_epochs is None else (*self.job_epochs, number)
        return self._replace_fields(
            epochs=(*self.epochs, number),
            repeat_epochs=(*self.repeat_epochs, number),
            job_epochs=job_epochs,
        )

    def outside_repeats(self, count: int) -> tuple[Context, tuple[int, ...]]:
        """Return the context outside the innermost `count` repeats, and their epoch numbers."""
        if not count:
            return self, ()
        outer, inner = self.epochs[:-count], self.epochs[-count:]
        return self._replace_fields(epochs=outer), inner

    def in_first_epoch(self) -> Context:
        """Return the context of the first epoch; shared jobs keep their epochs."""
        return self._replace_fields(
            epochs=(0,) * len(self.epochs), job_epochs=self.job_epochs or self.epochs
        )

    def source_epochs(self, source: Source) -> tuple[int, ...]:
        """Return the epoch numbers for opening a source.

        Readers of one shared job must agree on them wherever the source occurs in a plan. So the
        number of the outer element, which distinguishes nested datasets, is not included for shared
        jobs.
        """
        if source.counter is None:
            return self.epochs
        first, *repeat_epochs = self.job_epochs or self.epochs
        if not self.outer_steps:
            return (first + source.occurrence, *repeat_epochs)
        opened_at = (*self.epochs[: self.num_outer_epochs], source.occurrence)
        return (self.iteration.number_nested(source.counter, opened_at, first), *self.repeat_epochs)

    def with_element_numbers(self, wanted: bool) -> Context:
        """Return the context in which chunks do or do not carry element numbers."""
        if wanted == self.wants_element_numbers:
            return self
        return self._replace_fields(wants_element_numbers=wanted)

    def with_epoch_aligned_chunks(self) -> Context:
        """Return the context in which chunks of repeated index plans end with an epoch."""
        return self._replace_fields(aligns_chunks_to_epochs=True)

    def nested(self, step: int, element_number: int) -> Context:
        """Return the context of a dataset that step `step` opens for an outer element."""
        return self._replace_fields(
            epochs=(*self.epochs, element_number),
            num_outer_epochs=len(self.epochs) + 1,
            outer_steps=(*self.outer_steps, step),
            outer_numbers=(*self.outer_numbers, element_number),
            unordered_steps=_NO_STEPS,
            borrowing_steps=_NO_STEPS,
            split_provider=None,
            tracks_splits=False,
            split_source=None,
            leaf_numbers={},
            cache_seeds={},
        )

    def _replace_fields(self, **changes: Any) -> Context:
        # Faster than `dataclasses.replace`: there may be an epoch or a dataset for each element.
        context = object.__new__(Context)
        context.__dict__.update(self.__dict__, **changes)
        return context

    def entropy(self, number: int | None) -> list[int]:
        """Return the entropy of step `number` of this dataset, if it has no seed.

        The first word distinguishes the kinds of entropy; random draws are a stable format.
        """
        path = (*self.outer_steps, number or 0)
        return [2, self.seed & _MASK, len(path), *path, *self.epochs]

    def iteration_entropy(self, number: int) -> list[int]:
        """Return the entropy of step `number`, if it draws the same numbers in each `repeat`."""
        path = (*self.outer_steps, number)
        epochs = self.epochs[: max(self.num_outer_epochs, 1)]
        return [4, self.seed & _MASK, len(path), *path, *epochs]

    def fixed_entropy(self, number: int | None, default_seed: int | None) -> list[int]:
        """Return the entropy of step `number`, if it draws the same numbers in each epoch.

        Args:
            number: Number of a step without a seed.
            default_seed: Seed drawn when the step was created. A nested dataset is created for each
                outer element, so there the outer element's number is used instead.
        """
        if not self.outer_steps and default_seed is not None:
            return [3, default_seed & _MASK]
        path = (*self.outer_steps, number or 0)
        return [3, self.seed & _MASK, len(path), *path, *self.outer_numbers]


_NO_STEPS: frozenset[int] = frozenset()
_MASK = (1 << 64) - 1
