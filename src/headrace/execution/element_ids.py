"""Ids of elements and positions of errors: the split, and the ordinal in it.

    chunk of a plan with partition boundaries -> element_id_runs -> runs of (splits, ordinals)

An ordinal counts the elements of a split at the partition boundary
(`rewrites.partition_boundaries`). Failed elements are not counted; `split_progress` counts. Runs
are plain integers, ready for serialization.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.compact_columns import ConsecutiveSplits, InterleavedSplits
from headrace.element.metadata import constituent_ids, has_element_ids
from headrace.execution.element_numbers import IdColumn

__all__ = [
    "DeferredError",
    "ErrorPosition",
    "IdRun",
    "OrdinalRanges",
    "as_single_run",
    "attach_element_position",
    "element_id_runs",
    "find_run_sizes",
    "find_run_starts",
    "get_error_position",
    "group_by_split",
    "is_within",
    "round_robin_order",
    "round_robin_runs",
    "set_error_position",
    "sort_order",
    "sort_to_runs",
    "stable_order",
    "tag_upstream_error",
    "to_runs",
]

OrdinalRanges: TypeAlias = tuple[tuple[int, int | None], ...]
"""Ranges of ordinals, each (first, one after the last), in order; None is unbounded.
"""


class IdRun(NamedTuple):
    """A run of ordinals from `first_ordinal` on, the same in each of several consecutive splits."""

    first_split: int
    num_splits: int
    """Number of consecutive splits, each with these ordinals."""
    first_ordinal: int
    size: int


def element_id_runs(chunk: Chunk, *, is_sorted: bool = False) -> tuple[IdRun, ...]:
    """Return the ids of a chunk's elements in order, as runs.

    Elements made from several elements, such as batches, have the ids of all of them.

    Args:
        chunk: Chunk of a plan that was started with `with_element_ids`.
        is_sorted: Whether to sort the ids; interleaved splits then need fewer runs.

    Raises:
        ValueError: If the elements have no ids.
    """
    metadata = chunk.metadata
    if metadata is None or not has_element_ids(metadata):
        raise ValueError(_NO_ELEMENT_IDS)
    splits, ordinals = constituent_ids(metadata)
    if is_sorted and len(splits):
        order = sort_order(splits, ordinals)
        splits, ordinals = splits[order], ordinals[order]
    return to_runs(splits, ordinals)


def sort_order(splits: NDArray[np.int64], ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order that sorts ids by split and ordinal; there must be at least one."""
    order = stable_order(splits)
    splits, ordinals = splits[order], ordinals[order]
    if not ((splits[1:] == splits[:-1]) & (ordinals[1:] < ordinals[:-1])).any():
        return order  # ordinals ascend within each split
    first_split, ordinal_range = int(splits[0]), int(np.maximum.reduce(ordinals)) + 1
    if (int(splits[-1]) - first_split + 1) * ordinal_range >= 1 << 62:
        return order[np.lexsort((ordinals, splits))]
    # Sorting one number is faster than sorting two.
    return order[((splits - first_split) * ordinal_range + ordinals).argsort()]


def round_robin_runs(column: InterleavedSplits) -> tuple[bool, tuple[IdRun, ...]]:
    """Return whether splits are interleaved, and the runs of the ids by ascending split.

    Args:
        column: Ids assigned at the partition boundary.
    """
    ordinals = column.first_ordinals
    assert ordinals is not None, "the elements are below the partition boundary"
    entries = [
        (column.splits[number], ordinals[number] + num_before, size)
        for number, num_before, size in column.split_elements()
    ]
    in_order = len(entries) < 2 or column.num_turns == len(entries)
    ascending = sorted(entries, key=operator.itemgetter(0))
    return not in_order or ascending != entries, _join_ascending(ascending)


def round_robin_order(column: InterleavedSplits) -> NDArray[np.int32]:
    """Return the order that sorts elements by split, as in `round_robin_runs`."""
    parts = sorted(column.split_elements(), key=lambda part: column.splits[part.cycle_index])
    return np.concatenate([column.indices_of(part) for part in parts])


