"""Feeds of global batches, of which each replica gets a piece.

Split       each batch is cut into pieces (`rebatch.ceil_steps`)
Balanced    the same, cut where the pieces' turns say (`rebatch.size_of_piece`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.data.iterator import DatasetIterator
from headrace.data.saved_state import Mark
from headrace.distribute.feeds import (
    Feed,
    Reader,
    Step,
    inputs_of,
    no_batch,
    rows_of,
)
from headrace.distribute.rebatch import Piece, ceil_steps, size_of_piece
from headrace.element.spec import BYTES, STR, ArraySpec, Spec, leaf_spec
from headrace.element.structure import Structure, component, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.combining import Zip
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat, Shuffle, Skip, Take
from headrace.plan.traverse import element_spec, fold
from headrace.rewrites.read_alike import sources

__all__ = [
    "Balanced",
    "Split",
    "check_is_batched",
    "check_keeps_order",
    "empty_step",
    "global_batch_size",
    "spec_in_form_of",
    "spec_in_turn",
    "spec_of_pieces",
    "spec_of_step",
]


def _read(reader: Reader) -> tuple[list[Any], Structure, int] | None:
    """Return a batch's leaves, its structure, and how many rows it has; the reader holds it.

    Raises:
        InvalidArgumentError: It is no batch; it is dropped.
    """
    if not reader.hold():
        return None
    leaves, structure = flatten(*reader.held)
    try:
        return leaves, structure, rows_of(leaves, structure)
    except InvalidArgumentError:
        reader.held, reader.skip = (), 0
        raise


class Split(Feed):
    """Cuts each batch into pieces of ceil(rows / replicas).

    Args:
        elements: Reads the batches.
        replicas: Of all workers.
        here: Of this worker.
        readers: Workers that read the same batches: pieces go to them in turn.
        reader: Which of them this is.
        check_order: See `Reader`.
        in_a_row: Whether its pieces are next to each other instead, after those of the workers
            before it.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        replicas: int,
        here: int,
        readers: int = 1,
        reader: int = 0,
        check_order: Callable[[], None] | None = None,
        in_a_row: bool = False,
    ) -> None:
        #: Whether a batch may be more than one step.
        self._has_rest = readers * here < replicas
        self._batches = Reader(elements, self._has_rest, check_order)
        self._replicas = replicas
        #: Pieces of a step, for all who read the batch.
        self._count = here * readers
        start = reader * here
        self._mine = slice(start, start + here) if in_a_row else slice(reader, None, readers)
        self._leaves: list[Any] = []
        self._structure: Structure | None = None
        #: Steps that are left of the batch: the pieces for all who read it.
        self._steps: list[list[Piece]] = []
        #: Rows of the batch that were used, as the state says it.
        self._done = 0

    def next_step(self) -> Step | None:
        if not self._steps and not self._read():
            return None
        pieces, *rest = self._steps
        mine = pieces[self._mine]
        assert self._structure is not None
        step = self._structure, [[leaf[a:b] for a, b in mine] for leaf in self._leaves]
        self._steps, self._done = rest, pieces[-1][1] if rest else 0
        return step

    def _read(self) -> bool:
        while True:
            batch = _read(self._batches)
            if batch is None:
                return False
            leaves, structure, rows = batch
            steps = ceil_steps(rows, self._replicas, self._count, self._batches.skip)
            done = self._batches.skip if self._has_rest and steps else 0
            self._leaves, self._structure, self._steps = leaves, structure, steps
            self._done, self._batches.skip, self._batches.held = done, 0, ()
            if steps:
                return True

    def get_state(self) -> dict[str, Any]:
        if self._steps:  # there is no place if it was interrupted before the only step of the batch
            return {"inputs": [self._batches.state_at(self._batches.place)], "rows": self._done}
        return {"inputs": [self._batches.get_state()], "rows": self._batches.skip}

    def set_state(self, state: dict[str, Any]) -> None:
        (place,) = inputs_of(state, 1)
        self._batches.set_state(place)
        self._steps, self._done = [], 0
        self._batches.skip = state["rows"]

    def close(self) -> None:
        self._batches.close()


