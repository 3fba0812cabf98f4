"""Where a process's rows of each step come from: a dataset, or one that a strategy distributes.

    DatasetInputSteps       batches of a dataset; cut into shares as a sharding says
    ReplicaSteps       what a distributed dataset gives the replicas of this process

Rule 1. A dataset's batches are those of all processes together. Where all read the same ones, each
        uses its shares of each (`shares_batches`). Else each has its own, as it reads files of its
        own, and makes as many steps of a batch as there are pipelines.
Rule 2. A state is the place of the dataset, and how many rows of the batch there are used. It does
        not say how they were shared, so another sharding goes on from it.
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
"""Where a step begins: a place of the dataset, and rows of the batch there that were used. None:
where the dataset stands now."""


class InputStep(NamedTuple):
    """The rows of one step that this process has.

    Attributes:
        structure: Of the element.
        columns: For each leaf its values, one for each share of this process.
        rows: How many rows each share has that is known here, by the share's number. Empty: nobody
            needs to know.
        whole: The leaves, where this process has all shares and they are equal.
    """

    structure: Structure
    columns: list[list[Any]]
    rows: dict[int, int]
    whole: list[Any] | None = None


class InputSteps(ABC):
    """Gives a process its rows, step by step."""

    @property
    @abstractmethod
    def can_read_ahead(self) -> bool:
        """Whether steps can be read before those that came first are used."""

    @property
    def is_ready(self) -> bool:
        """Whether the next step is there without a wait, if that is known."""
        return False

    @abstractmethod
    def next(self) -> InputStep | None:
        """Return the next step, or None at the end."""

    @abstractmethod
    def get_position(self) -> StepPosition:
        """Return where the next step begins."""

    @abstractmethod
    def rewind(self, position: StepPosition) -> None:
        """Have the steps after a place come again."""

    @abstractmethod
    def get_state(self, position: StepPosition) -> dict[str, Any]:
        """Return the state of a place."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where a state was taken."""

    def accepts_state(self, state: dict[str, Any]) -> bool:
        """Say whether `set_state` takes a state, which as many read as it has streams."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release threads and files. May be called twice."""


class DatasetInputSteps(InputSteps):
    """Shares of a dataset's batches.

    Args:
        elements: Reads the batches.
        layout: Who needs which rows.
        same_batches: Whether all processes read the same batches.
        keep_whole: Whether elements are used as they are, and need no rows.
    """

    def __init__(
        self, elements: LookaheadIterator, layout: BatchLayout, same_batches: bool, keep_whole: bool
    ) -> None:
        self._elements = elements
        self._layout = layout
        self._same_batches = same_batches
        self._keep_whole = keep_whole
        pipelines = len(layout.pipelines)
        #: How many streams of a state there are (`distribute.streams`), and which of them is here.
        self._streams, self._stream = (1, 0) if same_batches else (pipelines, layout.pipeline_index)
        self._structure: Structure | None = None
        self._leaves: list[Any] = []
        #: Steps of the batch in hand that are left: a piece for each share that is known.
        self._remaining_steps: list[list[Piece]] = []
        #: The place of the batch in hand, and how many of its rows were used.
        self._batch_position: IteratorPosition | None = None
        self._consumed_rows = 0
        #: Rows to leave out of the next batch, which were used before the state was saved.
        self._rows_to_skip = 0

    @property
    def can_read_ahead(self) -> bool:
        return self._elements.can_read_ahead

    @property
    def is_ready(self) -> bool:
        return bool(self._remaining_steps) or self._elements.is_ready

    def next(self) -> InputStep | None:
        if not self._remaining_steps:
            self._leaves = []  # their memory can be used again for what is waited for
            if self.can_read_ahead:
                self._batch_position = self._elements.get_position()
            place = self._elements.get_state() if self._rows_to_skip else None
            try:
                for element in self._elements:
                    self._leaves, self._structure = flatten(element)
                    break
                else:
                    return None
            except Exception:
                if place is not None and self._elements.get_state() != place:
                    self._rows_to_skip = 0  # those rows were of the element that is lost
                raise
            if self._keep_whole and not self._rows_to_skip:
                leaves = self._leaves if len(self._layout.processes) == 1 else None
                return InputStep(self._structure, [[leaf] for leaf in self._leaves], {}, leaves)
            self._remaining_steps = self._split_batch(self._count_rows())
            self._rows_to_skip = 0
        pieces = self._remaining_steps.pop(0)
        self._consumed_rows = pieces[-1][1] if self._remaining_steps else 0
        layout = self._layout
        known = range(layout.num_shards) if self._same_batches else layout.local_pipeline.shards
        mine = dict(zip(known, pieces, strict=True))
        assert self._structure is not None
        rows = {shard: stop - start for shard, (start, stop) in mine.items()}
        is_whole = len(layout.processes) == 1 and len(set(rows.values())) == 1
        begin, end = pieces[0][0], pieces[-1][1]
        return InputStep(
            self._structure,
            [[leaf[slice(*mine[shard])] for shard in layout.local_shards] for leaf in self._leaves],
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
        mark, rows = position
        self._elements.rewind(mark)
        self._remaining_steps, self._consumed_rows, self._rows_to_skip = [], 0, rows

    def get_state(self, position: StepPosition) -> dict[str, Any]:
        if position is not None:
            mark, rows = position
            self._elements.mark_consumed(mark)
        elif self._consumed_rows:
            raise FailedPreconditionError(
                f"{self._consumed_rows} rows of a batch are used and others are not, and what "
                "comes from a "
                "data service has no place there: take the state after a step that ends a batch of "
                "the dataset"
            )
        else:
            rows = self._rows_to_skip
        streams: list[Any] = [None] * self._streams
        streams[self._stream] = {"inputs": [self._elements.get_state()], "rows": rows}
        return {"streams": streams}

    def set_state(self, state: dict[str, Any]) -> None:
        place = state["streams"][self._stream]
        if place is None:
            raise FailedPreconditionError(
                "the state lacks the place of what this process reads: it was taken by one "
                "process, without the others"
            )
        inputs = place["inputs"]
        if len(inputs) != 1:
            raise FailedPreconditionError(
                f"the state has the places of {len(inputs)} datasets, one for each replica, and "
                "here is one; restore it where it was saved"
            )
        self._elements.set_state(inputs[0])
        self._remaining_steps, self._consumed_rows, self._rows_to_skip = [], 0, place["rows"]

    def accepts_state(self, state: dict[str, Any]) -> bool:
        return len(state["streams"]) == self._streams

    def close(self) -> None:
        self._remaining_steps, self._leaves = [], []
        self._elements.close()


class DistributedInputSteps(InputSteps):
    """What a distributed dataset gives the replicas of this process: a share for each.

    It is read no further than it is used: it reads ahead by itself.

    Args:
        steps: What the strategy's replicas get.
        layout: Who needs which rows.
        keep_whole: Whether elements are used as they are, and need no rows.
        replica_indices: Which of the local replicas' values this process uses; None: all.
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
            here = self._layout.local_shards
            if any(len(column) != len(here) for column in columns):
                raise InvalidArgumentError(
                    f"the strategy has {len(columns[0])} replicas in this process, and the "
                    f"sharding cuts a batch into {len(here)} shares for its devices: use as many"
                )
            if self._keep_whole:
                return InputStep(structure, columns, {})
            rows = shard_row_counts(structure, columns)
            return InputStep(structure, columns, dict(zip(here, rows, strict=True)))
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