def _join_ascending(entries: list[tuple[int, int, int]]) -> tuple[IdRun, ...]:
    """Return runs for (split, ordinal, size) entries with ascending splits."""
    runs: list[IdRun] = []
    for split, ordinal, size in entries:
        last = runs[-1] if runs else None
        if last is not None and (last[0] + last[1], *last[2:]) == (split, ordinal, size):
            runs[-1] = IdRun(last[0], last[1] + 1, ordinal, size)
        else:
            runs.append(IdRun(split, 1, ordinal, size))
    return tuple(runs)


def group_by_split(chunk: Chunk) -> Chunk:
    """Return a chunk's elements grouped by split, in order within each split and without states.

    The receiver then gets each split as a run, however the splits were interleaved.

    Args:
        chunk: Chunk of a plan that was started with `with_element_ids`, without batches of
            several elements.
    """
    column = chunk.compact_metadata
    if isinstance(column, ConsecutiveSplits):
        return chunk
    if isinstance(column, InterleavedSplits):
        is_mixed, _ = round_robin_runs(column)
        return chunk.take(round_robin_order(column)) if is_mixed else chunk
    metadata = chunk.metadata
    if metadata is None or not has_element_ids(metadata):
        raise ValueError(_NO_ELEMENT_IDS)
    splits = metadata["split"]
    if len(splits) < 2 or (splits[1:] >= splits[:-1]).all():
        return chunk
    return chunk.take(stable_order(splits))


def as_single_run(splits: NDArray[np.int64], ordinals: NDArray[np.int64]) -> IdRun | None:
    """Return ids as a single run, or None if they need several."""
    size = len(splits)
    if not size:
        return None
    split, first = int(splits[0]), int(ordinals[0])
    if size == 1:  # large elements come one by one
        return IdRun(split, 1, first, 1)
    split_distance, ordinal_distance = int(splits[-1]) - split, int(ordinals[-1]) - first
    # The first and last ids show which kind of run is possible; usually it is one.
    if split_distance == size - 1 and not ordinal_distance:
        is_run = (splits[1:] - splits[:-1] == 1).all() and (ordinals == first).all()
        return IdRun(split, size, first, 1) if is_run else None
    if not split_distance and ordinal_distance == size - 1:
        is_run = (splits == split).all() and (ordinals[1:] - ordinals[:-1] == 1).all()
        return IdRun(split, 1, first, size) if is_run else None
    return None


def to_runs(splits: NDArray[np.int64], ordinals: NDArray[np.int64]) -> tuple[IdRun, ...]:
    """Return ids as runs."""
    size = len(splits)
    if not size:
        return ()
    run = as_single_run(splits, ordinals)
    if run is not None:
        return (run,)
    differences = splits[1:] - splits[:-1]
    follows = (differences == 0) & (ordinals[1:] == ordinals[:-1] + 1)
    starts = find_run_starts(~follows)
    splits, first = splits[starts], ordinals[starts]
    sizes = find_run_sizes(starts, size)
    return _join_runs(splits, first, sizes)


def sort_to_runs(
    splits: NDArray[np.int64], ordinals: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[IdRun, ...]]:
    """Return the order that sorts ids (at least one), and the sorted runs."""
    lowest = int(np.minimum.reduce(splits))
    offsets = splits - lowest
    if int(np.maximum.reduce(offsets)) < max(_MIN_COUNTING_RANGE, 4 * len(splits)):
        order = stable_order(splits)
        sorted_, sizes = ordinals[order], np.bincount(offsets)
        (present,) = sizes.nonzero()
        sizes = sizes[present]
        run_stops = sizes.cumsum()
        follows = sorted_[1:] - sorted_[:-1] == 1
        across_splits = np.count_nonzero(follows[run_stops[:-1] - 1])
        # Ordinals are consecutive within each split, as long as no step drops elements.
        if np.count_nonzero(follows) - across_splits == len(splits) - len(present):
            return order, _join_runs(present + lowest, sorted_[run_stops - sizes], sizes)
    order = sort_order(splits, ordinals)
    return order, to_runs(splits[order], ordinals[order])


