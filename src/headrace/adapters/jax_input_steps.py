"""Input of each step: the rows of this process, from a dataset or a strategy's distributed dataset.

    DatasetInputSteps      splits batches of a dataset into the shards of a sharding
    DistributedInputSteps  reads the values of this process's replicas

Rule 1. A dataset's batches are global: they contain the rows of all processes. If all processes
        read the same batches (`same_batches`), each uses its shards of every batch. Otherwise each
        pipeline reads separate batches, for instance from separate files, and divides each batch
        into one step per pipeline.
Rule 2. A state consists of the dataset's position and the number of rows consumed of the batch
        there. It does not depend on the sharding, so it can be restored with another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace.data.lookahead import IteratorPosition, LookaheadIterator
from headrace.distribute.iterator import VERSION, DistributedIterator
from headrace.distribute.rebatch import Piece, ceil_split, ceil_steps
from headrace.distribute.values import PerReplica
from headrace.element.structure import Structure, flatten
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks.batch_shards import shard_row_counts
from headrace.frameworks.jax_global_arrays import BatchLayout

__all__ = ["DatasetInputSteps", "DistributedInputSteps", "InputStep", "InputSteps", "StepPosition"]

StepPosition: TypeAlias = tuple[IteratorPosition, int] | None
"""Start of a step: a position of the dataset and the number of rows consumed of the batch there.
None stands for the dataset's current position."""


class InputStep(NamedTuple):
    """The rows of one step on this process.

    Attributes:
        structure: Structure of the element.
        columns: For each leaf its values, one for each local shard.
        rows: Row count of each shard that is known here, by shard index; empty if not needed.
        whole: The complete leaves, if this process has all shards and they are of equal size.
    """

    structure: Structure
    columns: list[list[Any]]
    rows: dict[int, int]
    whole: list[Any] | None = None


class InputSteps(ABC):
    """Source of a process's rows, step by step."""

    @property
    @abstractmethod
    def can_read_ahead(self) -> bool:
        """Whether steps can be read before earlier ones are consumed."""

    @property
    def is_ready(self) -> bool:
        """Whether the next step is known to be available without waiting."""
        return False

    @abstractmethod
    def next(self) -> InputStep | None:
        """Return the next step, or None at the end."""

    @abstractmethod
    def get_position(self) -> StepPosition:
        """Return the position of the next step."""

    @abstractmethod
    def rewind(self, position: StepPosition) -> None:
        """Continue with the step at a position again."""

    @abstractmethod
    def get_state(self, position: StepPosition) -> dict[str, Any]:
        """Return the state of a position."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""

    def accepts_state(self, state: dict[str, Any]) -> bool:
        """Return whether `set_state` accepts a state, which depends on its number of streams."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release threads and files. Idempotent."""


