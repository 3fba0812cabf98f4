"""Stand-ins for the engine: what a task's producer makes of its units, by arithmetic.

An *atom* is (unit, number in the unit). An element is a tuple of atoms: of one, or of several where
a batch joins them. Portions say of units what `service/worker/producer.py` says of them, by the
same functions; the states that these read are made here, as plans make them.
"""

from __future__ import annotations

import enum
import json
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from headrace.errors import UserFunctionError
from headrace.execution.assigned_iterators import count_started_splits
from headrace.service.element_sets import ALL_ORDINALS, END_ORDINAL, ElementIdRun
from headrace.service.messages import ElementIds, SavedFile
from headrace.service.ranges import Ranges
from headrace.service.worker.assignment_order import AssignmentOrder
from headrace.service.worker.producer import MAX_BATCH_ELEMENTS, next_batch_limit
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_iterator import count_complete_splits

__all__ = [
    "Atom",
    "Element",
    "FileSteps",
    "Grant",
    "Need",
    "Plan",
    "Production",
    "frame_of",
    "produce",
]

Atom: TypeAlias = tuple[int, int]
Element: TypeAlias = tuple[Atom, ...]

_HELD_BACK_SECONDS = 0.02
_PORTION_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is read."""

    size: int
    """Number of units."""
    parts: int = 1
    """A unit has 0 to so many elements; 1: exactly one."""
    window: int = 1
    """Units that are open at once; 1: one after the other."""
    mixed: int = 1
    """Elements that a shuffle of values holds, above the units."""
    omits: bool = False
    """A filter above that leaves some elements out."""
    joined: int = 1
    """Elements that a batch above all that joins to one."""
    cost: float = 0.0
    """Seconds for each element."""
    bytes: int = 100
    """Of each element."""
    slow: frozenset[int] = frozenset()
    """Units that take `slowness` seconds more."""
    slowness: float = 30.0
    deadly: frozenset[int] = frozenset()
    """Units that end the process that begins them."""
    failing: frozenset[int] = frozenset()
    """Units whose first element raises."""
    broken: bool = False
    """The plan cannot be opened."""

    def count(self, unit: int) -> int:
        """Return how many elements a unit has, those that raise included."""
        return 1 if self.parts == 1 else (unit * 2654435761 >> 7) % (self.parts + 1)

    def atoms(self, unit: int) -> list[Atom]:
        """Return the atoms of a unit that come where nothing is lost."""
        return [
            (unit, k)
            for k in range(self.count(unit))
            if not (self.raises(unit, k) or self.omitted(unit, k))
        ]

    def everything(self) -> set[Atom]:
        """Return all atoms that come, or raise."""
        return {
            (unit, k)
            for unit in range(self.size)
            for k in range(self.count(unit))
            if not self.omitted(unit, k)
        }

    def omitted(self, unit: int, k: int) -> bool:
        """Whether an element is left out."""
        return self.omits and not self.raises(unit, k) and (unit * 31 + k) % 3 == 1

    def rows(self, unit: int) -> int:
        """Return how many elements a unit has that do not raise: so many ordinals."""
        return self.count(unit) - sum(self.raises(unit, k) for k in range(min(1, self.count(unit))))

    def ordinal(self, atom: Atom) -> int:
        """Return the ordinal of an element; of one that raises, that of the next."""
        return atom[1] - (atom[1] > 0 and self.raises(atom[0], 0))

    def raises(self, unit: int, k: int) -> bool:
        """Whether an element raises."""
        return k == 0 and unit in self.failing


@dataclass(frozen=True)
class Grant:
    """Units for a producer."""

    start: int
    stop: int
    alone: bool = False
    rows: Ranges = ()
    """Not empty: one unit, of which only these ordinals are wanted."""
    is_pause: bool = False
    """No units now: what is held is to be given."""


class Need(enum.Enum):
    """What a producer waits for."""

    ROOM = "room for another portion"
    UNITS = "units: a `SplitGrant`, or None where no more come"
    DEATH = "its process dies"


Production: TypeAlias = Generator[Need | float | ResultBatch, Grant | None, str | None]
"""Yields what it needs, seconds that it takes, and portions; returns why it failed, if it did."""


class _Stream:
    """The elements of a plan in their order, and the state of its steps."""

    NOTHING: Atom = (-1, -1)
    """In place of an atom: look for units to open once more."""

    def __init__(
        self, plan: Plan, chance: random.Random, *, is_dealt: bool, shard: int, of: int
    ) -> None:
        self.plan, self._chance, self.is_dealt = plan, chance, is_dealt
        self.order = AssignmentOrder()
        self._granted: deque[tuple[int, Ranges]] = deque()
        if not is_dealt:
            self._granted.extend((unit, ALL_ORDINALS) for unit in range(shard, plan.size, of))
        self._ended = not is_dealt
        self.has_paused = False
        #: (place in dealt order, unit, its elements that are to come)
        self._open: list[tuple[int, int, deque[Atom]]] = []
        #: What the shuffle holds: elements with the places of their units.
        self._held: list[tuple[int, Atom]] = []
        self.handed = 0
        self._knows_end = True
        self.is_alone = False
        #: (unit, elements) of units that ended, and were not yet said to have.
        self.ends: list[tuple[int, int]] = []
        #: The batch that is being filled, and the oldest place that was open when it was begun.
        self.batch: list[Atom] = []
        self._batch_place = 0

    def take(self, grant: Grant | None) -> None:
        if grant is None:
            self._ended = True
            return
        if grant.is_pause:
            self.has_paused = True
            return
        rows = grant.rows or ALL_ORDINALS
        self._granted.extend((unit, rows) for unit in range(grant.start, grant.stop))
        self.order.assign(grant.start, grant.stop, grant.rows)
        self.is_alone = grant.alone

    def open_next(self) -> int | Need | None:
        """Open units until the window is full; return a unit that was opened, or what is needed."""
        if len(self._open) >= self.plan.window:
            return None
        self._knows_end = self._ended or bool(self._granted)
        if not self._granted:
            return None if self._ended or self.has_paused else Need.UNITS
        unit, rows = self._granted.popleft()
        # An element that raises goes with the one after it.
        wanted = deque(
            (unit, k)
            for k in range(self.plan.count(unit))
            if any(start <= self.plan.ordinal((unit, k)) < stop for start, stop in rows)
        )
        if wanted:
            self._open.append((self.handed, unit, wanted))
        if rows[-1][1] < END_ORDINAL:
            wanted.append((unit, -1))  # it is not read to its end
        elif not wanted:
            self.ends.append((unit, self.plan.rows(unit)))
        self.handed += 1
        return unit

    def next_atom(self) -> Atom | None:
        """Return the next atom, once no unit need be opened; None: there are no more."""
        while self._open and len(self._held) < self.plan.mixed:
            which = self._chance.randrange(len(self._open)) if self.plan.window > 1 else 0
            place, unit, left = self._open[which]
            atom = left.popleft()
            if not left:
                self.ends.append((unit, self.plan.rows(unit)))
            if not left or left[0][1] < 0:
                del self._open[which]
            if self.plan.raises(*atom):
                return atom  # no step holds an error
            self._held.append((place, atom))
            if self.plan.mixed > 1 and len(self._open) < self.plan.window:
                return self.NOTHING if self._may_open else self._draw()
        return self._draw()

    @property
    def _may_open(self) -> bool:
        """Whether another unit is to be opened before anything is drawn."""
        return bool(self._granted) or not (self._ended or self.has_paused)

    def _draw(self) -> Atom | None:
        if not self._held:
            return None
        places = [place for place, _, _ in self._open] + [place for place, _ in self._held]
        if not self.batch:
            self._batch_place = min(places)
        which = self._chance.randrange(len(self._held)) if self.plan.mixed > 1 else 0
        return self._held.pop(which)[1]

    def state(self) -> Any:
        """Return what the states of the plan's steps would be."""
        held = [{"assigned": place} for place, _, _ in self._open]
        held += [{"assigned": place} for place, _ in self._held]
        held += [{"assigned": self._batch_place}] * bool(self.batch)
        if self.plan.window > 1 or self.plan.joined > 1 or self.plan.mixed > 1:
            return {"held": held, "input": {"assigned": self.handed}}
        if not held and self.plan.parts > 1 and self.handed and not self._knows_end:
            # That a unit has no more elements shows when another is asked for.
            return {"index": {"assigned": self.handed - 1}, "ordinal": 1}
        if not held:
            return {"index": {"assigned": self.handed}, "ordinal": 0}
        return {"index": held[0], "ordinal": self._open[0][2][0][1] if self._open else 1}


