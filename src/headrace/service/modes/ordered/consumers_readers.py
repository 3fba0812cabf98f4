"""Readers of one of several consumers, in order: of its own elements, or of the whole stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch
from headrace.plan.node import Node
from headrace.plan.ordering import Shard, ShardBlocks, Skip, Take
from headrace.plan.source import INFINITE, Position, Reader
from headrace.plan.traverse import cardinality
from headrace.plan.units import Units
from headrace.rewrites.cut import cut
from headrace.service.client.source import RemoteSource
from headrace.service.modes.coordinated_reads.round_shape import shared_out

__all__ = ["PartReader", "Turn", "WholeReader", "drops_remainder", "own_part"]


@dataclass(frozen=True)
class Turn:
    """Which consumer reads, of how many."""

    index: int
    consumers: int
    remainder: str


class Raised(NamedTuple):
    """Errors of the round that is begun, which were raised and are not raised again."""

    element: int
    """Which one of the round the last of them came before, or in place of."""
    errors: int

    @classmethod
    def of(cls, position: Position) -> Raised:
        """Return what a place says."""
        return cls(*(position or {}).get("raised", _NONE))

    def said_in(self, place: Position) -> Position:
        """Return a place that says so: the place before the round, for whoever cannot use it."""
        return {**place, "raised": list(self)} if place and self.errors else place


_NONE = Raised(0, 0)


class WholeReader:
    """Reads the whole stream, round by round, and gives this consumer's elements.

    Args:
        input: The whole stream, in order, from the place before a round.
        turn: Which consumer it is.
        raised: Errors of that round which are passed over.
    """

    def __init__(self, input: Reader, turn: Turn, raised: Raised = _NONE) -> None:
        self._input, self._turn = input, turn
        #: Elements of the round that is begun, and the place before them.
        self._round: list[Any] = []
        self._place: Position = input.get_position()
        self._raised = raised
        self._passes_over = raised.errors
        self._waiting: Chunk | None = None
        self._rows: list[Any] = []
        self._offset = 0
        self._has_ended = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end."""
        found: list[Any] = []
        consumers = self._turn.consumers
        self._have_elements(consumers * limit)
        places: list[Position] = [self.get_position()]
        while len(found) < limit:
            if not self._have_elements(consumers * (limit - len(found))):
                break
            chunk = self._waiting
            assert chunk is not None
            while self._offset < chunk.size and len(found) < limit:
                self._round.append(self._rows[self._offset])
                self._offset += 1
                if len(self._round) == consumers:
                    found.append(self._round[self._turn.index])
                    self._end_round(chunk.state_at(self._offset), places)
            if found:
                break  # what comes next may have to be waited for
        if not found and self._has_ended and self._round:
            if self._turn.remainder != "drop":
                last = shared_out(self._round, consumers, self._turn.remainder)
                found.append(last[self._turn.index])
                self._end_round(self._input.get_position(), places)
            self._round = []
        if not found:
            return None
        return Chunk.of_rows(found, lambda index: places[index])

    def _end_round(self, place: Position, places: list[Position]) -> None:
        self._begin_round(place)
        places.append(place)

    def _begin_round(self, place: Position) -> None:
        self._round, self._place = [], place
        self._raised, self._passes_over = _NONE, 0

    def _have_elements(self, wanted: int) -> bool:
        if self._waiting is not None and self._offset < self._waiting.size:
            return True
        if not self._has_ended:
            self._waiting, self._offset = self._read_on(wanted), 0
            self._has_ended = self._waiting is None
            self._rows = [] if self._waiting is None else [*self._waiting.rows()]
            if self._place is None and self._waiting is not None:
                self._place = self._waiting.state_at(0)
        return not self._has_ended

    def _read_on(self, wanted: int) -> Chunk | None:
        while True:
            before = self._input.get_position()
            try:
                return self._input.read(wanted)
            except Exception:
                after = self._input.get_position()
                if after == before:
                    raise  # the error of no element
                if len(self._round) <= self._raised.element and self._passes_over:
                    self._passes_over -= 1
                    continue
                if self._round:
                    self._raised = Raised(len(self._round), self._raised.errors + 1)
                else:
                    self._begin_round(after)
                raise

    def get_position(self) -> Position:
        """Return the place before the next round."""
        return self._raised.said_in(self._place)

    def close(self) -> None:
        """Close what it reads."""
        self._has_ended, self._waiting, self._round = True, None, []
        self._input.close()


