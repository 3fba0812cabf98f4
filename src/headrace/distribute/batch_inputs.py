"""Inputs that split global batches into pieces, one for each replica.

SplitBatchInput      each batch is split separately (`rebatch.ceil_steps`)
BalancedBatchInput   piece sizes alternate, across batches (`rebatch.piece_size`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.data.iterator import DatasetIterator
from headrace.data.saved_state import IteratorPosition
from headrace.distribute.rebatch import Piece, ceil_steps, piece_size
from headrace.distribute.step_inputs import (
    HeldElementReader,
    StepColumns,
    StepInput,
    count_rows,
    input_states,
    not_batched_error,
)
from headrace.element.spec import BYTES, STR, ArraySpec, Spec, leaf_spec
from headrace.element.structure import Structure, describe_component, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.combining import Zip
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat, Shuffle, Skip, Take
from headrace.plan.traverse import element_spec, fold
from headrace.rewrites.reader_agreement import find_sources

__all__ = [
    "BalancedBatchInput",
    "SplitBatchInput",
    "check_is_batched",
    "check_keeps_order",
    "empty_step",
    "global_batch_size",
    "match_spec_classes",
    "piece_spec",
    "round_robin_spec",
    "step_spec",
]


def _read_batch(reader: HeldElementReader) -> tuple[list[Any], Structure, int] | None:
    """Return a batch's leaves, structure and number of rows; the reader holds the batch.

    Raises:
        InvalidArgumentError: If the element is not a batch; it is dropped.
    """
    if not reader.hold():
        return None
    leaves, structure = flatten(*reader.held)
    try:
        return leaves, structure, count_rows(leaves, structure)
    except InvalidArgumentError:
        reader.held, reader.rows_to_skip = (), 0
        raise


class SplitBatchInput(StepInput):
    """Splits each batch into pieces of ceil(rows / replicas).

    Args:
        elements: Iterator over the batches.
        replicas: Number of replicas of all workers.
        num_local: Number of replicas of this worker.
        num_readers: Number of workers that read the same batches and take pieces in turn.
        reader_index: Index of this worker among them.
        check_order: See `HeldElementReader`.
        is_contiguous: Whether this worker's pieces are contiguous, after those of the workers
            before it, instead of taken in turn.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        replicas: int,
        num_local: int,
        num_readers: int = 1,
        reader_index: int = 0,
        check_order: Callable[[], None] | None = None,
        is_contiguous: bool = False,
    ) -> None:
        #: Whether a batch may span more than one step.
        self._may_span_steps = num_readers * num_local < replicas
        self._batches = HeldElementReader(elements, self._may_span_steps, check_order)
        self._replicas = replicas
        #: Number of pieces in a step, for all readers of the batch.
        self._num_pieces = num_local * num_readers
        start = reader_index * num_local
        self._own_pieces = (
            slice(start, start + num_local)
            if is_contiguous
            else slice(reader_index, None, num_readers)
        )
        self._leaves: list[Any] = []
        self._structure: Structure | None = None
        #: Remaining steps of the batch: pieces for all its readers.
        self._steps: list[list[Piece]] = []
        #: Used rows of the batch, as saved in the state.
        self._rows_used = 0

    def next_step(self) -> StepColumns | None:
        if not self._steps and not self._read():
            return None
        pieces, *remaining = self._steps
        own_pieces = pieces[self._own_pieces]
        assert self._structure is not None
        step = self._structure, [[leaf[a:b] for a, b in own_pieces] for leaf in self._leaves]
        self._steps, self._rows_used = remaining, pieces[-1][1] if remaining else 0
        return step

    def _read(self) -> bool:
        while True:
            batch = _read_batch(self._batches)
            if batch is None:
                return False
            leaves, structure, rows = batch
            steps = ceil_steps(rows, self._replicas, self._num_pieces, self._batches.rows_to_skip)
            rows_used = self._batches.rows_to_skip if self._may_span_steps and steps else 0
            self._leaves, self._structure, self._steps = leaves, structure, steps
            self._rows_used, self._batches.rows_to_skip, self._batches.held = rows_used, 0, ()
            if steps:
                return True

    def get_state(self) -> dict[str, Any]:
        if self._steps:  # no position was stored if interrupted before the batch's only step
            return {
                "inputs": [self._batches.state_at(self._batches.position)],
                "rows": self._rows_used,
            }
        return {"inputs": [self._batches.get_state()], "rows": self._batches.rows_to_skip}

    def set_state(self, state: dict[str, Any]) -> None:
        (input_state,) = input_states(state, 1)
        self._batches.set_state(input_state)
        self._steps, self._rows_used = [], 0
        self._batches.rows_to_skip = state["rows"]

    def close(self) -> None:
        self._batches.close()


