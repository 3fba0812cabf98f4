"""Readers of one of several consumers, in order: of its own elements, or of the whole stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch
from headrace.plan.blocks import ShardBlocks
from headrace.plan.node import Node
from headrace.plan.ordering import Shard, Skip, Take
from headrace.plan.source import INFINITE, Position, Reader
from headrace.plan.traverse import cardinality
from headrace.plan.units import Units
from headrace.rewrites.cut import cut
from headrace.service.client.source import RemoteSource
from headrace.service.worker.round_shape import shared_out

__all__ = ["PartReader", "Turn", "WholeReader", "own_part"]


@dataclass(frozen=True)
class Turn:
    """Which consumer reads, of how many."""

    index: int
    consumers: int
    remainder: str


class WholeReader:
    """Reads the whole stream, round by round, and gives this consumer's elements.

    Args:
        input: The whole stream, in order.
        turn: Which consumer it is.
    """

    def __init__(self, input: Reader, turn: Turn) -> None:
        self._input, self._turn = input, turn
        #: Elements of the round that is begun, and the place before them.
        self._round: list[Any] = []
        self._place: Position = input.get_position()
        self._waiting: Chunk | None = None
        self._rows: list[Any] = []
        self._offset = 0
        self._has_ended = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end."""
        places: list[Position] = [self._place]
        found: list[Any] = []
        consumers = self._turn.consumers
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
            last = shared_out(self._round, consumers, self._turn.remainder)
            if len(last) > self._turn.index and self._turn.remainder != "drop":
                found.append(last[self._turn.index])
                self._end_round(self._input.get_position(), places)
            self._round = []
        if not found:
            return None
        return Chunk.of_rows(found, lambda index: places[index])

    def _end_round(self, place: Position, places: list[Position]) -> None:
        self._round, self._place = [], place
        places.append(place)

    def _have_elements(self, wanted: int) -> bool:
        if self._waiting is not None and self._offset < self._waiting.size:
            return True
        if not self._has_ended:
            self._waiting, self._offset = self._input.read(wanted), 0
            self._has_ended = self._waiting is None
            self._rows = [] if self._waiting is None else [*self._waiting.rows()]
        return not self._has_ended

    def get_position(self) -> Position:
        """Return the place before the next round."""
        return self._place

    def close(self) -> None:
        """Close what it reads."""
        self._has_ended, self._waiting, self._round = True, None, []
        self._input.close()


class PartReader:
    """Reads the elements of this consumer alone, and what is left at the end.

    Args:
        source: Returns the source of a part of the plan, given which part that is.
        turn: Which consumer it is.
        plan: The plan, as one process would read it.
        position: Where to begin.
        pass_number: The pass.
        seed: To begin with, where no position says one.
    """

    def __init__(
        self,
        source: Callable[[Node, str], RemoteSource],
        turn: Turn,
        plan: Node,
        position: Position,
        pass_number: tuple[int, ...],
        seed: int,
    ) -> None:
        self._read, self._turn, self._plan = source, turn, plan
        self._pass = pass_number
        self._units = _units_of(plan)
        self._half = cut(plan, ordered=True).half
        self._keeps_seed = position is not None
        self._seed = seed if position is None else position["seed"]
        #: Elements of the plan before the next round.
        self._element = 0 if position is None else _element_at(self._units, position)
        self._is_at_beginning = position is None
        self._reader: Reader | None = None
        self._has_ended = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end."""
        if self._has_ended:
            return None
        if self._reader is None:
            self._reader = self._open(self._own(), f", from element {self._element}")
        try:
            chunk = self._reader.read(limit)
        except Exception:
            self._element += self._turn.consumers  # it has its place
            self._is_at_beginning = False
            raise
        if chunk is None:
            return self._last()
        self._take_seed()
        first, consumers = self._element, self._turn.consumers
        self._element += chunk.size * consumers
        self._is_at_beginning = False
        return chunk.with_places(None).with_states(
            lambda index: self._said(first + index * consumers)
        )

    def _own(self) -> Node:
        """Return a plan of the elements that are left for this consumer, but for the last ones."""
        total, consumers = cardinality(self._plan), self._turn.consumers
        stop = None
        if total != INFINITE:
            stop = self._element + max(0, total - self._element) // consumers * consumers
        return own_part(self._plan, consumers, self._turn.index, start=self._element, stop=stop)

    def _last(self) -> Chunk | None:
        """Return what this consumer gets of the elements that are too few for a round."""
        total = cardinality(self._plan)
        self._close_reader()
        self._has_ended = True
        if total == INFINITE or self._element >= total or self._turn.remainder == "drop":
            return None
        self._reader = self._open(
            Skip(input=self._plan, count=self._element), f", the last {total - self._element}"
        )
        found: list[Any] = []
        while (chunk := self._reader.read(self._turn.consumers)) is not None:
            found += chunk.rows()
        self._take_seed()
        self._close_reader()
        first, self._element = self._element, total
        if not found:
            return None
        row = shared_out(found, self._turn.consumers, self._turn.remainder)[self._turn.index]
        return Chunk.of_rows([row], lambda index: self._said(total if index else first))

    def _open(self, plan: Node, which: str) -> Reader:
        source = self._read(plan, which).seeded(self._seed)
        # A place without units is the beginning: it says that the seed is to be this one.
        position = None
        if self._keeps_seed:
            position = {"half": cut(plan, ordered=True).half, "seed": self._seed}
        return source.open(0, 1, position, pass_number=self._pass)

    def _take_seed(self) -> None:
        """Have the seed of the first part in the last one, and in places."""
        if not self._keeps_seed and self._reader is not None:
            place = self._reader.get_position()
            if place is not None:
                self._seed, self._keeps_seed = place["seed"], True

    def _said(self, element: int) -> Position:
        unit = {"unit": element, "ordinal": 0}
        return {"units": unit, "half": self._half, "seed": self._seed}

    def get_position(self) -> Position:
        """Return the place before the next round."""
        return None if self._is_at_beginning else self._said(self._element)

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
    block = plan.size if isinstance(plan, Batch) else 1
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


def _units_of(plan: Node) -> Units:
    above = cut(plan, ordered=True).above
    assert isinstance(above, Units)
    return above


def _element_at(units: Units, position: dict[str, Any]) -> int:
    """Return how many elements of the plan came before a place."""
    place = position["units"]
    found = place if isinstance(place, dict) and "unit" in place else units.taken_over(place)
    if found is None:
        raise FailedPreconditionError(
            "the state was saved in the middle of what a worker reads as one unit, of which it "
            "does not say how many elements came; restore it in one process"
        )
    return int(found["unit"]) + (1 if found.get("ordinal") or found.get("failed") else 0)
