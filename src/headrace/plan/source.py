"""The Source contract: where elements come from.

A source has `size` indices: rows of an array, files, row groups. Each index holds elements in a
fixed order, one (`elements_per_index == 1`) or any number (None: known only by reading). Whoever
deals out work needs to know a number of indices and no code of the user's. A remote dataset is just
another source.

A source is two classes: a `Source` that says what there is (small, picklable, opens nothing by
itself) and a `Reader` of part of it. `headrace.testing.check_source` checks both. A source of one
element an index, readable in any order, is an `IndexedSource`: `size` and `gather` are all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import FailedPreconditionError
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node

__all__ = [
    "INDEX_SPEC",
    "INFINITE",
    "UNKNOWN",
    "IndexHolds",
    "IndexedReader",
    "IndexedSource",
    "Position",
    "Reader",
    "RowReader",
    "Source",
    "check_limit",
    "check_range",
    "checked_source",
]

INFINITE = -1
"""A size or cardinality without end."""
UNKNOWN = -2
"""A cardinality that only reading can tell."""

Position: TypeAlias = Any
"""A reader's place: a JSON value (int, str, list, dict, None) of bounded size."""

INDEX_SPEC = ArraySpec((), np.int64)
"""Spec of an index."""

IndexHolds: TypeAlias = Literal["element", "file", "part"]
"""What an index is: exactly one element, the elements of one file, or any other group."""


