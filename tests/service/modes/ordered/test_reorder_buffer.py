"""Units that arrive from many tasks are given in order, each element once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.execution.element_ids import ErrorPosition, get_error_position
from headrace.service.element_sets import END_ORDINAL
from headrace.service.messages import GetElementsReply
from headrace.service.modes.ordered.reorder_buffer import ReorderBuffer
from tests.service.answers import answer_of


class FailedError(Exception):
    pass


def chunk_of(values: list[int]) -> Chunk:
    return Chunk.of_columns(np.array(values), len(values))


def joined(runs: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return the same elements; units in a row that have as many are one run."""
    found: list[tuple[int, int, int, int]] = []
    for number, units, first, count in runs:
        if found and found[-1][0] + found[-1][1] == number and found[-1][2:] == (first, count):
            found[-1] = (found[-1][0], found[-1][1] + units, first, count)
        else:
            found.append((number, units, first, count))
    return found


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

    def answer(self) -> tuple[GetElementsReply, Chunk | Exception | None]:
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
                return answer_of(
                    failed_split=number, failed_position=step, assigned=dealt, error=b"x"
                ), error
            del self._queue[0]
            if step == "end":
                elements = self._model.counts[unit]
                ends.append((number, 1, elements, END_ORDINAL - elements))
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
            num_elements=len(values),
            origins=(*joined(origins), *joined(ends)),
            done_from=since,
            done_to=self._done,
            assigned=dealt,
        )
        return message, chunk_of(values) if values else None


@pytest.mark.parametrize("seed", range(300))
def test_whatever_order_units_arrive_in_they_are_read_as_they_stand(seed: int) -> None:
    """Tasks are lost at any time; what nobody has of their units is dealt again, in part."""
    chance = random.Random(seed)
    model = Model(chance)
    units = ReorderBuffer(max_bytes=chance.choice([0, 50, 1 << 20]))
    tasks = {number: Task(number, model, chance) for number in range(3)}
    rest = list(range(model.size))
    again: list[tuple[int, int]] = []
    got: list[str] = []
    unit = ordinal = 0
    for _ in range(10_000):
        if unit == model.size:
            break
        many = units.take_complete(unit, 3, chance.randint(1, 9)) if not ordinal else None
        if many is not None:
            each = many[0].size // many[1]
            rows = [str(int(row)) for row in many[0].rows()]
            for number in range(many[1]):
                got += [*rows[number * each : (number + 1) * each], f"end {each}"]
            unit += many[1]
            continue
        found = units.next_elements(unit, ordinal, chance.randint(1, 4))
        if found is not None:
            if found.error is not None:
                got.append(str(found.error))
            elif found.chunk is not None:
                got += [str(int(each)) for each in found.chunk.rows()]
                assert got[-1] == str(unit * 100 + found.ordinal + found.chunk.size - 1)
                ordinal = found.ordinal + found.chunk.size
            else:
                got.append(f"end {found.num_elements}")
                unit, ordinal = unit + 1, 0
            continue
        if chance.random() < 0.1:
            lost = tasks.pop(chance.choice(list(tasks)))
            units.forget_tasks([lost.number])
            again = sorted([*again, *lost.holds.items()])
            number = lost.number + 3
            tasks[number] = Task(number, model, chance)
        allowed = units.tasks_to_request(unit, set(tasks))
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
        units.add_reply(number, *task.answer(), 100)
    assert got == [each for one in range(model.size) for each in model.outcomes(one)]
    assert units.bytes == 0


def test_what_comes_twice_is_given_once() -> None:
    """A unit that two tasks read: whoever is ahead counts."""
    units = ReorderBuffer(max_bytes=1 << 20)
    whole = ((0, 1, 7, 0),)
    units.add_reply(
        1, answer_of(num_elements=2, origins=((0, 1, 0, 2),), assigned=whole), chunk_of([1, 2]), 16
    )
    first = answer_of(num_elements=3, origins=((0, 1, 0, 3),), assigned=whole)
    units.add_reply(2, first, chunk_of([1, 2, 3]), 24)
    last = answer_of(
        num_elements=1, origins=((0, 1, 2, 1), (0, 1, 3, END_ORDINAL - 3)), assigned=whole
    )
    units.add_reply(1, last, chunk_of([3]), 8)
    got: list[int] = []
    while (found := units.next_elements(7, len(got), 10)) is not None and found.chunk is not None:
        got += map(int, found.chunk.rows())
    assert got == [1, 2, 3]
    assert found is not None
    assert found.num_elements == 3


def test_whole_units_are_given_no_more_at_once_than_are_asked_for() -> None:
    units = ReorderBuffer(max_bytes=1 << 20)
    ended = ((0, 5, 0, 2), (0, 5, 2, END_ORDINAL - 2))
    many = answer_of(num_elements=10, origins=ended, assigned=((0, 5, 7, 0),))
    units.add_reply(1, many, chunk_of([*range(10)]), 80)
    got: list[tuple[list[int], int]] = []
    unit = 7
    for most, limit in [(9, 1), (9, 3), (2, 9), (9, 9)]:
        given = units.take_complete(unit, most, limit)
        if given is not None:
            got.append(([int(row) for row in given[0].rows()], given[1]))
            unit += given[1]
    # One element is less than a unit has, three are one unit and a half.
    assert got == [([0, 1], 1), ([2, 3, 4, 5], 2), ([6, 7, 8, 9], 2)]
    assert units.take_complete(unit, 9, 9) is None
    assert units.bytes == 0


