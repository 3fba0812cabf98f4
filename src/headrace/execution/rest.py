"""The rest of a plan in one process, after what was delivered elsewhere in no order.

Units of which some elements came are read first, in part; then those of which nothing came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from headrace.element.chunk import Chunk
from headrace.element.places import rows_of
from headrace.errors import FailedPreconditionError
from headrace.execution.build import start
from headrace.execution.dealer import NextUnits, UnitPart
from headrace.execution.dealt import DealtPlan
from headrace.execution.delivered import (
    END,
    Delivered,
    DeliveryLog,
    OriginRun,
    missing_in,
    with_ends,
)
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.origins import runs_of
from headrace.plan.determinism import fixed_seeds, with_fixed_seeds
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of

__all__ = ["RestIterator", "start_rest", "units_left"]

_UNITS_AT_ONCE = 1 << 16
_KEPT = 8
"""Chunks of which a place may still be asked for."""


class RestIterator(ElementIterator):
    """Reads what was not delivered; its state is what was.

    Args:
        start_dealt: Starts the plan with origins, dealt by what it is given.
        units: How many units it has, or INFINITE.
    """

    def __init__(self, start_dealt: Callable[[NextUnits], DealtPlan], units: int) -> None:
        self._start_dealt = start_dealt
        self._units = units
        self._go_to(Delivered())

    def _go_to(self, delivered: Delivered) -> None:
        self._log = DeliveryLog(delivered.copy())
        self._left = units_left(delivered, self._units)
        self._input: DealtPlan | None = None
        self._read = 0
        self._stops: list[int] = []

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._input is None:
            left = self._left
            self._input = self._start_dealt(lambda: next(left, None))
        try:
            chunk = self._input.next_chunk(limit)
        except Exception:
            self._read += 1  # an error has a place, and no origin
            raise
        ended = [(unit, units, size, END - size) for unit, units, size in self._input.take_ended()]
        if chunk is None:
            self._log.add(self._read, 0, lambda count: ended)
            return None
        start, self._read = self._read, self._read + chunk.size
        self._log.add(start, chunk.size, _rows(chunk, ended))
        self._stops.append(self._read)
        if len(self._stops) > _KEPT:
            self._log.forget(self._stops.pop(0))
        log = self._log
        return chunk.with_places(None).with_states(lambda index: log.until(start + index).to_json())

    def get_state(self) -> State:
        return self._log.until(self._read).to_json()

    def set_state(self, state: State) -> None:
        self.close()
        delivered = Delivered.from_json(state)
        highest = max([0, *(stop for _, stop in delivered.whole)])
        highest = max([highest, *(unit + 1 for unit, _ in delivered.parts)])
        if self._units != INFINITE and highest > self._units:
            raise FailedPreconditionError(
                f"the state says that units up to {highest} were delivered, and the dataset has "
                f"{self._units}; restore it with the same data"
            )
        self._go_to(delivered)

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


def start_rest(
    plan: Node, *, seed: int, fixed: Sequence[int] = (), pass_number: tuple[int, ...] = (0,)
) -> RestIterator:
    """Return an iterator over what is left of a plan, in whatever order that comes.

    Arguments as for `execution.build.start`; its state is what was delivered.

    Raises:
        FailedPreconditionError: It reads a source that cannot be read in parts.
    """
    deal = deal_of(prepare(with_fixed_seeds(plan, fixed or fixed_seeds(plan))).plan)
    if deal is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be read in parts, so that what is left of it "
            "cannot be read"
        )

    def start_dealt(next_units: NextUnits) -> DealtPlan:
        iterator = start(
            plan, seed=seed, fixed=fixed, pass_number=pass_number, units=next_units, origins=True
        )
        assert isinstance(iterator, DealtPlan)
        return iterator

    return RestIterator(start_dealt, deal.size)


def units_left(delivered: Delivered, units: int) -> Iterator[tuple[int, int] | UnitPart]:
    """Return the units that are left of a plan, those in part first.

    Args:
        delivered: What was delivered.
        units: How many units there are, or INFINITE.
    """
    parts = delivered.parts
    for unit, rows in parts:
        wanted = tuple((start, None if stop == END else stop) for start, stop in missing_in(rows))
        yield UnitPart(unit, wanted)
    at = 0
    for first, stop in sorted((*delivered.whole, *((unit, unit + 1) for unit, _ in parts))):
        if at < first:
            yield at, first
        at = max(at, stop)
    while units == INFINITE:
        yield at, at + _UNITS_AT_ONCE
        at += _UNITS_AT_ONCE
    if at < units:
        yield at, units


def _rows(chunk: Chunk, ended: list[OriginRun]) -> Callable[[int], Iterable[OriginRun]]:
    places = chunk.places
    assert places is not None

    def rows(count: int) -> Iterable[OriginRun]:
        units, ordinals = rows_of(places[:count])
        runs: list[OriginRun] = [*runs_of(units, ordinals)]
        return [*runs, *ended] if count == chunk.size else with_ends(runs, ended)

    return rows
