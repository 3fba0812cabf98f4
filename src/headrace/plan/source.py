"""The Source interface: where elements come from.

A source has `size` indices, such as rows of an array, files or row groups. Each index holds
elements in a fixed order: one (`elements_per_index == 1`) or any number (None: known only by
reading). Dividing a source into splits needs only the number of indices and runs no user code. A
remote dataset is a source, too.

A source consists of two classes: a `Source` that describes the data (small, picklable, opens
nothing) and a `Reader` of part of it. `headrace.testing.check_source` checks both. A source with
one element per index that can be read in any order is an `IndexedSource`, which needs only `size`
and `gather`.
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
    "IndexKind",
    "IndexedReader",
    "IndexedSource",
    "Position",
    "Reader",
    "RowReader",
    "Source",
    "check_limit",
    "check_part_position",
    "check_range",
    "validate_source",
]

INFINITE = -1
"""An infinite size or cardinality."""
UNKNOWN = -2
"""A cardinality that only reading can determine."""

Position: TypeAlias = Any
"""A reader's position: a JSON value (int, str, list, dict, None) of bounded size."""

INDEX_SPEC = ArraySpec((), np.int64)
"""Spec of an index."""

IndexKind: TypeAlias = Literal["element", "file", "part"]
"""Contents of an index: exactly one element, elements of one file (all of them, or those of a part
of the file), or any other group."""