def test_where_much_is_held_only_who_has_what_is_waited_for_is_asked() -> None:
    units = ReorderBuffer(max_bytes=10)
    assert units.tasks_to_request(0, {1, 2}) is None
    ahead = answer_of(num_elements=1, origins=((0, 1, 0, 1),), assigned=((0, 1, 5, 0),))
    units.add_reply(1, ahead, chunk_of([5]), 100)
    assert units.tasks_to_request(0, {1, 2}) is None, "nobody is known to hold it"
    units.add_reply(2, answer_of(assigned=((0, 2, 0, 0),)), None, 0)
    assert units.tasks_to_request(0, {1, 2}) == {2}
    assert units.tasks_to_request(None, {1, 2}) == set(), "what comes next is here"
    assert units.tasks_to_request(0, {1}) is None, "the task is over"
    assert units.tasks_to_request(0, {1, 2, 3}, frozenset({3, 4})) == {2, 3}, (
        "the dispatcher names it"
    )


def test_of_a_unit_that_is_given_up_what_came_is_given() -> None:
    units = ReorderBuffer(max_bytes=10)
    some = answer_of(num_elements=1, origins=((0, 1, 0, 1),), assigned=((0, 1, 0, 0),))
    units.add_reply(1, some, chunk_of([5]), 1)
    units.abandon([(0, 1)])
    found = units.next_elements(0, 0, 5)
    assert found is not None
    assert found.chunk is not None
    over = units.next_elements(0, 1, 5)
    assert over is not None
    assert over.chunk is None


def three_whole_units() -> ReorderBuffer:
    """Units 4, 5 and 6 of two elements each, of 10 bytes, came in one answer."""
    units = ReorderBuffer(max_bytes=1 << 20)
    came = answer_of(
        num_elements=6,
        origins=((0, 3, 0, 2), (0, 3, 2, END_ORDINAL - 2)),
        assigned=((0, 3, 4, 0),),
    )
    units.add_reply(1, came, chunk_of([40, 41, 50, 51, 60, 61]), 60)
    return units


@pytest.mark.parametrize(
    ("most", "limit", "values"),
    [(3, 9, [40, 41, 50, 51, 60, 61]), (3, 5, [40, 41, 50, 51]), (1, 9, [40, 41])],
)
def test_whole_units_are_given_up_to_a_number_of_units_and_of_elements(
    most: int, limit: int, values: list[int]
) -> None:
    found = three_whole_units().take_complete(4, most, limit)
    assert found is not None
    assert [int(each) for each in found[0].rows()] == values
    assert found[1] == len(values) // 2


def test_units_of_which_one_has_more_than_is_wanted_are_not_given_whole() -> None:
    assert three_whole_units().take_complete(4, 3, 1) is None


def test_what_is_here_is_counted_until_it_is_given() -> None:
    units = three_whole_units()
    assert units.bytes == 60
    units.take_complete(4, 2, 9)
    assert units.bytes == 20
    assert units.next_elements(6, 0, 9) is not None
    assert units.next_elements(6, 2, 9) is not None
    assert units.bytes == 0


@pytest.mark.parametrize("done", [0, 1])
def test_an_error_says_whether_it_is_the_last_of_its_unit(done: int) -> None:
    units = ReorderBuffer(max_bytes=1 << 20)
    failed = answer_of(
        failed_split=0, failed_position=(0, 1), error=b"x", done_to=done, assigned=((0, 1, 7, 0),)
    )
    units.add_reply(1, failed, FailedError(), 0)
    found = units.next_elements(7, 0, 5)
    assert found is not None
    assert found.error is not None
    assert get_error_position(found.error) == ErrorPosition(7, 0, 1, is_last=bool(done))


def test_tasks_that_are_over_are_forgotten() -> None:
    units = three_whole_units()
    assert units.tasks == {1}
    units.forget_tasks([1, 2])
    assert units.tasks == set()


def test_of_units_that_were_read_nothing_is_kept() -> None:
    # Each other one is over only because its task is done with it.
    units = ReorderBuffer(max_bytes=1 << 20)
    for unit in range(400):
        over = {"done_from": unit, "done_to": unit + 1} if unit % 2 else {"done_to": 0}
        ends = () if unit % 2 else ((unit, 1, 1, END_ORDINAL - 1),)
        one = answer_of(
            num_elements=1, origins=((unit, 1, 0, 1), *ends), assigned=((unit, 1, unit, 0),), **over
        )
        units.add_reply(1, one, chunk_of([unit]), 8)
        assert units.next_elements(unit, 0, 1) is not None
        assert units.next_elements(unit, 1, 1) is not None
    assert len(units._complete_splits) <= 100
    assert units._read_splits == ((0, 400),)


def test_units_that_came_whole_to_another_task_too_are_given_once() -> None:
    units = three_whole_units()
    before = answer_of(
        num_elements=8, origins=((0, 4, 0, 2), (0, 4, 2, END_ORDINAL - 2)), assigned=((0, 4, 3, 0),)
    )
    units.add_reply(2, before, chunk_of([30, 31, 40, 41, 50, 51, 60, 61]), 80)
    got, unit, ordinal = [], 3, 0
    while (found := units.next_elements(unit, ordinal, 9)) is not None:
        if found.chunk is None:
            unit, ordinal = unit + 1, 0
            continue
        got += [int(each) for each in found.chunk.rows()]
        ordinal += found.chunk.size
    assert (unit, got) == (7, [30, 31, 40, 41, 50, 51, 60, 61])
    assert units.bytes == 0
