"""Units that arrive from many tasks are given in order, each element once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.service.client.units import Units
from headrace.service.dispatcher.rows import END
from headrace.service.messages import Elements


class FailedError(Exception):
    pass


def chunk_of(values: list[int]) -> Chunk:
    return Chunk.of_columns(np.array(values), len(values))


def answer_of(**fields: object) -> Elements:
    return Elements(**{"first": 0, "count": 0, "end": False, **fields})  # type: ignore[arg-type]


class Model:
    """A plan: elements of unit `u` are u * 100 + ordinal, some left out, some errors between."""

    def __init__(self, chance: random.Random) -> None:
        self.most = chance.choice([1, 1, 3, 9])
        self.size = chance.randint(1, 30)
        self.counts = [
            1 if self.most == 1 else chance.randint(0, self.most) for _ in range(self.size)
        ]
        filters = chance.random() < 0.4
        fails = chance.random() < 0.3
        everything = [(u, n) for u in range(self.size) for n in range(self.counts[u])]
        self.left_out = {each for each in everything if filters and chance.random() < 0.3}

        #: How many errors stand before these, at the root, and which fail themselves, above it.
        self.before = {each: chance.choice([0, 0, 0, 1, 2]) if fails else 0 for each in everything}
        self.failing = {each for each in everything if fails and chance.random() < 0.2}
        #: How many stand at the end.
        self.last = [chance.choice([0, 0, 1]) if fails else 0 for _ in range(self.size)]

    def steps(self, unit: int, first: int = 0) -> Iterator[int | tuple[int, int]]:
        """Yield the ordinals of a unit from one on, and where its errors stand."""
        for ordinal in range(first, self.counts[unit]):
            yield from ((ordinal, number + 1) for number in range(self.before[unit, ordinal]))
            if (unit, ordinal) in self.left_out:
                continue
            yield (ordinal + 1, 0) if (unit, ordinal) in self.failing else ordinal
        yield from ((self.counts[unit], number + 1) for number in range(self.last[unit]))

    def outcomes(self, unit: int) -> list[str]:
        found = [
            f"error at {each}" if isinstance(each, tuple) else str(unit * 100 + each)
            for each in self.steps(unit)
        ]
        return [*found, f"end {self.counts[unit]}"]


class Task:
    """Reads what it is dealt; each answer says what a worker would say."""

    def __init__(self, number: int, model: Model, chance: random.Random) -> None:
        self.number, self._model, self._chance = number, model, chance
        self.dealt: list[tuple[int, int, int, int]] = []
        self._units = 0
        #: What it is to send: (number, unit, an ordinal, where an error stands, or the end).
        self._queue: list[tuple[int, int, int | str | tuple[int, int]]] = []
        self._done = 0
        #: (unit, first ordinal that is wanted) of what it holds.
        self.holds: dict[int, int] = {}

    def deal(self, units: list[int], first: int) -> None:
        self.dealt.append((self._units, len(units), units[0], first))
        for number, unit in enumerate(units, start=self._units):
            self._queue += [(number, unit, step) for step in self._model.steps(unit, first)]
            self._queue.append((number, unit, "end"))
            self.holds[unit] = first
        self._units += len(units)

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def answer(self) -> tuple[Elements, Chunk | Exception | None]:
        """Return the next answer, of some of what it holds."""
        dealt = tuple(self.dealt)
        count = self._chance.randint(1, 12)
        values, origins, ends, since = [], [], [], self._done
        while self._queue and len(values) < count:
            number, unit, step = self._queue[0]
            if isinstance(step, tuple):
                if values or ends:
                    break
                del self._queue[0]
                self.holds[unit] = max(self.holds[unit], step[0] - (step[1] == 0))
                error = FailedError(f"error at {step}")
                return answer_of(failed=number, failed_at=step, dealt=dealt, error=b"x"), error
            del self._queue[0]
            if step == "end":
                elements = self._model.counts[unit]
                ends.append((number, 1, elements, END - elements))
                self._done = number + 1
                del self.holds[unit]
                continue
            assert isinstance(step, int)
            values.append(unit * 100 + step)
            self.holds[unit] = step + 1
            last = origins[-1] if origins else None
            if last and last[0] == number and last[2] + last[3] == step:
                origins[-1] = (number, 1, last[2], last[3] + 1)
            elif last and last[0] + last[1] == number and last[2:] == (step, 1):
                origins[-1] = (last[0], last[1] + 1, step, 1)
            else:
                origins.append((number, 1, step, 1))
        message = answer_of(
            count=len(values),
            origins=(*origins, *ends),
            done_from=since,
            done_to=self._done,
            dealt=dealt,
        )
        return message, chunk_of(values) if values else None


@pytest.mark.parametrize("seed", range(300))
def test_whatever_order_units_arrive_in_they_are_read_as_they_stand(seed: int) -> None:
    """Tasks are lost at any time; what nobody has of their units is dealt again, in part."""
    chance = random.Random(seed)
    model = Model(chance)
    units = Units(bound=chance.choice([0, 50, 1 << 20]))
    tasks = {number: Task(number, model, chance) for number in range(3)}
    rest = list(range(model.size))
    again: list[tuple[int, int]] = []
    got: list[str] = []
    unit = ordinal = 0
    for _ in range(10_000):
        if unit == model.size:
            break
        many = units.whole(unit, 3, chance.randint(1, 9)) if not ordinal else None
        if many is not None:
            each = many[0].size // many[1]
            rows = [str(int(row)) for row in many[0].rows()]
            for number in range(many[1]):
                got += [*rows[number * each : (number + 1) * each], f"end {each}"]
            unit += many[1]
            continue
        found = units.found(unit, ordinal, chance.randint(1, 4))
        if found is not None:
            if found.error is not None:
                got.append(str(found.error))
            elif found.chunk is not None:
                got += [str(int(each)) for each in found.chunk.rows()]
                assert got[-1] == str(unit * 100 + found.ordinal + found.chunk.size - 1)
                ordinal = found.ordinal + found.chunk.size
            else:
                got.append(f"end {found.elements}")
                unit, ordinal = unit + 1, 0
            continue
        if chance.random() < 0.1:
            lost = tasks.pop(chance.choice(list(tasks)))
            units.forget([lost.number])
            again = sorted([*again, *lost.holds.items()])
            number = lost.number + 3
            tasks[number] = Task(number, model, chance)
        allowed = units.askable(unit, set(tasks))
        number = chance.choice(sorted(tasks if allowed is None else allowed))
        task = tasks[number]
        if task.is_idle:
            if again:
                back, first = again.pop(0)
                task.deal([back], first)
            elif rest:
                many = chance.randint(1, 5)
                task.deal(rest[:many], 0)
                del rest[:many]
            else:
                continue
        units.take(number, *task.answer(), 100)
    assert got == [each for one in range(model.size) for each in model.outcomes(one)]
    assert units.bytes == 0


def test_what_comes_twice_is_given_once() -> None:
    """A unit that two tasks read: whoever is ahead counts."""
    units = Units(bound=1 << 20)
    whole = ((0, 1, 7, 0),)
    units.take(1, answer_of(count=2, origins=((0, 1, 0, 2),), dealt=whole), chunk_of([1, 2]), 16)
    first = answer_of(count=3, origins=((0, 1, 0, 3),), dealt=whole)
    units.take(2, first, chunk_of([1, 2, 3]), 24)
    last = answer_of(count=1, origins=((0, 1, 2, 1), (0, 1, 3, END - 3)), dealt=whole)
    units.take(1, last, chunk_of([3]), 8)
    got: list[int] = []
    while (found := units.found(7, len(got), 10)) is not None and found.chunk is not None:
        got += map(int, found.chunk.rows())
    assert got == [1, 2, 3]
    assert found is not None
    assert found.elements == 3


def test_where_much_is_held_only_who_has_what_is_waited_for_is_asked() -> None:
    units = Units(bound=10)
    assert units.askable(0, {1, 2}) is None
    ahead = answer_of(count=1, origins=((0, 1, 0, 1),), dealt=((0, 1, 5, 0),))
    units.take(1, ahead, chunk_of([5]), 100)
    assert units.askable(0, {1, 2}) is None, "nobody is known to hold it"
    units.take(2, answer_of(dealt=((0, 2, 0, 0),)), None, 0)
    assert units.askable(0, {1, 2}) == {2}
    assert units.askable(None, {1, 2}) == set(), "what comes next is here"
    assert units.askable(0, {1}) is None, "the task is over"


def test_of_a_unit_that_is_given_up_what_came_is_given() -> None:
    units = Units(bound=10)
    some = answer_of(count=1, origins=((0, 1, 0, 1),), dealt=((0, 1, 0, 0),))
    units.take(1, some, chunk_of([5]), 1)
    units.give_up([(0, 1)])
    found = units.found(0, 0, 5)
    assert found is not None
    assert found.chunk is not None
    over = units.found(0, 1, 5)
    assert over is not None
    assert over.chunk is None
