"""Iterators that assign element ids, at a partition boundary or in a plan that is one split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.compact_columns import MetadataColumn
from headrace.element.metadata import element_numbers, id_column
from headrace.execution.assigned_iterators import (
    AssignedPlanIterator,
    NotRestorableIterator,
    count_finished_splits,
    find_failed_split,
    find_leaf_numbers,
    is_within_split,
)
from headrace.execution.context import Context
from headrace.execution.element_ids import (
    DeferredError,
    ErrorPosition,
    is_within,
    set_error_position,
    tag_upstream_error,
)
from headrace.execution.iterator import (
    MAX_FAILURES,
    ElementIterator,
    InstrumentedIterator,
    LazyRows,
    State,
    make_iterator,
)
from headrace.execution.split_progress import FinishedSplits, SplitProgress
from headrace.execution.split_provider import (
    NextSplits,
    PartialSplit,
    PartialSplitProvider,
    Pause,
    PositionSplitProvider,
    WholeSplitProvider,
)
from headrace.execution.step_iterator import StepIterator, select_states
from headrace.plan.partition_nodes import PartitionBoundary, RaiseDeferredErrors, TagUpstreamErrors

__all__ = [
    "BoundaryIterator",
    "RaiseDeferredErrorsIterator",
    "SingleSplitIterator",
    "TagUpstreamErrorsIterator",
    "WantedOrdinals",
]

# --- The partition boundary: assigns element ids and reads partial splits -------------------------
#
# Whole splits are read one after the other by one iterator. A partial split is read alone, from its
# start, by a separate iterator; the boundary skips unwanted elements and stops after the last
# wanted one.


@make_iterator.register(PartitionBoundary)
class BoundaryIterator(NotRestorableIterator):
    """Yields the elements of its input with their split and ordinal."""

    def __init__(self, node: PartitionBoundary, context: Context) -> None:
        split_provider = context.split_provider
        assert isinstance(split_provider, PositionSplitProvider)
        assert split_provider.progress is not None
        self._node = node
        self._context = context
        self._split_provider = split_provider
        self._progress: SplitProgress = split_provider.progress
        self._leaf_numbers = find_leaf_numbers(node.input, context)
        self._has_ended = False
        self._latest_split = -1  # highest split, in assignment order, that yielded an element
        self._last_error = ErrorPosition(-1, 0, 0)
        #: Wanted ordinals of the partial split being read; None between partial splits.
        self._wanted: WantedOrdinals | None = None
        self._partial_assignment = 0  # its number in assignment order
        self._input = self._open_whole_splits()

    def _open_whole_splits(self) -> ElementIterator:
        context = dataclasses.replace(
            self._context, split_provider=WholeSplitProvider(self._split_provider)
        )
        return make_iterator(self._node.input, context)

    @property
    def can_read_ahead(self) -> bool:
        return self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self._input.preferred_limit

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            try:
                chunk = self._input.next_chunk(limit)
            except Exception as error:
                self._count_error(error)
                if self._wanted is None or not self._wanted.is_known_failure(self._count_partial()):
                    raise
                continue
            if chunk is None:
                self._open_next()
                continue
            result = self._add_ids(chunk)
            if result is not None:
                return result
        return None

    def _count_error(self, error: Exception) -> None:
        """Attach the position to an error, if it is known; it is not with several open splits."""
        state = self._input.get_state()
        assignment = find_failed_split(state)
        position = self._progress.position_of(assignment) if assignment >= 0 else None
        if position is not None:
            number = (
                self._last_error.number_at_ordinal + 1 if self._last_error[:2] == position else 1
            )
            is_last = not is_within_split(state)
            self._last_error = ErrorPosition(*position, number, is_last=is_last)
            set_error_position(error, self._last_error)

    def _count_partial(self) -> int:
        return self._progress.num_elements(self._partial_assignment)

    def _open_next(self) -> None:
        """Continue after the end of the input with a partial split, or with whole splits."""
        # No step holds elements any longer.
        self._progress.record_finished(self._leaf_numbers, self._split_provider.num_assigned)
        was_partial, self._wanted = self._wanted is not None, None
        partial = self._split_provider.take_partial(self._leaf_numbers, self._context.epochs)
        if partial is None and not was_partial:
            self._has_ended = True
            return
        self._input.close()
        if partial is None:
            self._input = self._open_whole_splits()
        else:
            self._open_partial_split(*partial)

    def _open_partial_split(
        self, split: PartialSplit, split_provider: PartialSplitProvider
    ) -> None:
        self._input = make_iterator(
            self._node.input, dataclasses.replace(self._context, split_provider=split_provider)
        )
        self._wanted = WantedOrdinals(split)
        self._partial_assignment = split_provider.positions.num_assigned_before
        self._last_error = ErrorPosition(-1, 0, 0)  # the split is read from its start
        self._progress.record_skipped(
            self._partial_assignment, self._wanted.skip_unwanted(self._input)
        )

    def _add_ids(self, chunk: Chunk) -> Chunk | None:
        column = chunk.compact_metadata
        assert column is not None
        chunk = chunk.with_metadata(self._progress.add_ids(column))
        wanted = self._wanted
        if wanted is not None:
            if wanted.is_finished(self._count_partial()):
                self._abandon_partial_split()
            return wanted.select_wanted(chunk)
        latest_split = _find_latest_split(column)
        if latest_split > self._latest_split:
            self._latest_split = latest_split
            # An element of a later split means that earlier splits have ended.
            states, size, after = chunk.states, chunk.size, chunk.state_at(chunk.size)
            num_finished = count_finished_splits(after)
            if num_finished is not None:
                self._progress.record_finished(self._leaf_numbers, num_finished)
            # The code that puts the chunk into a result batch needs that state as well.
            return chunk.with_states(lambda index: after if index == size else states(index))
        return chunk

    def _abandon_partial_split(self) -> None:
        """Stop reading a partial split after its last wanted element."""
        self._progress.record_abandoned(self._partial_assignment)
        self._wanted = None
        self._input.close()
        self._input = self._open_whole_splits()

    def get_state(self) -> State:
        return self._input.get_state()

    def close(self) -> None:
        self._has_ended = True
        self._input.close()


def _find_latest_split(column: MetadataColumn) -> int:
    """Return the highest split, in assignment order, of the elements."""
    if not isinstance(column, np.ndarray):
        return column.max_split()
    splits = column["split"]
    return int(splits[0] if len(splits) == 1 else np.maximum.reduce(splits))


# --- Partial splits -------------------------------------------------------------------------------


class WantedOrdinals:
    """The wanted ordinals of a split that is read from its start.

    Args:
        split: The split and the ordinals.
    """

    def __init__(self, split: PartialSplit) -> None:
        self._ordinals = split.wanted_ordinals
        self._may_have_failed = split.may_have_failed
        self._num_failed = 0

    def skip_unwanted(self, input_: ElementIterator) -> int:
        """Skip the elements before the first wanted one, if none can fail; return their number.

        One-to-one steps make no calls for skipped elements. If elements may have failed, only a
        call shows which ones, so all of them are read.
        """
        first = self._ordinals[0][0] if self._ordinals else 0
        return 0 if self._may_have_failed or not first else input_.skip(first)

    def is_known_failure(self, ordinal: int) -> bool:
        """Return whether an error was raised before, i.e. the element after it is not wanted.

        An error just before a wanted element is raised, possibly a second time.
        """
        self._num_failed += 1
        if self._num_failed > MAX_FAILURES + ordinal:
            return False
        return not is_within(np.array([ordinal]), self._ordinals).any()

    def is_finished(self, ordinal: int) -> bool:
        """Return whether no element from `ordinal` on is wanted."""
        last = self._ordinals[-1][1] if self._ordinals else 0
        return last is not None and ordinal >= last

    def select_wanted(self, chunk: Chunk) -> Chunk | None:
        """Return the wanted elements of a chunk, or None if there are none."""
        assert chunk.metadata is not None
        mask = is_within(chunk.metadata["ordinal"], self._ordinals)
        if mask.all():
            return chunk
        indices = np.flatnonzero(mask)
        if not len(indices):
            return None
        return chunk.take(indices).with_states(
            select_states(chunk.states, indices.tolist(), chunk.size)
        )


# --- A plan that is a single split: the client or worker that receives it reads everything --------


class SingleSplitIterator(AssignedPlanIterator):
    """A plan that is a single split, read completely by its owner.

    Args:
        open_plan: Makes the iterator of the plan.
        next_splits: Returns the next assigned splits.
        tracks_splits: Whether elements get element ids.
    """

    def __init__(
        self,
        open_plan: Callable[[], ElementIterator],
        next_splits: NextSplits,
        *,
        tracks_splits: bool = False,
    ) -> None:
        self._open_plan = open_plan
        self._next_splits = next_splits
        self._tracks_splits = tracks_splits
        self._input: ElementIterator | None = None
        self._wanted: WantedOrdinals | None = None  # of the split; None if all elements are wanted
        self._count = 0  # number of elements read
        self._last_error = ErrorPosition(0, 0, 0)
        self._has_ended = False
        self._num_finished = 0
        self._finished: list[FinishedSplits] = []

    @property
    def num_started(self) -> int:
        return 0 if self._input is None else 1

    def take_finished(self) -> tuple[FinishedSplits, ...]:
        finished, self._finished = self._finished, []
        return tuple(finished)

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            if self._input is None and not self._open():
                break
            chunk = self._read(limit)
            if chunk is not None:
                return chunk.with_states(lambda index: {"assigned": 0, "position": 0, "started": 1})
        return None

    def _open(self) -> bool:
        splits = self._next_splits()
        while splits is Pause.PAUSE:  # no step holds elements
            splits = self._next_splits()
        if splits is None:
            self._has_ended = True
            return False
        self._input = self._open_plan()
        if isinstance(splits, PartialSplit):
            self._wanted = WantedOrdinals(splits)
            self._count = self._wanted.skip_unwanted(self._input)
        return True

    def _read(self, limit: int) -> Chunk | None:
        """Return elements, or None if none of them is wanted or at the end."""
        assert self._input is not None
        wanted = self._wanted
        try:
            chunk = self._input.next_chunk(limit)
        except Exception as error:
            last = self._last_error
            number = last.number_at_ordinal if last.ordinal == self._count else 0
            self._last_error = ErrorPosition(0, self._count, number + 1)
            set_error_position(error, self._last_error)
            if wanted is None or not wanted.is_known_failure(self._count):
                raise
            return None
        if chunk is None:
            self._num_finished, self.num_delivered, self._has_ended = 1, 1, True
            if self._tracks_splits:
                self._finished.append(FinishedSplits(0, 1, self._count))
            return None
        if not self._tracks_splits:
            return chunk
        ordinals = np.arange(self._count, self._count + chunk.size)
        self._count += chunk.size
        numbers = None if chunk.metadata is None else element_numbers(chunk.metadata)
        chunk = chunk.with_metadata(id_column(0, ordinals, numbers))
        if wanted is None:
            return chunk
        if wanted.is_finished(self._count):
            self._num_finished, self.num_delivered, self._has_ended = 1, 1, True
        return wanted.select_wanted(chunk)

    def get_state(self) -> State:
        return {"assigned": self._num_finished, "position": 0}

    def close(self) -> None:
        if self._input is not None:
            self._input.close()


# --- Errors of worker-side steps, raised in the client (`plan.partition_nodes`) -------------------


@make_iterator.register(RaiseDeferredErrors)
class RaiseDeferredErrorsIterator(StepIterator):
    """Raises the errors stored in place of failed elements."""

    def __init__(self, node: RaiseDeferredErrors, context: Context) -> None:
        super().__init__(make_iterator(node.input, context))

    def _produce(self, limit: int) -> Chunk | None:
        chunk = self._input_buffer.peek(limit)
        if chunk is None:
            return None
        start = self._input_buffer.offset
        part = chunk.slice(start, start + limit)
        count = part.size
        if not part.is_columnar:  # columns contain no deferred errors
            rows = enumerate(part.rows())
            count = next((index for index, row in rows if type(row) is DeferredError), count)
        if not count:
            self._pending_error = part.rows()[0].error
            return None
        self._consume(count)
        return part.slice(0, count)


@make_iterator.register(TagUpstreamErrors)
class TagUpstreamErrorsIterator(InstrumentedIterator):
    """Marks the errors that were raised below this step."""

    def __init__(self, node: TagUpstreamErrors, context: Context) -> None:
        super().__init__(make_iterator(node.input, context))
        self.has_lazy_rows = False

    def next_chunk(self, limit: int) -> Chunk | None:
        try:
            return super().next_chunk(limit)
        except Exception as error:
            tag_upstream_error(error)
            raise

    def lazy_rows(self) -> LazyRows | None:
        return ElementIterator.lazy_rows(self)