def _join_runs(
    splits: NDArray[np.int64], first: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[IdRun, ...]:
    """Join runs of one split each: consecutive splits with the same ordinals form one run."""
    same = (splits[1:] == splits[:-1] + 1) & (first[1:] == first[:-1]) & (sizes[1:] == sizes[:-1])
    run_starts = find_run_starts(~same)
    split_counts = find_run_sizes(run_starts, len(splits))
    columns = (splits[run_starts], split_counts, first[run_starts], sizes[run_starts])
    return tuple(map(IdRun._make, zip(*[column.tolist() for column in columns], strict=True)))


def is_within(ordinals: NDArray[np.int64], wanted: OrdinalRanges) -> NDArray[np.bool_]:
    """Return a mask of the ordinals that lie in one of the ranges."""
    mask = np.zeros(len(ordinals), np.bool_)
    for first, stop in wanted:
        range_mask = ordinals >= first
        mask |= range_mask if stop is None else range_mask & (ordinals < stop)
    return mask


_MIN_COUNTING_RANGE = 1024
_NO_ELEMENT_IDS = "these elements have no ids; build the iterator with `with_element_ids=True`"


def find_run_starts(is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where runs start, given a mask of the elements, from the second on, that start one."""
    (indices,) = is_new.nonzero()
    starts = np.zeros(len(indices) + 1, np.int64)
    np.add(indices, 1, out=starts[1:])
    return starts


def find_run_sizes(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the sizes of the runs that begin at `starts` (at least one), `size` in all."""
    sizes = np.empty(len(starts), np.int64)
    np.subtract(starts[1:], starts[:-1], out=sizes[:-1])
    sizes[-1] = size - int(starts[-1])
    return sizes


def stable_order(splits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stable order that sorts splits."""
    lowest, highest = int(np.minimum.reduce(splits)), int(np.maximum.reduce(splits))
    if highest - lowest < 1 << 16:  # radix sort is used for 16-bit integers
        return (splits - lowest).astype(np.uint16).argsort(kind="stable")
    return splits.argsort(kind="stable")


# --- Positions of errors among the elements of their splits ---------------------------------------
#
# An error raised at or below the partition boundary is counted there (`boundary_iterators`), like
# an element. At a step above the boundary, the failed element has an element id. An error carries
# its position to the consumer.
#
# Rule. All readers of a split, from its start or from an element on, get the same element ids.


class ErrorPosition(NamedTuple):
    """Position of an error. Sorting gives the order of the errors within a split."""

    split: int
    """Split index in the plan's stream."""
    ordinal: int
    """Ordinal, at the boundary, of the element that follows the error."""
    number_at_ordinal: int
    """1, 2, ... for errors before the same element; 0 if the preceding element itself failed.

    -1 if that element failed below selecting steps of the client stage (`plan.partition_nodes`).
    """
    is_last: bool = False
    """Whether the split is known to have no elements or errors after this one."""

    @property
    def element(self) -> int:
        """Ordinal of the element that has to be read to reach the error."""
        return self.ordinal if self.number_at_ordinal > 0 else self.ordinal - 1

    @property
    def is_whole_split(self) -> bool:
        """Whether the split contains nothing else: all of its elements failed."""
        return self.is_last and self.ordinal == 0


class DeferredError:
    """Placeholder for a failed element; its error is raised when its turn comes.

    Args:
        error: The error to raise.
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error: Exception = error


_POSITION_ATTRIBUTE = "_headrace_error_position"


def set_error_position(error: BaseException, position: ErrorPosition) -> None:
    """Attach its position to an error."""
    setattr(error, _POSITION_ATTRIBUTE, position)


def attach_element_position(error: BaseException, ids: IdColumn | None, index: int) -> None:
    """Attach the position of a failed element to an error, if elements have ids.

    Args:
        error: The error.
        ids: Metadata of the elements.
        index: Index of the failed element.
    """
    if ids is not None and (ids.dtype.names or ("",))[-1] == "ordinal":
        split, ordinal = int(ids["split"][index]), int(ids["ordinal"][index])
        set_error_position(error, ErrorPosition(split, ordinal + 1, 0))


def tag_upstream_error(error: BaseException) -> None:
    """Mark an element's error as raised below steps that select elements."""
    position = get_error_position(error)
    if position is not None and not position.number_at_ordinal:
        set_error_position(error, position._replace(number_at_ordinal=-1))


def get_error_position(error: BaseException) -> ErrorPosition | None:
    """Return the position attached to an error, or None."""
    return getattr(error, _POSITION_ATTRIBUTE, None)