def frame_of(portion: ResultBatch) -> Any:
    """Return what is sent of a portion, as `service/worker/batch_frames.py` does."""
    return (
        portion.buffers if portion.row_range is None else portion.buffers[slice(*portion.row_range)]
    )


def produce(
    plan: Plan,
    chance: random.Random,
    *,
    is_dealt: bool,
    origins: bool = False,
    most: int = MAX_BATCH_ELEMENTS,
    portion_bytes: int | None = None,
    most_now: Callable[[], int | None] = lambda: None,
    shard: int = 0,
    of: int = 1,
    in_order: bool = False,
    to_files: bool = False,
) -> Production:
    """Produce a task's portions, as `service/worker/producer.py` does.

    Where nothing is dealt, shard `shard` of `of` is each `of`-th unit. For files, all units are
    said to be whole at the end.
    """
    most_bytes = min(_PORTION_BYTES, portion_bytes or _PORTION_BYTES)
    if plan.broken:
        yield ResultBatch(first_element=0, error=UserFunctionError("the plan cannot be opened"))
        return "its plan cannot be opened"
    stream = _Stream(plan, chance, is_dealt=is_dealt, shard=shard, of=of)
    account = _Account(stream, origins)
    limit = 1
    while True:
        yield Need.ROOM
        limit = min(limit, most_now() or limit)
        elements: list[Element] = []
        count = 0
        was_parted = False
        error: UserFunctionError | None = None
        state: Any = None
        at_end = False
        seconds = 0.0
        while count < limit and count * plan.bytes < most_bytes:
            needed = stream.open_next()
            if needed is Need.UNITS:
                if elements:
                    # Nothing that is ready waits with the producer.
                    yield account.portion(elements)
                    elements = []
                    was_parted = True
                stream.take((yield Need.UNITS))
                continue
            if isinstance(needed, int):
                if needed in plan.deadly:
                    yield Need.DEATH
                if needed in plan.slow:
                    yield plan.slowness
                    seconds += plan.slowness
                continue
            # What comes before an element that raises says nothing of that element's unit.
            state = stream.state() if plan.failing else None
            atom = stream.next_atom()
            if atom is not None and plan.raises(*atom):
                error = UserFunctionError(f"unit {atom[0]} raises")
                break
            if atom is _Stream.NOTHING:
                continue
            if atom is not None:
                if plan.cost:
                    yield plan.cost
                    seconds += plan.cost
                if plan.omitted(*atom):
                    continue
                stream.batch.append(atom)
            if stream.batch and (atom is None or len(stream.batch) == plan.joined):
                elements.append(tuple(stream.batch))
                count += 1
                stream.batch = []
            if atom is None and stream.has_paused:
                if elements:
                    yield account.portion(elements)
                    elements = []
                yield account.whole()
                stream.has_paused, was_parted = False, True
                continue
            if atom is None:
                at_end = True
                break
            at_once = seconds > _HELD_BACK_SECONDS or stream.is_alone or was_parted
            if not stream.batch and elements and at_once:
                break
        if elements:
            yield account.portion(elements, None if error is None else state)
        if at_end:
            if in_order and stream.ends:
                yield account.ends()
            if to_files:
                yield account.whole()
            return None
        if error is not None:
            yield account.error(error, atom)
        elif not was_parted:
            wanted = next_batch_limit(limit, count, count * plan.bytes, seconds, most_bytes)
            limit = min(most, wanted)


