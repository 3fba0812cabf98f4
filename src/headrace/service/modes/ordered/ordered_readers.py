"""Readers of an ordered consumer: of its elements only, or of its part of the whole stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.ordering import ShardBlocks, ShardElements, Skip, Take
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.serialize import load_plan
from headrace.plan.source import INFINITE, Position, Reader
from headrace.plan.traverse import cardinality
from headrace.plan.user_function import UserFunction
from headrace.rewrites.partition import partition_plan
from headrace.service.client.source import RemoteSource
from headrace.service.modes.coordinated_reads.round_shaping import (
    RowBalancer,
    shape_round,
    share_remainder,
)

__all__ = [
    "ConsumerConfig",
    "ConsumerReader",
    "FullStreamReader",
    "drops_remainder",
    "make_consumer_plan",
]


@dataclass(frozen=True)
class ConsumerConfig:
    """Which consumer reads, of how many."""

    index: int
    num_consumers: int
    remainder: str
    cost_fn: bytes = field(default=b"", repr=False)
    """Pickled plan of the cost function by which rows are redistributed; empty for none."""
    num_readers: int = 1
    """Number of processes that read this consumer's elements, each through another job."""


class RaisedErrors(NamedTuple):
    """Errors of the current round that were raised and are not raised again."""

    element: int
    """The element of the round that the last error came before or in place of."""
    errors: int

    @classmethod
    def from_position(cls, position: Position) -> RaisedErrors:
        """Return the errors recorded in a position."""
        return cls(*(position or {}).get("raised", _NONE))

    def add_to_position(self, position: Position) -> Position:
        """Return the position before the round with these errors recorded, if there are any."""
        return {**position, "raised": list(self)} if position and self.errors else position


_NONE = RaisedErrors(0, 0)