class BalancedBatchInput(StepInput):
    """Splits the stream of all rows into pieces of alternating sizes.

    Args:
        elements: Iterator over the batches.
        sizes: Returns the cycle of piece sizes for a global batch size.
        num_local: Number of pieces in a step of this worker.
        num_readers: Number of workers that read the same batches and take pieces in turn.
        reader_index: Index of this worker among them.
        size: Rows of a global batch; None uses those of the first batch.
        check_order: See `HeldElementReader`.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        sizes: Callable[[int], list[int]],
        num_local: int,
        num_readers: int = 1,
        reader_index: int = 0,
        size: int | None = None,
        check_order: Callable[[], None] | None = None,
    ) -> None:
        self._batches = HeldElementReader(elements, True, check_order)
        self._sizes_of, self._given_size = sizes, size
        self._set_size(size)
        #: Number of pieces in a step, for all readers of the batches.
        self._num_pieces = num_local * num_readers
        self._own_pieces = slice(reader_index, None, num_readers)
        #: Batches with unused rows.
        self._held: list[_HeldBatch] = []
        self._structure: Structure | None = None
        #: Number of pieces so far.
        self._pieces_cut = 0

    def _set_size(self, size: int | None) -> None:
        self._size = size
        self._sizes: list[int] = [] if size is None else self._sizes_of(size)

    def next_step(self) -> StepColumns | None:
        if not self._held and not self._hold_batch():
            return None
        if not self._sizes:
            self._set_size(self._held[0].stop)
        piece_numbers = range(self._pieces_cut, self._pieces_cut + self._num_pieces)
        piece_sizes = [piece_size(self._sizes, number) for number in piece_numbers]
        # Read all needed batches first: on an error, no rows are taken.
        while sum(batch.stop - batch.start for batch in self._held) < sum(piece_sizes):
            if not self._hold_batch():
                break
        empty = [leaf[:0] for leaf in self._held[0].leaves]
        remaining = deque(self._held)
        assert self._structure is not None
        paths = self._structure.paths
        pieces = [_take_rows(remaining, rows, empty, paths) for rows in piece_sizes]
        step = (
            self._structure,
            [list(column) for column in zip(*pieces[self._own_pieces], strict=True)],
        )
        remaining_batches = list(remaining)
        self._held, self._pieces_cut = remaining_batches, self._pieces_cut + self._num_pieces
        return step

    def _hold_batch(self) -> bool:
        """Read and hold another batch that has rows."""
        while True:
            batch = _read_batch(self._batches)
            if batch is None:
                return False
            leaves, structure, rows = batch
            start, held = min(self._batches.rows_to_skip, rows), self._held
            if start < rows:
                held = [*held, _HeldBatch(self._batches.position, leaves, start, rows)]
            self._structure, self._held = structure, held
            self._batches.rows_to_skip, self._batches.held = 0, ()
            if start < rows:
                return True

    def get_state(self) -> dict[str, Any]:
        state = {"size": self._size, "sizes": self._sizes, "pieces": self._pieces_cut}
        if self._held:
            first = self._held[0]
            return {
                "inputs": [self._batches.state_at(first.position)],
                "rows": first.start,
                **state,
            }
        return {"inputs": [self._batches.get_state()], "rows": self._batches.rows_to_skip, **state}

    def set_state(self, state: dict[str, Any]) -> None:
        (input_state,) = input_states(state, 1)
        self._batches.set_state(input_state)
        self._held = []
        self._batches.rows_to_skip = state["rows"]
        # A state taken before anything was read has no size: forget the known one.
        size = state.get("size")
        self._set_size(self._given_size if size is None else int(size))
        # Another cycle of sizes starts at its first.
        self._pieces_cut = state["pieces"] if state.get("sizes") == self._sizes else 0

    def close(self) -> None:
        self._batches.close()


class _HeldBatch(NamedTuple):
    """Partly used batch: the rows from `start` to `stop` remain."""

    position: IteratorPosition | None
    leaves: list[Any]
    start: int
    stop: int


def _take_rows(
    held: deque[_HeldBatch], count: int, empty: list[Any], paths: Sequence[str]
) -> list[Any]:
    """Return the leaves of the next rows, of one or more batches."""
    pieces: list[list[Any]] = []
    while count and held:
        batch = held.popleft()
        stop = min(batch.stop, batch.start + count)
        pieces.append([leaf[batch.start : stop] for leaf in batch.leaves])
        count -= stop - batch.start
        if stop < batch.stop:
            held.appendleft(batch._replace(start=stop))
    if len(pieces) > 1:
        columns = zip(*pieces, strict=True)
        return [_concatenate(parts, path) for parts, path in zip(columns, paths, strict=True)]
    return pieces[0] if pieces else empty


def _concatenate(parts: Sequence[Any], path: str) -> Any:
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise InvalidArgumentError(
            f"rows of {describe_component(path)} have shapes {', '.join(map(str, shapes))}, but "
            'split="balanced" joins the remaining rows of a batch to the next batch: pad all '
            'rows to one shape (padded_batch with padded_shapes), or use split="ceil"'
        )
    return np.concatenate(parts)


# --- Specs and batch sizes after rows are divided among replicas ----------------------------------


def check_is_batched(plan: Node) -> None:
    """Raise if the plan shows that elements have no rows.

    Raises:
        InvalidArgumentError: If a leaf is a scalar; the message names it.
    """
    spec = element_spec(plan)
    if spec is None:
        return
    leaves, structure = flatten(spec)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not leaf.shape:
            raise InvalidArgumentError(not_batched_error(path, f"a scalar ({leaf})"))


def check_keeps_order(plan: Node) -> None:
    """Raise unless each reading returns the same batches in the same order after a position.

    Raises:
        FailedPreconditionError: If it does not: a partly used batch may come at any time, or on
            another worker.
    """
    if not all(source.has_order for source in find_sources(plan)):
        raise FailedPreconditionError(
            "the state cannot be saved within a batch: the data service returns batches in no "
            "fixed order, so another batch may come after a restore. Read with `ordered=True`, "
            "create per-replica batches in distribute_datasets_from_function, or save the state "
            "after a step that uses up its batches"
        )


def global_batch_size(plan: Node) -> int | None:
    """Return the batch size of a plan, except for smaller last batches; None if unknown."""
    size = fold(plan, _batch_size_at, once=True)
    if size is not None:
        return size
    spec = element_spec(plan)
    if spec is None:
        return None
    leaves, _ = flatten(spec)
    rows = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None


def _batch_size_at(node: Node, inputs: list[int | None]) -> int | None:
    if isinstance(node, Batch | PaddedBatch):
        return node.size
    if isinstance(node, Zip):
        return inputs[0] if len(set(inputs)) == 1 else None
    keeps_rows = node.is_transparent or isinstance(node, Repeat | Shuffle | Skip | Take)
    return inputs[0] if keeps_rows and len(inputs) == 1 else None


def piece_spec(spec: Spec, replicas: int | None) -> Spec:
    """Return the spec of one replica's piece of each batch; with None lengths vary."""

    def piece(leaf: ArraySpec) -> ArraySpec:
        rows = leaf.shape[0] if leaf.shape else None
        fits = replicas is not None and rows is not None and rows % replicas == 0
        return _with_rows(leaf, rows // replicas if fits and rows and replicas else None)

    return map_leaves(piece, spec)


def round_robin_spec(spec: Spec) -> Spec:
    """Return the spec of elements that a replica gets unchanged, or without rows."""
    return map_leaves(lambda leaf: _with_rows(leaf, None), spec)


def step_spec(structure: Structure, columns: Sequence[Sequence[Any]]) -> Spec:
    """Return the spec of a replica's part of a step, with any number of rows."""
    return round_robin_spec(unflatten(structure, [leaf_spec(values[0]) for values in columns]))


def match_spec_classes(own: Spec | None, spec: Spec) -> Spec:
    """Return a spec from another process, with this process's classes if they are known.

    Classes that no module defines arrive as other classes of that name, with fields only.
    """
    if own is None:
        return spec
    own_structure, (leaves, structure) = flatten(own)[1], flatten(spec)
    return unflatten(own_structure, leaves) if own_structure.paths == structure.paths else spec


def _with_rows(leaf: ArraySpec, rows: int | None) -> ArraySpec:
    return ArraySpec((rows, *leaf.shape[1:]), leaf.dtype, leaf.name) if leaf.shape else leaf


def empty_step(spec: Spec, replicas: int) -> StepColumns:
    """Return a step without rows for any replica: the first axis and unknown lengths are 0.

    A scalar has no rows; it is 0 or empty.
    """
    leaves, structure = flatten(spec)
    return structure, [[_empty(leaf)] * replicas for leaf in leaves]


def _empty(leaf: ArraySpec) -> Any:
    if leaf.dtype in (BYTES, STR):
        empty_text: Any = b"" if leaf.dtype == BYTES else ""
        return np.empty(_shape(leaf), object) if leaf.shape else empty_text
    array = np.zeros(_shape(leaf), leaf.dtype)
    return array if leaf.shape else array[()]


def _shape(leaf: ArraySpec) -> tuple[int, ...]:
    return (0, *[length or 0 for length in leaf.shape[1:]]) if leaf.shape else ()