class Balanced(Feed):
    """Cuts the stream of all rows into pieces whose sizes take turns.

    Args:
        elements: Reads the batches.
        sizes: Returns the sizes of the pieces that take turns, for a global batch of so many rows.
        here: Pieces to a step of this worker.
        readers: Workers that read the same batches: pieces go to them in turn.
        reader: Which of them this is.
        size: Rows of a global batch; None: as many as the first has.
        check_order: See `Reader`.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        sizes: Callable[[int], list[int]],
        here: int,
        readers: int = 1,
        reader: int = 0,
        size: int | None = None,
        check_order: Callable[[], None] | None = None,
    ) -> None:
        self._batches = Reader(elements, True, check_order)
        self._sizes_of, self._given_size = sizes, size
        self._set_size(size)
        #: Pieces of a step, for all who read the batches.
        self._count = here * readers
        self._mine = slice(reader, None, readers)
        #: Batches that are not used up.
        self._held: list[_Held] = []
        self._structure: Structure | None = None
        #: Pieces that were cut.
        self._pieces = 0

    def _set_size(self, size: int | None) -> None:
        self._size = size
        self._sizes: list[int] = [] if size is None else self._sizes_of(size)

    def next_step(self) -> Step | None:
        if not self._held and not self._hold():
            return None
        if not self._sizes:
            self._set_size(self._held[0].stop)
        numbers = range(self._pieces, self._pieces + self._count)
        wanted = [size_of_piece(self._sizes, number) for number in numbers]
        # All that is needed first: where that fails, nothing is taken.
        while sum(batch.stop - batch.start for batch in self._held) < sum(wanted):
            if not self._hold():
                break
        empty = [leaf[:0] for leaf in self._held[0].leaves]
        held = deque(self._held)
        assert self._structure is not None
        paths = self._structure.paths
        parts = [_taken(held, rows, empty, paths) for rows in wanted]
        step = self._structure, [list(column) for column in zip(*parts[self._mine], strict=True)]
        left = list(held)
        self._held, self._pieces = left, self._pieces + self._count
        return step

    def _hold(self) -> bool:
        """Hold one batch more that has rows."""
        while True:
            batch = _read(self._batches)
            if batch is None:
                return False
            leaves, structure, rows = batch
            start, held = min(self._batches.skip, rows), self._held
            if start < rows:
                held = [*held, _Held(self._batches.place, leaves, start, rows)]
            self._structure, self._held = structure, held
            self._batches.skip, self._batches.held = 0, ()
            if start < rows:
                return True

    def get_state(self) -> dict[str, Any]:
        state = {"size": self._size, "sizes": self._sizes, "pieces": self._pieces}
        if self._held:
            first = self._held[0]
            return {"inputs": [self._batches.state_at(first.place)], "rows": first.start, **state}
        return {"inputs": [self._batches.get_state()], "rows": self._batches.skip, **state}

    def set_state(self, state: dict[str, Any]) -> None:
        (place,) = inputs_of(state, 1)
        self._batches.set_state(place)
        self._held = []
        self._batches.skip = state["rows"]
        # One that was taken before anything was read has none: what was learned is forgotten.
        size = state.get("size")
        self._set_size(self._given_size if size is None else int(size))
        # Other replicas begin their turns at the first.
        self._pieces = state["pieces"] if state.get("sizes") == self._sizes else 0

    def close(self) -> None:
        self._batches.close()


class _Held(NamedTuple):
    """A batch that is not used up: the rows from `start` to `stop` are left."""

    place: Mark | None
    leaves: list[Any]
    start: int
    stop: int


def _taken(held: deque[_Held], wanted: int, empty: list[Any], paths: Sequence[str]) -> list[Any]:
    """Return the leaves of the next rows, of one batch or of several."""
    found: list[list[Any]] = []
    while wanted and held:
        batch = held.popleft()
        end = min(batch.stop, batch.start + wanted)
        found.append([leaf[batch.start : end] for leaf in batch.leaves])
        wanted -= end - batch.start
        if end < batch.stop:
            held.appendleft(batch._replace(start=end))
    if len(found) > 1:
        columns = zip(*found, strict=True)
        return [_joined(parts, path) for parts, path in zip(columns, paths, strict=True)]
    return found[0] if found else empty


def _joined(parts: Sequence[Any], path: str) -> Any:
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise InvalidArgumentError(
            f"rows of {component(path)} have shapes {', '.join(map(str, shapes))}, and "
            'split="balanced" joins what is left of a batch to the next one: pad all rows alike '
            '(padded_batch with padded_shapes), or use split="ceil"'
        )
    return np.concatenate(parts)


# --- What becomes of specs and batch sizes where rows are shared by replicas ----------------------


def check_is_batched(plan: Node) -> None:
    """Raise unless the elements have rows, as far as the plan tells without being run.

    Raises:
        InvalidArgumentError: A leaf is a scalar; the message names it.
    """
    spec = element_spec(plan)
    if spec is None:
        return
    leaves, structure = flatten(spec)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not leaf.shape:
            raise InvalidArgumentError(no_batch(path, f"a scalar ({leaf})"))


def check_keeps_order(plan: Node) -> None:
    """Raise unless each reading gives the same batches in the same order after a place.

    Raises:
        FailedPreconditionError: It does not: the batch of which a part was used may come at any
            time, or elsewhere.
    """
    if not all(source.has_order for source in sources(plan)):
        raise FailedPreconditionError(
            "there is no state here: a part of a batch was used, and the rest of it is for the "
            "next step, but the data service gives batches in no order, so that another may be the "
            "next one. Read with `ordered=True`, make batches for one replica in "
            "distribute_datasets_from_function, or ask after a step that used its batches up"
        )


def global_batch_size(plan: Node) -> int | None:
    """Return how many rows the batches of a plan have, but for smaller last ones; None: unknown."""
    found = fold(plan, _size_at, once=True)
    if found is not None:
        return found
    spec = element_spec(plan)
    if spec is None:
        return None
    leaves, _ = flatten(spec)
    rows = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None


def _size_at(node: Node, inputs: list[int | None]) -> int | None:
    if isinstance(node, Batch | PaddedBatch):
        return node.size
    if isinstance(node, Zip):
        return inputs[0] if len(set(inputs)) == 1 else None
    keeps_rows = node.is_transparent or isinstance(node, Repeat | Shuffle | Skip | Take)
    return inputs[0] if keeps_rows and len(inputs) == 1 else None


def spec_of_pieces(spec: Spec, replicas: int | None) -> Spec:
    """Return the spec of what one of so many replicas gets of each batch; None: lengths vary."""

    def piece(leaf: ArraySpec) -> ArraySpec:
        rows = leaf.shape[0] if leaf.shape else None
        fits = replicas is not None and rows is not None and rows % replicas == 0
        return _with_rows(leaf, rows // replicas if fits and rows and replicas else None)

    return map_leaves(piece, spec)


def spec_in_turn(spec: Spec) -> Spec:
    """Return the spec of elements that a replica gets as they are, or without rows."""
    return map_leaves(lambda leaf: _with_rows(leaf, None), spec)


def spec_of_step(structure: Structure, columns: Sequence[Sequence[Any]]) -> Spec:
    """Return what a replica gets in a step that has rows, and in others with any number of them."""
    return spec_in_turn(unflatten(structure, [leaf_spec(values[0]) for values in columns]))


def spec_in_form_of(own: Spec | None, spec: Spec) -> Spec:
    """Return a spec that came from another process, in this one's classes where they are known.

    Those that no module holds come as others of that name, which have fields and nothing else.
    """
    if own is None:
        return spec
    form, (leaves, theirs) = flatten(own)[1], flatten(spec)
    return unflatten(form, leaves) if form.paths == theirs.paths else spec


def _with_rows(leaf: ArraySpec, rows: int | None) -> ArraySpec:
    return ArraySpec((rows, *leaf.shape[1:]), leaf.dtype, leaf.name) if leaf.shape else leaf


def empty_step(spec: Spec, replicas: int) -> Step:
    """Return a step in which no replica gets a row: axes of unknown length are 0, as is the first.

    A scalar has no rows; it is 0 or empty.
    """
    leaves, structure = flatten(spec)
    return structure, [[_empty(leaf)] * replicas for leaf in leaves]


def _empty(leaf: ArraySpec) -> Any:
    if leaf.dtype in (BYTES, STR):
        nothing: Any = b"" if leaf.dtype == BYTES else ""
        return np.empty(_shape(leaf), object) if leaf.shape else nothing
    made = np.zeros(_shape(leaf), leaf.dtype)
    return made if leaf.shape else made[()]


def _shape(leaf: ArraySpec) -> tuple[int, ...]:
    return (0, *[length or 0 for length in leaf.shape[1:]]) if leaf.shape else ()