class FullStreamReader:
    """Reads the whole stream round by round, and yields this consumer's elements.

    With a cost function, the rows of each round are redistributed. Every consumer computes the same
    division. If that fails, the error takes the place of the round's element for each consumer.

    Args:
        input: The whole stream, in order, from the position before a round.
        consumer: Which consumer this is.
        raised: Errors of that round to skip.
    """

    def __init__(
        self, input: Reader, consumer: ConsumerConfig, raised: RaisedErrors = _NONE
    ) -> None:
        self._input, self._consumer = input, consumer
        self._balancer = _load_balancer(consumer.cost_fn) if consumer.cost_fn else None
        #: Elements of the current round, and the position before them.
        self._round: list[Any] = []
        self._position: Position = input.get_position()
        self._raised = raised
        self._errors_to_skip = raised.errors
        self._chunk: Chunk | None = None
        self._rows: list[Any] = []
        self._offset = 0
        self._has_ended = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements, or None at the end."""
        elements: list[Any] = []
        consumers = self._consumer.num_consumers
        if self._balancer is not None:
            limit = 1  # no element is lost if the next round fails
        self._fetch(consumers * limit)
        positions: list[Position] = [self.get_position()]
        while len(elements) < limit:
            if not self._fetch(consumers * (limit - len(elements))):
                break
            chunk = self._chunk
            assert chunk is not None
            while self._offset < chunk.size and len(elements) < limit:
                self._round.append(self._rows[self._offset])
                self._offset += 1
                if len(self._round) == consumers:
                    elements += self._end_round(chunk.state_at(self._offset), positions)
            if elements:
                break  # later elements may require a wait
        if not elements and self._has_ended and self._round:
            if self._consumer.remainder != "drop":
                elements += self._end_round(self._input.get_position(), positions)
            self._round = []
        if not elements:
            return None
        return Chunk.of_rows(elements, lambda index: positions[index])

    def _end_round(self, position: Position, positions: list[Position]) -> list[Any]:
        """Return this consumer's element of the current round, and begin the next one.

        Args:
            position: Position after the round.
            positions: List to append it to.
        """
        batches, consumer = self._round, self._consumer
        self._begin_round(position)  # also if an error takes the place of its element
        positions.append(position)
        shaped = shape_round(batches, consumer.num_consumers, consumer.remainder, self._balancer)
        return [shaped[consumer.index]]

    def _begin_round(self, position: Position) -> None:
        self._round, self._position = [], position
        self._raised, self._errors_to_skip = _NONE, 0

    def _fetch(self, limit: int) -> bool:
        if self._chunk is not None and self._offset < self._chunk.size:
            return True
        if not self._has_ended:
            self._chunk, self._offset = self._read_input(limit), 0
            self._has_ended = self._chunk is None
            self._rows = [] if self._chunk is None else [*self._chunk.rows()]
            if self._position is None and self._chunk is not None:
                self._position = self._chunk.state_at(0)
        return not self._has_ended

    def _read_input(self, limit: int) -> Chunk | None:
        while True:
            position_before = self._input.get_position()
            try:
                return self._input.read(limit)
            except Exception:
                position_after = self._input.get_position()
                if position_after == position_before:
                    raise  # the error belongs to no element
                if len(self._round) <= self._raised.element and self._errors_to_skip:
                    self._errors_to_skip -= 1
                    continue
                if self._round:
                    self._raised = RaisedErrors(len(self._round), self._raised.errors + 1)
                else:
                    self._begin_round(position_after)
                raise

    def get_position(self) -> Position:
        """Return the position before the next round."""
        return self._raised.add_to_position(self._position)

    def close(self) -> None:
        """Close the input."""
        self._has_ended, self._chunk, self._round = True, None, []
        self._input.close()


def _load_balancer(cost_fn: bytes) -> RowBalancer:
    step = load_plan(cost_fn)
    assert isinstance(step, Map), step
    function = UserFunction(step.fn, "cost_fn", contain_exits=False)
    return RowBalancer(function, numbers_by_round=True)


class ConsumerReader:
    """Reads only this consumer's elements, and the remainder at the end.

    Args:
        make_source: Returns the source of a derived plan, given the plan and whether the job is
            named for it.
        consumer: Which consumer this is.
        plan: The plan as a single process would read it.
        position: Position to start from.
        epoch: The epoch.
        seed: Seed to start with if there is no position.
    """

    def __init__(
        self,
        make_source: Callable[[Node, bool], RemoteSource],
        consumer: ConsumerConfig,
        plan: Node,
        position: Position,
        epoch: tuple[int, ...],
        seed: int,
    ) -> None:
        self._make_source, self._consumer, self._plan = make_source, consumer, plan
        self._epoch = epoch
        self._has_blocks = _rows_per_element(plan) > 1
        self._partition_mode = partition_plan(plan, ordered=True).mode
        self._keeps_seed = position is not None
        self._seed = seed if position is None else position["seed"]
        #: Whether this is the part from the start, which the job is named for.
        self._is_at_start = position is None
        #: Number of elements of the plan before the next round, and the raised errors of that
        #: round.
        self._element, self._raised = 0, _NONE
        if position is not None:
            self._element, num_errors = self._parse_position(_find_splits(plan), position)
            self._raised = (
                RaisedErrors(0, num_errors) if num_errors else RaisedErrors.from_position(position)
            )
        #: Number of elements of the plan before the part that is read.
        self._first = self._element
        self._is_at_beginning = position is None
        self._reader: Reader | None = None
        #: Elements that are too few for a round, once they are read.
        self._remainder: list[Any] | None = None
        self._has_ended = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements, or None at the end."""
        if self._has_ended:
            return None
        if self._remainder is not None:
            return self._read_remainder(self._remainder)
        if self._reader is None:
            raised = self._raised
            num_errors = raised.errors if raised.element == self._consumer.index else 0
            self._reader = self._open(self._consumer_plan(), self._is_at_start, num_errors)
        reader = self._reader
        try:
            chunk = reader.read(limit)
        except Exception:
            self._take_seed()
            self._advance_to(reader.get_position())
            raise
        self._take_seed()
        if chunk is None:
            self._advance_to(reader.get_position())  # there may be errors after the last element
            return self._begin_remainder()
        self._advance_to(chunk.state_at(chunk.size))
        states = chunk.states
        return chunk.with_metadata(None).with_states(
            lambda index: self._make_position(*self._find_round(states(index)))
        )

    def _consumer_plan(self) -> Node:
        """Return a plan of this consumer's remaining elements, without the remainder."""
        total, consumers = cardinality(self._plan), self._consumer.num_consumers
        stop = None
        if total != INFINITE:
            stop = self._element + max(0, total - self._element) // consumers * consumers
        return make_consumer_plan(
            self._plan, consumers, self._consumer.index, start=self._element, stop=stop
        )

    def _begin_remainder(self) -> Chunk | None:
        """Start to read the elements that are too few for a round."""
        total = cardinality(self._plan)
        self._close_reader()
        if total == INFINITE or self._element >= total or self._consumer.remainder == "drop":
            self._has_ended = True
            return None
        # Errors of earlier elements must not be raised again, so the elements are skipped below a
        # batch.
        self._reader = self._open(make_consumer_plan(self._plan, 1, 0, start=self._element), False)
        self._remainder = []
        return self._read_remainder(self._remainder)

    def _read_remainder(self, elements: list[Any]) -> Chunk | None:
        """Return this consumer's share of the elements that are too few for a round."""
        assert self._reader is not None
        while (chunk := self._reader.read(self._consumer.num_consumers)) is not None:
            elements += chunk.rows()
        self._close_reader()
        self._has_ended = True
        first, total = self._element, cardinality(self._plan)
        self._element, self._raised = total, _NONE
        if not elements:
            return None
        row = share_remainder(elements, self._consumer.num_consumers, self._consumer.remainder)[
            self._consumer.index
        ]
        return Chunk.of_rows([row], lambda index: self._make_position(total if index else first))

    def _open(self, plan: Node, is_named: bool, num_errors: int = 0) -> Reader:
        source = self._make_source(plan, is_named).with_seed(self._seed)
        # A position without splits is the start with a given seed.
        position = None
        if self._keeps_seed:
            position = {
                "partition_mode": partition_plan(plan, ordered=True).mode,
                "seed": self._seed,
            }
            if num_errors:
                position["splits"] = {"split": 0, "ordinal": 0, "failed": num_errors}
        return source.open(0, 1, position, pass_number=self._epoch)

    def _take_seed(self) -> None:
        """Record the seed of the first part, for the remainder and for positions."""
        if not self._keeps_seed and self._reader is not None:
            position = self._reader.get_position()
            if position is not None:
                self._seed, self._keeps_seed = position["seed"], True

    def _advance_to(self, position: Position) -> None:
        """Record how far the part was read."""
        if position is not None and position.get("splits") is not None:
            self._element, self._raised = self._find_round(position)
            self._is_at_beginning = False

    def _find_round(self, position: dict[str, Any]) -> tuple[int, RaisedErrors]:
        """Return the round after a position in the part, and the errors raised in it."""
        rounds, num_errors = self._parse_position(None, position)
        element = self._first + rounds * self._consumer.num_consumers
        return element, RaisedErrors(self._consumer.index, num_errors) if num_errors else _NONE

    def _parse_position(
        self, read_splits: ReadSplits | None, position: dict[str, Any]
    ) -> tuple[int, int]:
        """Return the number of elements before a position, and of raised errors of the next one.

        Args:
            read_splits: Step that converts a position saved by a single process, or None.
            position: The position.
        """
        splits = position["splits"]
        if read_splits is not None and not (isinstance(splits, dict) and "split" in splits):
            splits = read_splits.convert_state(splits)
        if splits is None:
            raise FailedPreconditionError(
                "the state was saved within a split, and does not record how many elements of the "
                "split were read; restore it in a single process"
            )
        split, num_errors = int(splits["split"]), int(splits.get("failed", 0))
        # A failed row has its element number. The remaining rows of a failed batch are still to
        # come.
        is_past = splits.get("ordinal") or (num_errors and not self._has_blocks)
        return (split + 1, 0) if is_past else (split, num_errors)

    def _make_position(self, element: int, raised: RaisedErrors = _NONE) -> Position:
        split = {"split": element, "ordinal": 0}
        return raised.add_to_position(
            {"splits": split, "partition_mode": self._partition_mode, "seed": self._seed}
        )

    def get_position(self) -> Position:
        """Return the position before the next round."""
        return None if self._is_at_beginning else self._make_position(self._element, self._raised)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def close(self) -> None:
        """Close the input."""
        self._has_ended = True
        self._close_reader()