class _Account:
    """Counts elements and units for the portions."""

    def __init__(self, stream: _Stream, origins: bool) -> None:
        self._stream, self._says_origins = stream, origins
        self._first = self._units = self._touched = 0

    def portion(self, elements: list[Element], state: Any = None) -> ResultBatch:
        before, first = self._units, self._first
        self._count_units(state)
        self._first += len(elements)
        return ResultBatch(
            first_element=first,
            num_elements=len(elements),
            buffers=elements,  # type: ignore[arg-type]
            size=len(elements) * self._stream.plan.bytes,
            done_from=before,
            done_to=self._units,
            delivered_end=self._touched,
            mode_data=self._origins(elements, says_ends=state is None),
        )

    def ends(self) -> ResultBatch:
        """Return what says of the last units that they ended."""
        return ResultBatch(
            first_element=self._first,
            done_from=self._units,
            done_to=self._units,
            delivered_end=self._touched,
            mode_data=self._origins([]),
        )

    def whole(self) -> ResultBatch:
        """Return what says that all units so far are whole."""
        before = self._units
        self._units = self._touched = self._stream.handed
        return ResultBatch(
            first_element=self._first,
            done_from=before,
            done_to=self._units,
            delivered_end=self._touched,
            mode_data=self._origins([]),
        )

    def error(self, error: UserFunctionError, atom: Atom) -> ResultBatch:
        before = self._units
        failed, failed_at = -1, (0, 0)
        if self._says_origins:
            failed_at = 0, 1  # the first of its unit
            place = (atom[0], 1, self._stream.plan.ordinal(atom), 1)
            failed = self._stream.order.element_ids([place], [])[0][0]
        self._count_units()
        return ResultBatch(
            first_element=self._first,
            error=error,
            done_from=before,
            done_to=self._units,
            delivered_end=self._touched,
            mode_data=self._origins([], failed_split=failed, failed_position=failed_at),
        )

    def _origins(
        self, elements: list[Element], *, says_ends: bool = True, **failure: Any
    ) -> ElementIds | None:
        """Return whence elements are, and which units ended since the last time.

        That a unit ended with an error is said with the error, and not before.
        """
        if not self._says_origins:
            return None
        stream, runs = self._stream, list[ElementIdRun]()
        for unit, k in (atom for element in elements for atom in element):
            ordinal = stream.plan.ordinal((unit, k))
            if runs and runs[-1][0] == unit and runs[-1][2] + runs[-1][3] == ordinal:
                runs[-1] = (unit, 1, runs[-1][2], runs[-1][3] + 1)
            else:
                runs.append((unit, 1, ordinal, 1))
        ended = [(unit, 1, count) for unit, count in stream.ends if says_ends]
        stream.ends = stream.ends[len(ended) :]
        return ElementIds(runs=stream.order.element_ids(runs, ended), **failure)

    def _count_units(self, state: Any = None) -> None:
        if self._stream.is_dealt:
            state = self._stream.state() if state is None else state
            begun = count_started_splits(state)
            self._units = count_complete_splits(state, self._units)
            self._touched = max(
                self._touched, self._units, self._stream.handed if begun is None else begun
            )