class DatasetInputSteps(InputSteps):
    """Shards of a dataset's batches.

    Args:
        elements: Iterator over the batches.
        layout: Assignment of rows to processes.
        same_batches: Whether all processes read the same batches.
        keep_whole: Whether elements are used unchanged, and need not have rows.
    """

    def __init__(
        self, elements: LookaheadIterator, layout: BatchLayout, same_batches: bool, keep_whole: bool
    ) -> None:
        self._elements = elements
        self._layout = layout
        self._same_batches = same_batches
        self._keep_whole = keep_whole
        pipelines = len(layout.pipelines)
        #: Number of streams in a state (`distribute.input_streams`), and the index of this one.
        self._streams, self._stream = (1, 0) if same_batches else (pipelines, layout.pipeline_index)
        self._structure: Structure | None = None
        self._leaves: list[Any] = []
        #: Remaining steps of the current batch: the row range of each known shard.
        self._remaining_steps: list[list[Piece]] = []
        #: Position of the current batch, and number of its rows that were consumed.
        self._batch_position: IteratorPosition | None = None
        self._consumed_rows = 0
        #: Rows of the next batch that were consumed before the state was saved.
        self._rows_to_skip = 0

    @property
    def can_read_ahead(self) -> bool:
        return self._elements.can_read_ahead

    @property
    def is_ready(self) -> bool:
        return bool(self._remaining_steps) or self._elements.is_ready

    def next(self) -> InputStep | None:
        if not self._remaining_steps:
            self._leaves = []  # releases their memory for the next batch
            if self.can_read_ahead:
                self._batch_position = self._elements.get_position()
            state_before = self._elements.get_state() if self._rows_to_skip else None
            try:
                for element in self._elements:
                    self._leaves, self._structure = flatten(element)
                    break
                else:
                    return None
            except Exception:
                if state_before is not None and self._elements.get_state() != state_before:
                    self._rows_to_skip = 0  # they belong to the element that failed
                raise
            if self._keep_whole and not self._rows_to_skip:
                leaves = self._leaves if len(self._layout.processes) == 1 else None
                return InputStep(self._structure, [[leaf] for leaf in self._leaves], {}, leaves)
            self._remaining_steps = self._split_batch(self._count_rows())
            self._rows_to_skip = 0
        pieces = self._remaining_steps.pop(0)
        self._consumed_rows = pieces[-1][1] if self._remaining_steps else 0
        layout = self._layout
        shards = range(layout.num_shards) if self._same_batches else layout.local_pipeline.shards
        row_ranges = dict(zip(shards, pieces, strict=True))
        assert self._structure is not None
        rows = {shard: stop - start for shard, (start, stop) in row_ranges.items()}
        is_whole = len(layout.processes) == 1 and len(set(rows.values())) == 1
        begin, end = pieces[0][0], pieces[-1][1]
        return InputStep(
            self._structure,
            [
                [leaf[slice(*row_ranges[shard])] for shard in layout.local_shards]
                for leaf in self._leaves
            ],
            rows,
            [leaf[begin:end] for leaf in self._leaves] if is_whole else None,
        )

    def _count_rows(self) -> int:
        assert self._structure is not None
        return shard_row_counts(self._structure, [[leaf] for leaf in self._leaves])[0]

    def _split_batch(self, rows: int) -> list[list[Piece]]:
        skip = min(self._rows_to_skip, rows)
        if self._same_batches:
            pieces = ceil_split(rows - skip, self._layout.num_shards)
            return [[(start + skip, stop + skip) for start, stop in pieces]]
        count = len(self._layout.local_pipeline.shards)
        steps = ceil_steps(rows, self._layout.num_shards, count, skip)
        return steps or [[(rows, rows)] * count]

    def get_position(self) -> StepPosition:
        if not self.can_read_ahead:
            return None
        if self._consumed_rows:
            assert self._batch_position is not None
            return self._batch_position, self._consumed_rows
        return self._elements.get_position(), self._rows_to_skip

    def rewind(self, position: StepPosition) -> None:
        if position is None:
            return
        iterator_position, rows = position
        self._elements.rewind(iterator_position)
        self._remaining_steps, self._consumed_rows, self._rows_to_skip = [], 0, rows

    def get_state(self, position: StepPosition) -> dict[str, Any]:
        if position is not None:
            iterator_position, rows = position
            self._elements.mark_consumed(iterator_position)
        elif self._consumed_rows:
            raise FailedPreconditionError(
                f"only {self._consumed_rows} rows of the current batch are consumed, and an "
                "iterator over a data service has no position within a batch: take the state "
                "after a step that completes a batch of the dataset"
            )
        else:
            rows = self._rows_to_skip
        streams: list[Any] = [None] * self._streams
        streams[self._stream] = {"inputs": [self._elements.get_state()], "rows": rows}
        return {"streams": streams}

    def set_state(self, state: dict[str, Any]) -> None:
        stream = state["streams"][self._stream]
        if stream is None:
            raise FailedPreconditionError(
                "the state has no position for the rows that this process reads: it was taken by "
                "one process without the others"
            )
        inputs = stream["inputs"]
        if len(inputs) != 1:
            raise FailedPreconditionError(
                f"the state has positions of {len(inputs)} datasets, one for each replica, but "
                "this iterator reads one; restore it with the configuration that saved it"
            )
        self._elements.set_state(inputs[0])
        self._remaining_steps, self._consumed_rows, self._rows_to_skip = [], 0, stream["rows"]

    def accepts_state(self, state: dict[str, Any]) -> bool:
        return len(state["streams"]) == self._streams

    def close(self) -> None:
        self._remaining_steps, self._leaves = [], []
        self._elements.close()


class DistributedInputSteps(InputSteps):
    """Values of this process's replicas from a distributed dataset, one shard for each.

    The dataset reads ahead itself, so steps are read only when they are used.

    Args:
        steps: Iterator over the replicas' values.
        layout: Assignment of rows to processes.
        keep_whole: Whether elements are used unchanged, and need not have rows.
        replica_indices: Indices of the local replicas whose values this process uses; None uses
            all.
    """

    def __init__(
        self,
        steps: DistributedIterator,
        layout: BatchLayout,
        keep_whole: bool,
        replica_indices: Sequence[int] | None = None,
    ) -> None:
        self._steps = steps
        self._layout = layout
        self._keep_whole = keep_whole
        self._replica_indices = replica_indices

    @property
    def can_read_ahead(self) -> bool:
        return False

    def next(self) -> InputStep | None:
        for element in self._steps:
            leaves, structure = flatten(element)
            columns = [
                list(leaf.values) if isinstance(leaf, PerReplica) else [leaf] for leaf in leaves
            ]
            if self._replica_indices is not None:
                columns = [
                    [column[number] for number in self._replica_indices] for column in columns
                ]
            shards = self._layout.local_shards
            if any(len(column) != len(shards) for column in columns):
                raise InvalidArgumentError(
                    f"the strategy has {len(columns[0])} replicas in this process, but the "
                    f"sharding splits a batch into {len(shards)} shards for its devices: use the "
                    "same number of both"
                )
            if self._keep_whole:
                return InputStep(structure, columns, {})
            rows = shard_row_counts(structure, columns)
            return InputStep(structure, columns, dict(zip(shards, rows, strict=True)))
        return None

    def get_position(self) -> StepPosition:
        return None

    def rewind(self, position: StepPosition) -> None:
        pass

    def get_state(self, position: StepPosition) -> dict[str, Any]:
        state: dict[str, Any] = self._steps.get_state()["distributed"]
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        self._steps.set_state({"version": VERSION, "distributed": state})

    def close(self) -> None:
        self._steps.close()