def make_consumer_plan(
    plan: Node, consumers: int, index: int, *, start: int = 0, stop: int | None = None
) -> Node:
    """Return a plan of every n-th element, such that workers compute only those.

    Args:
        plan: A plan that satisfies `ordered_consumers.is_divisible`.
        consumers: Number of consumers.
        index: Consumer of this part.
        start: First shared element.
        stop: End of the shared elements (exclusive); None for no end.
    """
    nodes_above: list[Node] = []
    while plan.one_to_one:
        nodes_above.append(plan)
        (plan,) = plan.inputs
    block_size = _rows_per_element(plan)
    if block_size > 1:
        nodes_above.append(plan)
        (plan,) = plan.inputs
    if stop is not None:
        plan = Take(input=plan, count=stop * block_size)
    if start:
        plan = Skip(input=plan, count=start * block_size)
    if block_size > 1:
        plan = ShardBlocks(input=plan, num_shards=consumers, index=index, block_size=block_size)
    else:
        plan = ShardElements(input=plan, num_shards=consumers, index=index)
    for node in reversed(nodes_above):
        plan = node.with_inputs([plan])
    return plan


def drops_remainder(plan: Node) -> bool:
    """Return whether rows that are too few for a last batch are dropped."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return isinstance(plan, Batch | PaddedBatch) and plan.drop_remainder


def _rows_per_element(plan: Node) -> int:
    """Return the number of rows per element of a plan accepted by `is_divisible`."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return plan.size if isinstance(plan, Batch | PaddedBatch) else 1


def _find_splits(plan: Node) -> ReadSplits:
    client_stage = partition_plan(plan, ordered=True).client_stage
    assert isinstance(client_stage, ReadSplits)
    return client_stage