class FileSteps:
    """What the producer of a task that writes files does, as `worker/file_producer.py` says.

    A file is the list of the atoms in it.

    Args:
        steps: What one for clients does.
        chance: Decides when files have a good size.
    """

    def __init__(self, steps: Production, chance: random.Random) -> None:
        self._steps, self._chance = steps, chance
        self._held: list[Element] = []
        self._files = self._done = self._touched = self._said = 0

    def send(self, grant: Grant | None) -> Need | float | ResultBatch:
        """Go on; return what is needed, how long it takes, or files that are whole."""
        while True:
            step = self._steps.send(grant)
            grant = None
            if not isinstance(step, ResultBatch):
                return step
            if step.error is not None:
                raise StopIteration(str(step.error))
            self._held += step.buffers  # type: ignore[arg-type]
            self._done, self._touched = step.done_to, max(step.delivered_end, step.done_to)
            if step.num_elements:
                is_due = self._is_whole and self._chance.random() < 0.2
            else:
                is_due = self._has_whole_ones  # after a pause, or at the end
            if is_due:
                return self._say()

    def let_wait(self) -> ResultBatch | None:
        """Return what is whole, where units are waited for in vain."""
        return self._say() if self._has_whole_ones else None

    @property
    def _is_whole(self) -> bool:
        return self._done >= self._touched

    @property
    def _has_whole_ones(self) -> bool:
        return self._is_whole and (bool(self._held) or self._done > self._said)

    def _say(self) -> ResultBatch:
        files: tuple[SavedFile, ...] = ()
        if self._held:
            atoms = json.dumps([atom for element in self._held for atom in element])
            files = (SavedFile(self._files, len(self._held), 1, atoms),)
            self._files += 1
        before, self._said = self._said, self._done
        self._held = []
        return ResultBatch(
            first_element=0,
            files=files,
            done_from=before,
            done_to=self._done,
            delivered_end=self._touched,
        )