class PartReader:
    """Reads the elements of this consumer alone, and what is left at the end.

    Args:
        source: Returns the source of a part of the plan, given that, and whether it is that part
            which the job is named for.
        turn: Which consumer it is.
        plan: The plan, as one process would read it.
        position: Where to begin.
        pass_number: The pass.
        seed: To begin with, where no position says one.
    """

    def __init__(
        self,
        source: Callable[[Node, bool], RemoteSource],
        turn: Turn,
        plan: Node,
        position: Position,
        pass_number: tuple[int, ...],
        seed: int,
    ) -> None:
        self._read, self._turn, self._plan = source, turn, plan
        self._pass = pass_number
        self._has_blocks = _block_of(plan) > 1
        self._half = cut(plan, ordered=True).half
        self._keeps_seed = position is not None
        self._seed = seed if position is None else position["seed"]
        #: Whether the part is that of the start, which the job is named for.
        self._is_at_start = position is None
        #: Elements of the plan before the next round, and its errors that were raised.
        self._element, self._raised = 0, _NONE
        if position is not None:
            self._element, failed = self._place_in(_units_of(plan), position)
            self._raised = Raised(0, failed) if failed else Raised.of(position)
        #: Elements of the plan before the part that is read.
        self._first = self._element
        self._is_at_beginning = position is None
        self._reader: Reader | None = None
        #: Those that are too few for a round, once they are read.
        self._last_ones: list[Any] | None = None
        self._has_ended = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end."""
        if self._has_ended:
            return None
        if self._last_ones is not None:
            return self._last(self._last_ones)
        if self._reader is None:
            raised = self._raised
            failed = raised.errors if raised.element == self._turn.index else 0
            self._reader = self._open(self._own(), self._is_at_start, failed)
        reader = self._reader
        try:
            chunk = reader.read(limit)
        except Exception:
            self._take_seed()
            self._stand_at(reader.get_position())
            raise
        self._take_seed()
        if chunk is None:
            self._stand_at(reader.get_position())  # after errors that were the last
            return self._begin_last()
        self._stand_at(chunk.state_at(chunk.size))
        states = chunk.states
        return chunk.with_places(None).with_states(lambda at: self._said(*self._round(states(at))))

    def _own(self) -> Node:
        """Return a plan of the elements that are left for this consumer, but for the last ones."""
        total, consumers = cardinality(self._plan), self._turn.consumers
        stop = None
        if total != INFINITE:
            stop = self._element + max(0, total - self._element) // consumers * consumers
        return own_part(self._plan, consumers, self._turn.index, start=self._element, stop=stop)

    def _begin_last(self) -> Chunk | None:
        """Go on to the elements that are too few for a round."""
        total = cardinality(self._plan)
        self._close_reader()
        if total == INFINITE or self._element >= total or self._turn.remainder == "drop":
            self._has_ended = True
            return None
        # Of the elements before them no errors are to come again: they are left out below a batch.
        self._reader = self._open(own_part(self._plan, 1, 0, start=self._element), False)
        self._last_ones = []
        return self._last(self._last_ones)

    def _last(self, found: list[Any]) -> Chunk | None:
        """Return what this consumer gets of the elements that are too few for a round."""
        assert self._reader is not None
        while (chunk := self._reader.read(self._turn.consumers)) is not None:
            found += chunk.rows()
        self._close_reader()
        self._has_ended = True
        first, total = self._element, cardinality(self._plan)
        self._element, self._raised = total, _NONE
        if not found:
            return None
        row = shared_out(found, self._turn.consumers, self._turn.remainder)[self._turn.index]
        return Chunk.of_rows([row], lambda index: self._said(total if index else first))

    def _open(self, plan: Node, is_named: bool, failed: int = 0) -> Reader:
        source = self._read(plan, is_named).seeded(self._seed)
        # A place without units is the beginning: it says that the seed is to be this one.
        position = None
        if self._keeps_seed:
            position = {"half": cut(plan, ordered=True).half, "seed": self._seed}
            if failed:
                position["units"] = {"unit": 0, "ordinal": 0, "failed": failed}
        return source.open(0, 1, position, pass_number=self._pass)

    def _take_seed(self) -> None:
        """Have the seed of the first part in the last one, and in places."""
        if not self._keeps_seed and self._reader is not None:
            place = self._reader.get_position()
            if place is not None:
                self._seed, self._keeps_seed = place["seed"], True

    def _stand_at(self, place: Position) -> None:
        """Take note of how far the part was read."""
        if place is not None and place.get("units") is not None:
            self._element, self._raised = self._round(place)
            self._is_at_beginning = False

    def _round(self, place: dict[str, Any]) -> tuple[int, Raised]:
        """Return the round that comes next at a place in the part, and what was raised of it."""
        rounds, failed = self._place_in(None, place)
        element = self._first + rounds * self._turn.consumers
        return element, Raised(self._turn.index, failed) if failed else _NONE

    def _place_in(self, units: Units | None, position: dict[str, Any]) -> tuple[int, int]:
        """Return how many elements came before a place, and how many errors of the next one.

        Args:
            units: What says which place one that one process saved is; None: it is none.
            position: The place.
        """
        found = position["units"]
        if units is not None and not (isinstance(found, dict) and "unit" in found):
            found = units.taken_over(found)
        if found is None:
            raise FailedPreconditionError(
                "the state was saved in the middle of what a worker reads as one unit, of which it "
                "does not say how many elements came; restore it in one process"
            )
        unit, failed = int(found["unit"]), int(found.get("failed", 0))
        # A row that fails has its place. Of a batch the rows that did not fail are still to come.
        is_past = found.get("ordinal") or (failed and not self._has_blocks)
        return (unit + 1, 0) if is_past else (unit, failed)

    def _said(self, element: int, raised: Raised = _NONE) -> Position:
        unit = {"unit": element, "ordinal": 0}
        return raised.said_in({"units": unit, "half": self._half, "seed": self._seed})

    def get_position(self) -> Position:
        """Return the place before the next round."""
        return None if self._is_at_beginning else self._said(self._element, self._raised)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def close(self) -> None:
        """Close what it reads."""
        self._has_ended = True
        self._close_reader()


def own_part(
    plan: Node, consumers: int, index: int, *, start: int = 0, stop: int | None = None
) -> Node:
    """Return a plan of every n-th element of a plan, such that workers make those alone.

    Args:
        plan: One that `in_turns.reads_its_part`.
        consumers: How many share it.
        index: Which of them is to have this part.
        start: The first element that is shared.
        stop: The one after the last; None: there is no end.
    """
    above: list[Node] = []
    while plan.one_to_one:
        above.append(plan)
        (plan,) = plan.inputs
    block = _block_of(plan)
    if block > 1:
        above.append(plan)
        (plan,) = plan.inputs
    if stop is not None:
        plan = Take(input=plan, count=stop * block)
    if start:
        plan = Skip(input=plan, count=start * block)
    if block > 1:
        plan = ShardBlocks(input=plan, num_shards=consumers, index=index, block=block)
    else:
        plan = Shard(input=plan, num_shards=consumers, index=index)
    for node in reversed(above):
        plan = node.over([plan])
    return plan


def drops_remainder(plan: Node) -> bool:
    """Return whether rows at the end that are too few for a batch are dropped (see `own_part`)."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return isinstance(plan, Batch) and plan.drop_remainder


def _block_of(plan: Node) -> int:
    """Return how many rows make one element of a plan that `in_turns.reads_its_part`."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return plan.size if isinstance(plan, Batch) else 1


def _units_of(plan: Node) -> Units:
    above = cut(plan, ordered=True).above
    assert isinstance(above, Units)
    return above