class Reader(Protocol):
    """Reads the elements of some indices, in order.

    >>> reader = hr.Dataset.range(5).plan.source.open(0, 5)
    >>> [int(x) for x in reader.read(2).rows()]
    [0, 1]
    >>> reader.close()
    """

    def read(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, or None at the end.

        The caller owns the memory of the elements. The method may return fewer than `limit`
        elements, such as the rest of a block that was read, rather than wait for more. But if
        reading runs user code (`Source.runs_user_code`), it returns fewer only at the end or before
        an error, and runs that code for no further element.

        An element that cannot be read raises in its turn, after the elements before it were
        returned; the next call continues after it if possible, else returns None. An exception not
        derived from `Exception` (Ctrl-C, `sys.exit()`) propagates and leaves the position
        unchanged.
        """

    def get_position(self) -> Position:
        """Return the position before the next element, for `Source.open`. Called once per chunk."""

    def close(self) -> None:
        """Release files, sockets and threads. Idempotent."""


class BufferedSourceReader(Reader, Protocol):
    """A reader whose elements come in blocks. A block is completely in memory."""

    @property
    def available_elements(self) -> int:
        """Number of next elements in memory, as views of one block; 0 if none is buffered."""


class RowReader(Reader, Protocol):
    """A reader that also yields single elements, for sources that call user code for each."""

    def rows(self) -> Iterator[Any]:
        """Return an iterator over the next elements, each read on demand.

        After each element the position is the one after `read(1)`. After an unreadable element has
        raised, the position is after it and the iterator is finished, as at the end. Until the
        iterator is finished, only `get_position` and `close` may be called.
        """


class ReplayBuffers(Protocol):
    """Buffers of elements from readers that cannot be opened at any position.

    After an interruption an iterator rebuilds its steps at its last position. Readers closed in the
    process (between `hold_readers` and `release_readers`) can be reopened at their position.
    """

    def register_iterator(self, iterator: Any) -> None:
        """Register an iterator, which will report the elements that can be discarded."""

    def unregister_iterator(self, iterator: Any) -> None:
        """Unregister an iterator that is closed or finished. Idempotent."""

    @property
    def is_full(self) -> bool:
        """Whether the buffers are full, so that the iterator should report its position."""

    def discard_before(self, state: Any) -> None:
        """Discard the elements before the iterator position `state`."""

    def mark_end(self, state: Any) -> None:
        """Record that no element after the iterator position `state` was or will be consumed."""

    def export_state(self, state: Any) -> Any:
        """Return the iterator position `state` in a form that other processes can resume.

        Raises:
            FailedPreconditionError: If no process could resume it.
        """

    def take_loss_error(self) -> Exception | None:
        """Return the error to raise after the last element, once; None if no element is missing."""

    def hold_readers(self, iterator: Any) -> None:
        """Keep readers open that are closed from now on."""

    def release_readers(self, iterator: Any) -> None:
        """Close the held readers that were not opened again. Idempotent."""


class Source(ABC):
    """Data with `size` indices; any range of indices can be read independently.

    Subclass it to read formats that Headrace does not support: implement `size` and `open`, and
    override what differs from the defaults. Each may be a property or a class attribute.

    >>> source = hr.Dataset.range(5).plan.source
    >>> isinstance(source, hr.Source), source.size, source.elements_per_index
    (True, 5, 1)
    """

    saved_as: ClassVar[str] = ""
    """Name of sources of this class in saved states; "" uses the class name. After renaming the
    class, set it to the old name so that old states remain readable."""
    performance_fields: ClassVar[tuple[str, ...]] = ()
    """Dataclass fields that affect performance only; states are valid for any value of them."""
    remote_plan: Node | None = None
    """The plan that the source runs remotely, if any. Options, numbers and identities of steps pass
    through such a source as if the plan were local."""
    is_process_pool: ClassVar[bool] = False
    """Whether worker processes of this process alone run `remote_plan` (`in_processes`). Each
    reader has all elements then, as of a local plan."""
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

        Must be cheap, whatever `size` is: every index may be opened separately.

        Args:
            start: First index.
            stop: Index after the last; may be INFINITE for an infinite source.
            position: Position to start from, as returned by `Reader.get_position` in any process.
            pass_number: Number of the epoch in each enclosing `repeat`, outermost first. Most
                sources have the same elements in every epoch and ignore it.
        """

    @property
    def element_spec(self) -> Spec | None:
        """Spec of one element, or None if only reading can determine it."""
        return None

    @property
    def elements_per_index(self) -> int | None:
        """Number of elements at each index, or None if only reading can determine it."""
        return None

    @property
    def element_count(self) -> int | None:
        """Total number of elements, if known although indices hold any number of elements."""
        return None

    @property
    def splittable(self) -> bool:
        """Whether different workers may read parts of it."""
        return True

    @property
    def runs_user_code(self) -> bool:
        """Whether reading runs user code, so that no element may be read before it is requested."""
        return False

    @property
    def is_small(self) -> bool:
        """Whether the source has at most 512 elements, of a few KiB in memory.

        Reading all of them then costs about as much as reading one.
        """
        return False

    @property
    def restore_obstacle(self) -> str:
        """Why reading cannot start in the middle of the source, and the remedy; "" if it can."""
        return ""

    def with_seed(self, seed: int) -> Source:
        """Return the source for an iterator whose random steps draw from `seed`.

        Only a source that runs a remote plan (`remote_plan`) uses it.
        """
        return self

    def with_pool_plan(self, plan: Node) -> Source:
        """Return the source for another plan, in the same worker processes.

        Only a source with `is_process_pool` supports it.
        """
        raise NotImplementedError

    def detach(self) -> Source:
        """Return an independent source, whose readers take no elements away from others.

        Only a source whose readers share the elements (a named job) differs from the default.
        """
        return self

    @property
    def coordinated_job(self) -> str:
        """Job whose readers wait for each other at each element; "" if there is none."""
        return ""

    @property
    def counter(self) -> IterationCounter | None:
        """Counter of iterations if readers share a job, else None."""
        return self._counter

    @property
    def occurrence(self) -> int:
        """Number of earlier occurrences of the source in the plan."""
        return self._occurrence

    def explain_exhausted(self, number: int) -> str:
        """Return why iteration `number` had no elements because all were read before.

        That is so if the source's job is exhausted and has no other reader now; otherwise "".
        """
        return ""

    def with_occurrence(self, occurrence: int) -> Source:
        """Return the source with this `occurrence`. Only a source with a `counter` uses it."""
        return self

    @property
    def fixed_seeds(self) -> tuple[int, ...]:
        """Seeds of the steps of `remote_plan` that never reshuffle (`plan.determinism`)."""
        return ()

    def with_fixed_seeds(self, seeds: tuple[int, ...]) -> Source:
        """Return the source with these seeds, as many as `fixed_seeds`."""
        return self

    @property
    def explanation(self) -> str:
        """Text for `explain()` on how a remote plan runs; "" if there is none."""
        return ""

    @property
    def ordered_partition_mode(self) -> str:
        """How `remote_plan` is partitioned, if positions refer to its client stage.

        See `rewrites.partition`. It may be decided on first access.
        """
        return ""

    @property
    def has_ordered_partition(self) -> bool:
        """Whether `ordered_partition_mode` is not empty, without deciding the mode."""
        return bool(self.ordered_partition_mode)

    def explain_unusable_position(self, mode: str, *, is_single_process: bool) -> str:
        """Return why reading cannot start at a position in a stage of `remote_plan`; "" if it can.

        Args:
            mode: Partition mode of the saved position.
            is_single_process: Whether the position was saved by a plan that was not partitioned.
        """
        return ""

    @property
    def has_order(self) -> bool:
        """Whether the elements after a position are the same, in the same order, each time."""
        return True

    @property
    def replay_buffers(self) -> ReplayBuffers | None:
        """Replay buffers for resuming an interrupted iterator; None if none are needed."""
        return None

    @property
    def index_kind(self) -> IndexKind:
        """Contents of an index: one element, elements of one file, or any other group."""
        return "element" if self.elements_per_index == 1 else "part"

    @property
    def paths(self) -> tuple[str, ...]:
        """Name of the file at each index; empty if `index_kind` is not "file".

        If indices are parts of files, names repeat.
        """
        return ()


class IndexedSource(Source):
    """A source with one element per index, readable in any order: implement `size` and `gather`.

    An element of shape `s` is a row of `gather`'s result, so all elements have one shape and dtype.

    If `gather` raises, rows are fetched one by one, so that only rows fail that cannot be fetched.
    A batch directly over the source is one element, however, and fails as a whole.

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
        """Return the stacked elements at `indices`; components have `indices`' axes in front.

        `indices` may have any number of axes, may be empty, and may repeat an index. The result
        must be new memory, which the caller owns.
        """

    def gather_run(self, start: int, stop: int) -> Any:
        """Return the result of `gather` for indices `start` to `stop` - 1.

        Override it if consecutive indices need no lookup one by one.
        """
        return self.gather(np.arange(start, stop))

    def gather_borrowed(self, indices: NDArray[np.int64]) -> Any:
        """Return the result of `gather` for a caller that only reads it.

        The result may be memory that the source owns, and is then read-only; by default it is a
        copy.
        """
        return self.gather(indices)

    def gather_run_borrowed(self, start: int, stop: int) -> Any:
        """Return the elements of `gather_run` as read-only memory, like `gather_borrowed`."""
        return self.gather_borrowed(np.arange(start, stop))

    @property
    def can_borrow_runs(self) -> bool:
        """Whether `gather_run_borrowed` avoids a large copy of `gather_borrowed`."""
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
        """Return a reader of indices `start` to `stop` - 1; its position is the next index."""
        check_range(start, stop, self.size)
        return IndexedReader(self.gather_run, start, stop, position)


class IndexedReader:
    """Reader of a source with one element per index; its position is the next index.

    Args:
        gather_run: Function that returns the stacked elements from one index up to another.
        start: First index.
        stop: Index after the last, or INFINITE.
        position: Index to start from; None starts at `start`.
    """

    def __init__(self, gather_run: Any, start: int, stop: int, position: Position = None) -> None:
        self._gather_run: Any = gather_run
        self._next = start if position is None else position
        self._stop = stop
        is_outside = type(self._next) is not int or self._next < start
        if is_outside or (self._next > stop and stop != INFINITE):
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
        ValueError: If they are not.
    """
    is_within = start >= 0 and (
        (start <= stop or stop == INFINITE) if size == INFINITE else start <= stop <= size
    )
    if not is_within:
        size_text = "of infinite size" if size == INFINITE else f"with {size} indices"
        raise ValueError(f"cannot open indices {start} to {stop} of a source {size_text}")


def check_part_position(position: Position, start: int, stop: int, form: str) -> tuple[int, int]:
    """Return a position of the form `[index, offset in the part]`; None is the start.

    Args:
        position: The position.
        start: First index of the reader.
        stop: Index after its last.
        form: Form of the position, for messages, such as `"[index, row]"`.

    Raises:
        ValueError: If it is not two numbers, or the index is not one of the reader.
    """
    if position is None:
        return start, 0
    if (
        not isinstance(position, list | tuple)
        or len(position) != 2
        or not all(type(value) is int and value >= 0 for value in position)
        or not start <= position[0] <= stop
    ):
        raise ValueError(
            f"position must be {form} with an index from {start} to {stop}, got {position!r}"
        )
    index, offset = position
    return index, offset


def check_limit(limit: int) -> None:
    """Check that at least one element is requested.

    Raises:
        ValueError: If `limit` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")


def validate_source(source: Any) -> Source:
    """Return `source` if it is a Source.

    Raises:
        TypeError: If it is not; the message suggests a remedy.
    """
    # The method of an abstract class is five times as slow as this.
    kind: type[Any] = type(source)
    if Source in kind.__mro__ or isinstance(source, Source):
        found: Source = source
        return found
    name = type(source).__name__
    if isinstance(source, type) and issubclass(source, Source):
        fix = f"pass an instance: {source.__name__}(...)"
    elif hasattr(source, "size") and hasattr(source, "open"):
        fix = f"derive its class from it: class {name}(headrace.Source)"
    elif isinstance(source, list | tuple | dict | np.ndarray):
        fix = "for data in memory use Dataset.from_tensor_slices"
    elif callable(source):
        fix = "for a generator function use Dataset.from_generator"
    else:
        fix = "derive a class from it with `size` and `open`, or use Dataset.from_generator"
    raise TypeError(f"`source` must be a headrace.Source, but is a {name}; {fix}")
