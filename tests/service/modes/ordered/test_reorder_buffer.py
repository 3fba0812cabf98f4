"""Reorder buffer: splits from many tasks are returned in order, each element once."""

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


def merge_runs(runs: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Merge runs of consecutive splits with equally many elements."""
    found: list[tuple[int, int, int, int]] = []
    for number, num_splits, first, count in runs:
        if found and found[-1][0] + found[-1][1] == number and found[-1][2:] == (first, count):
            found[-1] = (found[-1][0], found[-1][1] + num_splits, first, count)
        else:
            found.append((number, num_splits, first, count))
    return found


class Model:
    """A plan: elements of split s are s * 100 + ordinal; some are filtered, with errors between."""

    def __init__(self, chance: random.Random) -> None:
        self.max_elements = chance.choice([1, 1, 3, 9])
        self.size = chance.randint(1, 30)
        self.counts = [
            1 if self.max_elements == 1 else chance.randint(0, self.max_elements)
            for _ in range(self.size)
        ]
        filters = chance.random() < 0.4
        fails = chance.random() < 0.3
        everything = [(u, n) for u in range(self.size) for n in range(self.counts[u])]
        self.filtered = {each for each in everything if filters and chance.random() < 0.3}

        #: Number of errors before each element, and the elements that fail above the boundary.
        self.before = {each: chance.choice([0, 0, 0, 1, 2]) if fails else 0 for each in everything}
        self.failing = {each for each in everything if fails and chance.random() < 0.2}
        #: Number of errors at the end of each split.
        self.last = [chance.choice([0, 0, 1]) if fails else 0 for _ in range(self.size)]

    def steps(self, split: int, first: int = 0) -> Iterator[int | tuple[int, int]]:
        """Yield the ordinals of a split from `first` on, and the positions of its errors."""
        for ordinal in range(first, self.counts[split]):
            yield from ((ordinal, number + 1) for number in range(self.before[split, ordinal]))
            if (split, ordinal) in self.filtered:
                continue
            yield (ordinal + 1, 0) if (split, ordinal) in self.failing else ordinal
        yield from ((self.counts[split], number + 1) for number in range(self.last[split]))

    def outcomes(self, split: int) -> list[str]:
        found = [
            f"error at {each}" if isinstance(each, tuple) else str(split * 100 + each)
            for each in self.steps(split)
        ]
        return [*found, f"end {self.counts[split]}"]


class Task:
    """Simulated task: computes its assigned splits and replies as a worker does."""

    def __init__(self, number: int, model: Model, chance: random.Random) -> None:
        self.number, self._model, self._chance = number, model, chance
        self.assigned: list[tuple[int, int, int, int]] = []
        self._num_splits = 0
        #: Steps to send: (number, split, an ordinal, an error position, or "end").
        self._queue: list[tuple[int, int, int | str | tuple[int, int]]] = []
        self._done = 0
        #: The next ordinal of each split that it holds.
        self.holds: dict[int, int] = {}

    def assign(self, splits: list[int], first: int) -> None:
        self.assigned.append((self._num_splits, len(splits), splits[0], first))
        for number, split in enumerate(splits, start=self._num_splits):
            self._queue += [(number, split, step) for step in self._model.steps(split, first)]
            self._queue.append((number, split, "end"))
            self.holds[split] = first
        self._num_splits += len(splits)

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def reply(self) -> tuple[GetElementsReply, Chunk | Exception | None]:
        """Return the next reply, with some elements of its splits."""
        assigned = tuple(self.assigned)
        count = self._chance.randint(1, 12)
        values, runs, ends, since = [], [], [], self._done
        while self._queue and len(values) < count:
            number, split, step = self._queue[0]
            if isinstance(step, tuple):
                if values or ends:
                    break
                del self._queue[0]
                self.holds[split] = max(self.holds[split], step[0] - (step[1] == 0))
                error = FailedError(f"error at {step}")
                return answer_of(
                    failed_split=number, failed_position=step, assigned=assigned, error=b"x"
                ), error
            del self._queue[0]
            if step == "end":
                elements = self._model.counts[split]
                ends.append((number, 1, elements, END_ORDINAL - elements))
                self._done = number + 1
                del self.holds[split]
                continue
            assert isinstance(step, int)
            values.append(split * 100 + step)
            self.holds[split] = step + 1
            last = runs[-1] if runs else None
            if last and last[0] == number and last[2] + last[3] == step:
                runs[-1] = (number, 1, last[2], last[3] + 1)
            elif last and last[0] + last[1] == number and last[2:] == (step, 1):
                runs[-1] = (last[0], last[1] + 1, step, 1)
            else:
                runs.append((number, 1, step, 1))
        message = answer_of(
            num_elements=len(values),
            origins=(*merge_runs(runs), *merge_runs(ends)),
            done_from=since,
            done_to=self._done,
            assigned=assigned,
        )
        return message, chunk_of(values) if values else None


@pytest.mark.parametrize("seed", range(300))
def test_splits_that_arrive_in_any_order_are_read_in_order(seed: int) -> None:
    """Tasks are lost at random times; the missing parts of their splits are assigned again."""
    chance = random.Random(seed)
    model = Model(chance)
    buffer = ReorderBuffer(max_bytes=chance.choice([0, 50, 1 << 20]))
    tasks = {number: Task(number, model, chance) for number in range(3)}
    unassigned = list(range(model.size))
    returned_splits: list[tuple[int, int]] = []
    got: list[str] = []
    split = ordinal = 0
    for _ in range(10_000):
        if split == model.size:
            break
        many = buffer.take_complete(split, 3, chance.randint(1, 9)) if not ordinal else None
        if many is not None:
            each = many[0].size // many[1]
            rows = [str(int(row)) for row in many[0].rows()]
            for number in range(many[1]):
                got += [*rows[number * each : (number + 1) * each], f"end {each}"]
            split += many[1]
            continue
        found = buffer.next_elements(split, ordinal, chance.randint(1, 4))
        if found is not None:
            if found.error is not None:
                got.append(str(found.error))
            elif found.chunk is not None:
                got += [str(int(each)) for each in found.chunk.rows()]
                assert got[-1] == str(split * 100 + found.ordinal + found.chunk.size - 1)
                ordinal = found.ordinal + found.chunk.size
            else:
                got.append(f"end {found.num_elements}")
                split, ordinal = split + 1, 0
            continue
        if chance.random() < 0.1:
            lost = tasks.pop(chance.choice(list(tasks)))
            buffer.forget_tasks([lost.number])
            returned_splits = sorted([*returned_splits, *lost.holds.items()])
            number = lost.number + 3
            tasks[number] = Task(number, model, chance)
        allowed = buffer.tasks_to_request(split, set(tasks))
        number = chance.choice(sorted(tasks if allowed is None else allowed))
        task = tasks[number]
        if task.is_idle:
            if returned_splits:
                returned, first = returned_splits.pop(0)
                task.assign([returned], first)
            elif unassigned:
                many = chance.randint(1, 5)
                task.assign(unassigned[:many], 0)
                del unassigned[:many]
            else:
                continue
        buffer.add_reply(number, *task.reply(), 100)
    assert got == [each for one in range(model.size) for each in model.outcomes(one)]
    assert buffer.bytes == 0


def test_duplicate_elements_are_returned_once() -> None:
    """Two tasks compute a split; the elements of the faster one count."""
    buffer = ReorderBuffer(max_bytes=1 << 20)
    assigned = ((0, 1, 7, 0),)
    buffer.add_reply(
        1,
        answer_of(num_elements=2, origins=((0, 1, 0, 2),), assigned=assigned),
        chunk_of([1, 2]),
        16,
    )
    first = answer_of(num_elements=3, origins=((0, 1, 0, 3),), assigned=assigned)
    buffer.add_reply(2, first, chunk_of([1, 2, 3]), 24)
    last = answer_of(
        num_elements=1, origins=((0, 1, 2, 1), (0, 1, 3, END_ORDINAL - 3)), assigned=assigned
    )
    buffer.add_reply(1, last, chunk_of([3]), 8)
    got: list[int] = []
    while (found := buffer.next_elements(7, len(got), 10)) is not None and found.chunk is not None:
        got += map(int, found.chunk.rows())
    assert got == [1, 2, 3]
    assert found is not None
    assert found.num_elements == 3


def test_complete_splits_are_returned_up_to_the_requested_limits() -> None:
    buffer = ReorderBuffer(max_bytes=1 << 20)
    ended = ((0, 5, 0, 2), (0, 5, 2, END_ORDINAL - 2))
    many = answer_of(num_elements=10, origins=ended, assigned=((0, 5, 7, 0),))
    buffer.add_reply(1, many, chunk_of([*range(10)]), 80)
    got: list[tuple[list[int], int]] = []
    split = 7
    for max_splits, limit in [(9, 1), (9, 3), (2, 9), (9, 9)]:
        taken = buffer.take_complete(split, max_splits, limit)
        if taken is not None:
            got.append(([int(row) for row in taken[0].rows()], taken[1]))
            split += taken[1]
    # One element is less than a split; three are one and a half splits.
    assert got == [([0, 1], 1), ([2, 3, 4, 5], 2), ([6, 7, 8, 9], 2)]
    assert buffer.take_complete(split, 9, 9) is None
    assert buffer.bytes == 0


def test_a_full_buffer_requests_only_from_the_holder_of_the_awaited_split() -> None:
    buffer = ReorderBuffer(max_bytes=10)
    assert buffer.tasks_to_request(0, {1, 2}) is None
    ahead = answer_of(num_elements=1, origins=((0, 1, 0, 1),), assigned=((0, 1, 5, 0),))
    buffer.add_reply(1, ahead, chunk_of([5]), 100)
    assert buffer.tasks_to_request(0, {1, 2}) is None, "no task is known to hold it"
    buffer.add_reply(2, answer_of(assigned=((0, 2, 0, 0),)), None, 0)
    assert buffer.tasks_to_request(0, {1, 2}) == {2}
    assert buffer.tasks_to_request(None, {1, 2}) == set(), "the next elements are buffered"
    assert buffer.tasks_to_request(0, {1}) is None, "the task has finished"
    assert buffer.tasks_to_request(0, {1, 2, 3}, frozenset({3, 4})) == {2, 3}, (
        "the dispatcher named it as urgent"
    )


def test_received_elements_of_an_abandoned_split_are_returned() -> None:
    buffer = ReorderBuffer(max_bytes=10)
    some = answer_of(num_elements=1, origins=((0, 1, 0, 1),), assigned=((0, 1, 0, 0),))
    buffer.add_reply(1, some, chunk_of([5]), 1)
    buffer.abandon([(0, 1)])
    found = buffer.next_elements(0, 0, 5)
    assert found is not None
    assert found.chunk is not None
    end = buffer.next_elements(0, 1, 5)
    assert end is not None
    assert end.chunk is None


def buffer_with_three_complete_splits() -> ReorderBuffer:
    """Return a buffer with splits 4, 5 and 6 of two 10-byte elements each, from one reply."""
    buffer = ReorderBuffer(max_bytes=1 << 20)
    reply = answer_of(
        num_elements=6,
        origins=((0, 3, 0, 2), (0, 3, 2, END_ORDINAL - 2)),
        assigned=((0, 3, 4, 0),),
    )
    buffer.add_reply(1, reply, chunk_of([40, 41, 50, 51, 60, 61]), 60)
    return buffer


@pytest.mark.parametrize(
    ("max_splits", "limit", "values"),
    [(3, 9, [40, 41, 50, 51, 60, 61]), (3, 5, [40, 41, 50, 51]), (1, 9, [40, 41])],
)
def test_take_complete_obeys_the_limits_of_splits_and_elements(
    max_splits: int, limit: int, values: list[int]
) -> None:
    found = buffer_with_three_complete_splits().take_complete(4, max_splits, limit)
    assert found is not None
    assert [int(each) for each in found[0].rows()] == values
    assert found[1] == len(values) // 2


def test_splits_larger_than_the_limit_are_not_taken_as_a_whole() -> None:
    assert buffer_with_three_complete_splits().take_complete(4, 3, 1) is None


def test_buffered_bytes_count_until_elements_are_returned() -> None:
    buffer = buffer_with_three_complete_splits()
    assert buffer.bytes == 60
    buffer.take_complete(4, 2, 9)
    assert buffer.bytes == 20
    assert buffer.next_elements(6, 0, 9) is not None
    assert buffer.next_elements(6, 2, 9) is not None
    assert buffer.bytes == 0


@pytest.mark.parametrize("done_to", [0, 1])
def test_an_error_records_whether_it_is_the_last_of_its_split(done_to: int) -> None:
    buffer = ReorderBuffer(max_bytes=1 << 20)
    failed = answer_of(
        failed_split=0,
        failed_position=(0, 1),
        error=b"x",
        done_to=done_to,
        assigned=((0, 1, 7, 0),),
    )
    buffer.add_reply(1, failed, FailedError(), 0)
    found = buffer.next_elements(7, 0, 5)
    assert found is not None
    assert found.error is not None
    assert get_error_position(found.error) == ErrorPosition(7, 0, 1, is_last=bool(done_to))


def test_finished_tasks_are_forgotten() -> None:
    buffer = buffer_with_three_complete_splits()
    assert buffer.tasks == {1}
    buffer.forget_tasks([1, 2])
    assert buffer.tasks == set()


def test_nothing_is_retained_of_read_splits() -> None:
    # Every second split ends only because its task reports it as done.
    buffer = ReorderBuffer(max_bytes=1 << 20)
    for split in range(400):
        end = {"done_from": split, "done_to": split + 1} if split % 2 else {"done_to": 0}
        ends = () if split % 2 else ((split, 1, 1, END_ORDINAL - 1),)
        one = answer_of(
            num_elements=1,
            origins=((split, 1, 0, 1), *ends),
            assigned=((split, 1, split, 0),),
            **end,
        )
        buffer.add_reply(1, one, chunk_of([split]), 8)
        assert buffer.next_elements(split, 0, 1) is not None
        assert buffer.next_elements(split, 1, 1) is not None
    assert len(buffer._complete_splits) <= 100
    assert buffer._read_splits == ((0, 400),)


def test_splits_completed_by_two_tasks_are_returned_once() -> None:
    buffer = buffer_with_three_complete_splits()
    reply = answer_of(
        num_elements=8, origins=((0, 4, 0, 2), (0, 4, 2, END_ORDINAL - 2)), assigned=((0, 4, 3, 0),)
    )
    buffer.add_reply(2, reply, chunk_of([30, 31, 40, 41, 50, 51, 60, 61]), 80)
    got, split, ordinal = [], 3, 0
    while (found := buffer.next_elements(split, ordinal, 9)) is not None:
        if found.chunk is None:
            split, ordinal = split + 1, 0
            continue
        got += [int(each) for each in found.chunk.rows()]
        ordinal += found.chunk.size
    assert (split, got) == (7, [30, 31, 40, 41, 50, 51, 60, 61])
    assert buffer.bytes == 0