class Reader(Protocol):
    """Reads the elements of some indices, in order.

    >>> reader = hr.Dataset.range(5).plan.source.open(0, 5)
    >>> [int(x) for x in reader.read(2).rows()]
    [0, 1]
    >>> reader.close()
    """

    def read(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, or None at the end.

        The elements are in memory that the caller owns. Returns early rather than late: what is at
        hand without waiting (a block that was read) may be returned together. Where reading runs
        user code (`Source.runs_user_code`) it returns `limit` elements, fewer only at the end or
        before an error, and runs that code for no element more.

        An element that cannot be read raises when its turn comes, after the elements before it
        were returned; the next call goes on after it where that is possible, else ends. An
        exception that is no `Exception` (Ctrl-C, `sys.exit()`) passes through and leaves the
        position where it was before the call.
        """

    def get_position(self) -> Position:
        """Return the place before the next element, for `Source.open`; cheap (called per chunk)."""

    def close(self) -> None:
        """Release files, sockets and threads. May be called twice."""


class ArrivedReader(Reader, Protocol):
    """A reader of elements that come in pieces, each of which is in memory as a whole."""

    @property
    def arrived(self) -> int:
        """How many of the next elements are in memory, as views of one piece; 0: none, so far."""


class RowReader(Reader, Protocol):
    """A reader that can also give elements one by one: where each costs a call of user code."""

    def rows(self) -> Iterator[Any]:
        """Return an iterator over the next elements, each read when it is asked for.

        After each it stands where `read(1)` would, and the position is after an element that
        could not be read once that was raised; then, and at the end, it is over. While it is not,
        nothing but `get_position` and `close` is called.
        """


class Keeper(Protocol):
    """Keeps what readers gave that cannot be opened at any position.

    After an interruption an iterator builds its steps again at its last place. Readers that are
    closed by it meanwhile (between `hold` and `release`) can be opened where they were.
    """

    def watch(self, iterator: Any) -> None:
        """Take note of an iterator that will say what may be forgotten."""

    def leave_off(self, iterator: Any) -> None:
        """Take note that an iterator is closed, or at its end. May be called twice."""

    @property
    def is_full(self) -> bool:
        """Whether it is time to say so."""

    def forget(self, state: Any) -> None:
        """Forget what came before `state`, the place of an iterator."""

    def stop_at(self, state: Any) -> None:
        """Take note that nothing after `state`, the place of an iterator, was or will be used."""

    def said(self, state: Any) -> Any:
        """Return `state`, the place of an iterator, as others can go on from there.

        Raises:
            FailedPreconditionError: Nobody could.
        """

    def take_loss(self) -> Exception | None:
        """Return the error to raise after the last element, once; None: nothing is missing."""

    def hold(self, iterator: Any) -> None:
        """Leave readers open that are closed from now on."""

    def release(self, iterator: Any) -> None:
        """Close those that were not opened again. May be called twice."""


class Source(ABC):
    """Something with `size` indices whose elements can be read, any range of indices by itself.

    Derive from it to read what Headrace does not know: write `size` and `open`, and override what
    is not as the defaults say. Each may be a property or a class attribute.

    >>> source = hr.Dataset.range(5).plan.source
    >>> isinstance(source, hr.Source), source.size, source.elements_per_index
    (True, 5, 1)
    """

    saved_as: ClassVar[str] = ""
    """What saved states call sources of this class; "" is the name of the class. Set it to the old
    name when the class is renamed: states that were saved before are then read."""
    speed_only: ClassVar[tuple[str, ...]] = ()
    """Fields of a dataclass that change how fast the elements come, and nothing else: states fit
    whatever they are."""
    written: Node | None = None
    """The plan that the source stands for, if it runs one elsewhere. Options, numbers and
    identities of steps pass through such a source as if it were not there."""
    _counter: IterationCounter | None = None
    _occurrence: int = 0

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of indices, or INFINITE."""

    @abstractmethod
    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        """Return a reader of indices `start` to `stop` - 1.

        Cheap, whatever `size` is: an engine may open every index by itself.

        Args:
            start: The first index.
            stop: The index after the last; may be INFINITE for a source without end.
            position: Where to begin: what `Reader.get_position` returned, in any process.
            pass_number: Which pass over the data this is, outermost first; most sources give the
                same elements in every pass and ignore it.
        """

    @property
    def element_spec(self) -> Spec | None:
        """Spec of one element, or None when only reading can tell."""
        return None

    @property
    def elements_per_index(self) -> int | None:
        """Elements that each index holds, or None when only reading can tell."""
        return None

    @property
    def element_count(self) -> int | None:
        """Number of elements in all, where that is known though its indices hold any number."""
        return None

    @property
    def splittable(self) -> bool:
        """Whether parts of it may be read by different workers."""
        return True

    @property
    def runs_user_code(self) -> bool:
        """Whether reading runs code of the user's, so that nothing may be read unasked."""
        return False

    @property
    def cannot_restore(self) -> str:
        """Why reading cannot begin in the middle of the source, and what would do; "": it can."""
        return ""

    def seeded(self, seed: int) -> Source:
        """Return the source for an iterator whose random steps draw from `seed`.

        Only a source that runs a plan elsewhere (`written`) heeds it.
        """
        return self

    def apart(self) -> Source:
        """Return the source for a reader that nobody else misses anything for.

        Only a source whose readers share what there is heeds it.
        """
        return self

    @property
    def meets_in(self) -> str:
        """The job whose readers wait for each other at each element; "": nobody is waited for."""
        return ""

    @property
    def counter(self) -> IterationCounter | None:
        """What numbers the iterations, where readers share a job; None: they do not."""
        return self._counter

    @property
    def occurrence(self) -> int:
        """How many times the source stands in the plan before this place."""
        return self._occurrence

    def used_up(self, number: int) -> str:
        """Return why iteration `number` had no elements, where all were read before.

        That is where the job that it reads is used up, and nobody else reads it now; "": it is not.
        """
        return ""

    def at_occurrence(self, occurrence: int) -> Source:
        """Return the source with this `occurrence`. Only one with a `counter` heeds it."""
        return self

    @property
    def fixed_seeds(self) -> tuple[int, ...]:
        """What steps of `written` draw from that have one order for ever (`plan.determinism`)."""
        return ()

    def with_fixed_seeds(self, seeds: tuple[int, ...]) -> Source:
        """Return the source whose `fixed_seeds` are these; there are as many."""
        return self

    @property
    def account(self) -> str:
        """What `explain()` says of it: how a plan is run elsewhere; "": nothing."""
        return ""

    @property
    def half_in_order(self) -> str:
        """How `written` is cut in two (`rewrites.cut`), where positions are places in its half.

        It may be decided only when somebody asks.
        """
        return ""

    @property
    def has_halves(self) -> bool:
        """Whether `half_in_order` says anything; nothing is decided for that."""
        return bool(self.half_in_order)

    def cannot_begin_at(self, half: str, *, is_of_one_process: bool) -> str:
        """Return why reading cannot begin at a place in a half of `written`; "": it can.

        Args:
            half: Which one.
            is_of_one_process: Whether it was saved where the plan was not cut.
        """
        return ""

    @property
    def has_order(self) -> bool:
        """Whether what comes after a place is the same, in the same order, each time."""
        return True

    @property
    def keeper(self) -> Keeper | None:
        """Keeps what its readers gave, so that an interrupted iterator goes on; None: no need."""
        return None

    @property
    def index_holds(self) -> IndexHolds:
        """What an index is: one element, the elements of one file, or any other group."""
        return "element" if self.elements_per_index == 1 else "part"

    @property
    def paths(self) -> tuple[str, ...]:
        """Where an index is a file: the name of each; else empty."""
        return ()


class IndexedSource(Source):
    """A source of one element an index, that can be read in any order: write `size` and `gather`.

    An element of shape `s` is a row of what `gather` returns, so all have one shape and dtype.

    Where `gather` raises, rows are fetched one by one, so that only those fail that cannot be
    fetched; but a batch directly over the source is one element, and fails as a whole.

    >>> class Squares(hr.IndexedSource):
    ...     size = 4
    ...
    ...     def gather(self, indices):
    ...         return {"x": indices, "square": indices**2}
    >>> dataset = hr.Dataset.from_source(Squares()).batch(4)
    >>> next(iter(dataset))["square"].tolist()
    [0, 1, 4, 9]
    """

    @abstractmethod
    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return the elements at `indices`, stacked: each component gets `indices`' axes in front.

        `indices` may have any number of axes, may be empty and may name an index twice; the result
        is fresh memory that the caller owns.
        """

    def gather_run(self, start: int, stop: int) -> Any:
        """Return what `gather` does for indices `start` to `stop` - 1.

        Override it where indices in order need not be looked at one by one.
        """
        return self.gather(np.arange(start, stop))

    def lend(self, indices: NDArray[np.int64]) -> Any:
        """Return what `gather` does, for somebody who only reads it.

        It may be memory that the source keeps, and is read-only then; by default it is a copy.
        """
        return self.gather(indices)

    def lend_run(self, start: int, stop: int) -> Any:
        """Return what `gather_run` does, for somebody who only reads it, as with `lend`."""
        return self.lend(np.arange(start, stop))

    @property
    def lends_runs(self) -> bool:
        """Whether `lend_run` copies nothing where `lend` would copy much, for all elements."""
        return False

    @property
    def elements_per_index(self) -> int | None:
        """Always 1."""
        return 1

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        """Return a reader that gathers indices `start` to `stop` - 1; its position is the next."""
        check_range(start, stop, self.size)
        return IndexedReader(self.gather_run, start, stop, position)


class IndexedReader:
    """Reads a source of one element an index; its position is the next index.

    Args:
        gather_run: Gives the elements from one index up to another, stacked.
        start: The first index.
        stop: The index after the last, or INFINITE.
        position: Where to begin, if not at `start`.
    """

    def __init__(self, gather_run: Any, start: int, stop: int, position: Position = None) -> None:
        self._gather_run: Any = gather_run
        self._next = start if position is None else position
        self._stop = stop
        outside = type(self._next) is not int or self._next < start
        if outside or (self._next > stop and stop != INFINITE):
            raise ValueError(f"position must be an index from {start} to {stop}, got {position!r}")

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._gather_run is None:
            raise FailedPreconditionError("this reader is closed; open another one")
        stop = self._next + limit
        if self._stop != INFINITE:
            stop = min(stop, self._stop)
        if stop == self._next:
            return None
        chunk = Chunk.of_columns(self._gather_run(self._next, stop), stop - self._next)
        self._next = stop
        return chunk

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        self._gather_run = None


def check_range(start: int, stop: int, size: int) -> None:
    """Check that `start` to `stop` - 1 are indices of a source.

    Raises:
        ValueError: They are not.
    """
    within = start >= 0 and (
        (start <= stop or stop == INFINITE) if size == INFINITE else start <= stop <= size
    )
    if not within:
        what = "without end" if size == INFINITE else f"of {size} indices"
        raise ValueError(f"cannot open indices {start} to {stop} of a source {what}")


def check_limit(limit: int) -> None:
    """Check that a reader is asked for at least one element.

    Raises:
        ValueError: It is not.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")


def checked_source(source: Any) -> Source:
    """Return `source` if it is one.

    Raises:
        TypeError: It is not; the message says what would do.
    """
    if isinstance(source, Source):
        return source
    name = type(source).__name__
    if isinstance(source, type) and issubclass(source, Source):
        cure = f"pass an instance: {source.__name__}(...)"
    elif hasattr(source, "size") and hasattr(source, "open"):
        cure = f"derive its class from it: class {name}(headrace.Source)"
    elif isinstance(source, list | tuple | dict | np.ndarray):
        cure = "for data in memory use Dataset.from_tensor_slices"
    elif callable(source):
        cure = "for a generator function use Dataset.from_generator"
    else:
        cure = "derive a class from it with `size` and `open`, or use Dataset.from_generator"
    raise TypeError(f"`source` must be a headrace.Source, but is a {name}; {cure}")
