"""Plans with assigned splits: all readers together read every element once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError, InvalidElementError, UserFunctionError
from headrace.execution.assigned_iterators import count_finished_splits
from headrace.execution.build import build_iterator
from headrace.execution.split_provider import AssignedPositions
from headrace.plan.traverse import walk
from headrace.rewrites.optimize import prepare
from headrace.rewrites.split_space import compute_split_space

from .pipelines import failing, odd_or_half

Dataset = hr.Dataset


def text(element):
    """Return an element as something that can be counted."""
    return repr(np.asarray(element).tolist())


def read(iterator, limit=5):
    """Return the elements, without those that fail."""
    rows = []
    while True:
        try:
            chunk = iterator.next_chunk(limit)
        except UserFunctionError:
            continue
        if chunk is None:
            return rows
        rows += map(text, chunk.rows())


def exhaust(iterator, limit):
    while iterator.next_chunk(limit) is not None:
        pass


def fails(plan):
    return any(getattr(node, "fn", None) is failing for node in walk(plan))


def count_plan_splits(plan):
    return compute_split_space(prepare(plan).plan).size


def read_assigned(plan, ranges, seed=7, limit=5):
    """Return the elements that one worker reads for these ranges of splits."""
    waiting = iter(ranges)
    iterator = build_iterator(plan, seed=seed, next_splits=lambda: next(waiting, None))
    try:
        return read(iterator, limit)
    finally:
        iterator.close()


SOURCES = st.sampled_from(
    [
        lambda: Dataset.range(13),
        lambda: Dataset.range(13).shuffle(5),
        lambda: Dataset.range(6).repeat(2).shuffle(20, seed=1),
        lambda: Dataset.from_tensor_slices(np.arange(9)),
        lambda: Dataset.from_tensor_slices(np.arange(5)).flat_map(
            lambda n: Dataset.from_generator(lambda: iter(range(int(n))))
        ),
    ]
)
STEPS = st.sampled_from(
    [
        lambda ds: ds.map(odd_or_half),
        lambda ds: ds.map(failing),
        lambda ds: ds.map(lambda x: x + 1),
        lambda ds: ds.map(odd_or_half, num_parallel_calls=2),
        lambda ds: ds.filter(lambda x: bool(x % 3)),
        lambda ds: ds.filter(lambda x: x % 2 == 0),
        lambda ds: ds.repeat(2),
        lambda ds: ds.repeat(3),
        lambda ds: ds.concatenate(Dataset.range(4)),
        lambda ds: Dataset.range(3).map(odd_or_half).concatenate(ds),
        lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 4)),
        lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 5 + 1).shuffle(5)),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.shuffle(4).cache(),
        lambda ds: ds.scan(0, lambda total, x: (total + x, x)),
        lambda ds: ds.group_by_window(lambda x: x % 3, lambda key, w: w.map(lambda x: x + 1), 2),
        lambda ds: ds.map(lambda x: [x]).padded_batch(1).map(np.sum),
    ]
)


@settings(max_examples=120)
@given(
    source=SOURCES,
    steps=st.lists(STEPS, max_size=4),
    batch=st.sampled_from([0, 0, 2, 3]),
    workers=st.integers(1, 4),
    data=st.data(),
)
def test_workers_together_read_the_elements_of_a_single_process(
    source, steps, batch, workers, data
):
    dataset = source()
    for step in steps:
        dataset = step(dataset)
    plan = dataset.plan
    # A failed element is replaced in its batch by the next one, but only within a split.
    if batch and not fails(plan):
        joined = data.draw(st.sampled_from([Dataset.batch, Dataset.padded_batch]))
        batched = joined(dataset, batch).plan
        # Batches are the same only if a split is a batch; otherwise workers batch differently.
        one = count_plan_splits(plan)
        if count_plan_splits(batched) < one or one == 0:
            plan = batched
    whole = build_iterator(plan, seed=7)
    want = Counter(read(whole))
    whole.close()
    splits = count_plan_splits(plan)
    cuts = sorted(data.draw(st.sets(st.integers(0, splits), max_size=6)) | {0, splits})
    ranges = data.draw(st.permutations(list(pairwise(cuts))))
    owners = [data.draw(st.integers(0, workers - 1)) for _ in ranges]
    got = Counter()
    for worker in range(workers):
        mine = [r for r, owner in zip(ranges, owners, strict=True) if owner == worker]
        got.update(read_assigned(plan, mine, limit=data.draw(st.sampled_from([1, 3, 50]))))
    assert got == want


def test_a_global_shuffle_assigned_in_order_equals_that_of_a_single_process():
    plan = Dataset.range(100).shuffle(30).map(odd_or_half).batch(4).repeat(2).plan
    assert count_plan_splits(plan) == 50
    in_order = read_assigned(plan, [(0, 10), (10, 33), (33, 50)])
    assert in_order == read(build_iterator(plan, seed=7))


def test_a_split_of_an_earlier_epoch_may_be_assigned_after_a_later_one():
    plan = Dataset.range(4).shuffle(4).filter(lambda x: bool(x >= 0)).repeat(3).plan
    once = read(build_iterator(plan, seed=7))
    assert read_assigned(plan, [(8, 10), (1, 3), (10, 12), (0, 1), (3, 8)]) == (
        once[8:10] + once[1:3] + once[10:12] + once[0:1] + once[3:8]
    )


def test_states_contain_the_number_of_finished_splits():
    plan = Dataset.range(20).map(odd_or_half).batch(3).plan
    waiting = iter([(4, 6), (0, 2), (6, 7)])
    iterator = build_iterator(plan, seed=1, next_splits=lambda: next(waiting, None))
    assert count_finished_splits(iterator.get_state()) == 0
    done = []
    while (chunk := iterator.next_chunk(2)) is not None:
        done += [count_finished_splits(chunk.state_at(index + 1)) for index in range(chunk.size)]
        assert done[-1] == count_finished_splits(iterator.get_state())
    assert done == [1, 2, 3, 4, 5]
    assert count_finished_splits(iterator.get_state()) == 5


def test_a_split_is_finished_once_all_its_elements_were_yielded():
    plan = Dataset.range(3).flat_map(lambda x: Dataset.range(int(x) + 1)).plan
    waiting = iter([(1, 3)])
    iterator = build_iterator(plan, seed=1, next_splits=lambda: next(waiting, None))
    seen = []
    while (chunk := iterator.next_chunk(1)) is not None:
        seen.append((int(chunk.rows()[0]), count_finished_splits(chunk.state_at(1))))
    assert [value for value, _ in seen] == [0, 1, 0, 1, 2]
    assert [done for _, done in seen][:1] == [0]
    assert count_finished_splits(iterator.get_state()) == 2


@pytest.mark.parametrize("threads", [None, 2])
def test_an_error_names_the_position_in_the_data_not_in_the_assigned_splits(threads):
    def divide(x):
        return 1 // (int(x) - 7)

    plan = Dataset.range(10).map(divide, num_parallel_calls=threads).plan
    whole, assigned = (
        build_iterator(plan),
        build_iterator(plan, next_splits=iter([(5, 9), None]).__next__),
    )
    for iterator, most in ((whole, 3), (assigned, 3), (build_iterator(plan), 1)):
        with pytest.raises(UserFunctionError, match="for element 7") as caught:
            exhaust(iterator, most)
        assert caught.value.position == 7
        iterator.close()


class Parts(hr.Source):
    """Three indices of two numbers each; reader positions look like states of leaves."""

    size = 3

    def open(self, start, stop, position=None, *, pass_number=()):
        return PartReader(start, (position or {"assigned": 0})["assigned"])


class PartReader:
    def __init__(self, index, taken):
        self.index, self.taken = index, taken

    def read(self, limit):
        if self.taken == 2:
            return None
        self.taken += 1
        return Chunk.of_rows([np.int64(2 * self.index + self.taken - 1)])

    def get_position(self):
        return {"assigned": self.taken}

    def close(self):
        pass


def test_a_reader_position_in_a_hint_does_not_count_as_splits():
    waiting = iter([(0, 3)])
    iterator = build_iterator(
        Dataset.from_source(Parts()).plan, next_splits=lambda: next(waiting, None)
    )
    seen = []
    while (chunk := iterator.next_chunk(1)) is not None:
        seen.append((int(chunk.rows()[0]), count_finished_splits(chunk.state_at(0))))
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_state_within_a_split_counts_the_split_as_started():
    plan = Dataset.range(20).map(odd_or_half).batch(3).plan
    waiting = iter([(4, 6), (0, 2), (6, 7)])
    iterator = build_iterator(plan, seed=1, next_splits=lambda: next(waiting, None))
    rows = build_iterator(Dataset.range(20).map(odd_or_half).plan, seed=1)
    assert "started" not in repr(rows.next_chunk(7).state_at(7))
    while (chunk := iterator.next_chunk(2)) is not None:
        assert "started" not in repr(chunk.state_at(chunk.size))
    run = AssignedPositions(start=12, stop=18, positions_per_split=3, num_assigned_before=4)
    assert [run.num_finished(position) for position in range(12, 19)] == [4, 4, 4, 5, 5, 5, 6]
    assert [run.num_started(position) for position in range(12, 19)] == [4, 5, 5, 5, 6, 6, 6]
    short = AssignedPositions(start=12, stop=17, positions_per_split=3, num_assigned_before=4)
    assert (short.num_finished(17), short.num_started(17)) == (6, 6)


def element_of(split):
    return Dataset.range(10).map(lambda _: split)


@pytest.mark.parametrize(
    "steps",
    [
        lambda ds: ds.interleave(element_of, cycle_length=5),
        lambda ds: ds.interleave(element_of, cycle_length=3, num_parallel_calls=2),
        lambda ds: ds.filter(lambda x: bool(x >= 0)).shuffle(8),
        lambda ds: ds.map(lambda x: x, num_parallel_calls=2, deterministic=False),
        lambda ds: ds.flat_map(element_of).prefetch(3),
        lambda ds: ds.map(lambda x: x).cache().repeat(1),
    ],
)
@pytest.mark.parametrize("limit", [1, 7])
def test_a_split_is_started_before_its_first_element_is_yielded(steps, limit):
    ranges = [(20, 30), (5, 6), (10, 14), (0, 5)]
    order = [split for first, stop in ranges for split in range(first, stop)]
    waiting = iter(ranges)
    iterator = build_iterator(
        steps(Dataset.range(30)).plan, seed=7, next_splits=lambda: next(waiting, None)
    )
    assert iterator.num_started == 0
    while (chunk := iterator.next_chunk(limit)) is not None:
        assert {int(row) for row in chunk.rows()} <= {*order[: iterator.num_started]}
    assert iterator.num_started == len(order)
    iterator.close()


def test_a_single_split_plan_starts_its_split_when_it_is_assigned():
    rows = Dataset.range(5).filter(lambda x: bool(x >= 0))
    waiting = iter([(0, 1)])
    iterator = build_iterator(
        Dataset.zip(rows, rows).plan, seed=7, next_splits=lambda: next(waiting, None)
    )
    assert iterator.num_started == 0
    chunk = iterator.next_chunk(2)
    assert (
        count_finished_splits(chunk.state_at(1)),
        chunk.state_at(1)["started"],
        iterator.num_started,
    ) == (0, 1, 1)


def test_splits_that_a_step_above_does_not_need_are_skipped():
    plan = Dataset.range(6).filter(lambda x: bool(x % 2)).take(2).repeat(2).plan
    assert read_assigned(plan, [(0, 6), (6, 12)]) == ["1", "3", "1", "3"]


def test_splits_are_finished_once_their_elements_left_the_windows():
    plan = Dataset.range(40).group_by_window(lambda x: x % 2, lambda key, w: w.batch(5), 5).plan
    waiting = iter([(10, 20), (0, 10), (20, 40)])
    iterator = build_iterator(plan, seed=7, next_splits=lambda: next(waiting, None))
    held, windows = set(range(40)), []
    try:
        while (chunk := iterator.next_chunk(1)) is not None:
            windows += [row.tolist() for row in chunk.rows()]
            held -= set(windows[-1])
            order = [*range(10, 20), *range(10), *range(20, 40)]
            left = min(order.index(x) for x in held) if held else 40
            assert count_finished_splits(chunk.state_at(1)) <= left
    finally:
        iterator.close()
    assert sorted(x for window in windows for x in window) == list(range(40))
    assert all(len({x % 2 for x in window}) == 1 for window in windows)


@pytest.mark.parametrize(
    "mixed",
    [
        Dataset.sample_from_datasets([Dataset.range(9), Dataset.range(20, 26)], seed=1),
        Dataset.choose_from_datasets(
            [Dataset.range(9), Dataset.range(20, 26)], Dataset.random(seed=2).map(lambda x: x % 2)
        ),
    ],
)
def test_a_plan_that_mixes_streams_is_a_single_split(mixed):
    assert count_plan_splits(mixed.plan) == 1
    assert read_assigned(mixed.plan, [(0, 1)]) == read(build_iterator(mixed.plan, seed=7))
    assert read_assigned(mixed.plan, []) == []


def test_a_plan_of_zipped_streams_is_a_single_split():
    plan = Dataset.zip(
        Dataset.range(5).map(odd_or_half), Dataset.range(5).filter(lambda x: bool(x >= 0))
    ).plan
    assert count_plan_splits(plan) == 1
    assert read_assigned(plan, [(0, 1)]) == read(build_iterator(plan, seed=7))
    assert read_assigned(plan, []) == []


def one_in(x):
    return 1 // (int(x) - 7)


@pytest.mark.parametrize(
    "steps",
    [
        lambda ds: ds.map(one_in),
        lambda ds: ds.map(odd_or_half).map(lambda x: 1 // (int(x) - 14)),
        lambda ds: ds.map(one_in, num_parallel_calls=2),
        lambda ds: ds.filter(one_in),
        lambda ds: ds.map(one_in).batch(2),
    ],
    ids=["map", "map of maps", "parallel map", "filter", "below a batch"],
)
def test_an_error_names_the_same_element_with_assigned_splits_as_in_one_process(steps):
    plan = steps(Dataset.range(10)).plan
    count = count_plan_splits(plan)
    splits = iter([(count * 6 // 10, count), (0, 2)])

    whole = first_error(build_iterator(plan, seed=7))
    assigned = first_error(build_iterator(plan, seed=7, next_splits=lambda: next(splits, None)))

    assert whole.position == 7
    assert (assigned.position, "for element 7" in str(assigned)) == (7, True)


def first_error(iterator):
    """Return the first error that reading raises."""
    try:
        while iterator.next_chunk(3) is not None:
            pass
    except UserFunctionError as error:
        return error
    finally:
        iterator.close()
    raise AssertionError("nothing failed")


def test_an_iterator_over_assigned_splits_cannot_be_restored():
    iterator = build_iterator(Dataset.range(4).plan, seed=1, next_splits=lambda: None)
    assert iterator.next_chunk(1) is None
    with pytest.raises(FailedPreconditionError, match="assigns the splits again"):
        iterator.set_state(0)


@pytest.mark.parametrize(
    "cached",
    [
        lambda ds: ds.cache(),
        lambda ds: ds.map(lambda x: x + 1).cache(),
        lambda ds: ds.shuffle(6).cache().repeat(2),
        lambda ds: ds.cache().map(lambda x: x + 1).prefetch(1),
        lambda ds: ds.cache().batch(2),
    ],
    ids=["bare", "over map", "over shuffle, repeated", "below map", "below batch"],
)
def test_datasets_nested_over_a_cache_draw_the_same_with_assigned_splits(cached):
    def shuffled(x):
        return Dataset.range(6).shuffle(6).batch(6).map(lambda order: (order, np.sum(x)))

    dataset = cached(Dataset.range(6)).flat_map(shuffled)

    def elements(iterator):
        found = []
        while (chunk := iterator.next_chunk(3)) is not None:
            found += [(order.tolist(), int(x)) for order, x in chunk.rows()]
        return sorted(found)

    assign = compute_split_space(prepare(dataset.plan).plan)
    assert assign is not None
    splits = iter([(at, at + 1) for at in reversed(range(assign.size))])
    assigned = build_iterator(dataset.plan, seed=3, next_splits=lambda: next(splits, None))
    whole = elements(build_iterator(dataset.plan, seed=3))
    assert elements(assigned) == whole
    assert elements(build_iterator(dataset.plan, seed=3)) == whole  # from the cache


@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_a_failing_element_of_the_index_plan_is_skipped(limit):
    dataset = Dataset.range(7).batch(2).batch(2).repeat(5)  # the last of each pass do not stack
    splits = iter([(0, 4), (4, count_plan_splits(dataset.plan)), None])
    iterator = build_iterator(dataset.plan, seed=1, next_splits=lambda: next(splits))
    found, errors = 0, []
    while True:
        try:
            chunk = iterator.next_chunk(limit)
        except InvalidElementError as error:
            errors.append(str(error))
            continue
        if chunk is None:
            break
        found += chunk.size
    assert (found, len(errors)) == (5, 5)
    assert "cannot stack" in errors[0]
