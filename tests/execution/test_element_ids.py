"""Element ids of plans with assigned splits, which are the same for every reader."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import concatenate
from headrace.element.compact_columns import (
    ConsecutiveSplits,
    InterleavedSplits,
    concatenate_columns,
)
from headrace.element.metadata import constituent_ids, split_column
from headrace.errors import FailedPreconditionError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.element_ids import (
    IdRun,
    element_id_runs,
    group_by_split,
    round_robin_order,
    round_robin_runs,
    sort_order,
    sort_to_runs,
    to_runs,
)
from headrace.execution.element_numbers import round_robin_column
from headrace.execution.split_progress import FinishedSplits, SplitProgress
from headrace.execution.split_provider import PartialSplit
from headrace.plan.determinism import find_unordered_steps
from headrace.plan.partition_nodes import PartitionBoundary
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition_boundaries import insert_boundaries
from headrace.rewrites.split_space import compute_split_space

from .pipelines import drawn, failing, nested, odd_or_half

Dataset = hr.Dataset


def text(element):
    """Return an element as something that can be counted."""
    return repr(np.asarray(element).tolist())


def count_plan_splits(plan):
    return compute_split_space(prepare(plan).plan).size


class Seen:
    """Result of one reader: the elements with their ids, and the numbers of elements of splits."""

    def __init__(self):
        self.elements = []
        self.ended = {}
        self.errors = []


def read_with_ids(plan, grants, *, limit=5, seed=7):
    """Return the elements that one worker reads for these splits or partial splits."""
    waiting = iter(grants)
    iterator = build_iterator(
        plan, seed=seed, next_splits=lambda: next(waiting, None), with_element_ids=True
    )
    seen = Seen()
    try:
        while True:
            try:
                chunk = iterator.next_chunk(limit)
            except UserFunctionError as error:
                seen.errors.append(str(error))
                continue
            if chunk is None:
                break
            for index, row in enumerate(chunk.rows()):
                splits, ordinals = constituent_ids(chunk.metadata[index : index + 1])
                ids = list(zip(splits.tolist(), ordinals.tolist(), strict=True))
                seen.elements.append((text(row), ids))
        for one in iterator.take_finished():
            for split in range(one.first_split, one.first_split + one.num_splits):
                assert split not in seen.ended
                seen.ended[split] = one.num_elements
    finally:
        iterator.close()
    return seen


SOURCES = {
    "range": lambda: Dataset.range(13),
    "shuffle": lambda: Dataset.range(13).shuffle(5),
    "repeated": lambda: Dataset.range(6).repeat(2).shuffle(20, seed=1),
    "slices": lambda: Dataset.from_tensor_slices(np.arange(9)),
    "generators": lambda: Dataset.from_tensor_slices(np.arange(7)).flat_map(
        lambda n: Dataset.from_generator(lambda: iter(range(int(n))))
    ),
}
#: Steps that work within one split, for any input.
WITHIN = {
    "map": lambda ds: ds.map(odd_or_half),
    "failing map": lambda ds: ds.map(failing),
    "columns": lambda ds: ds.map(lambda x: x + 1),
    "threaded map": lambda ds: ds.map(odd_or_half, num_parallel_calls=2),
    "free map": lambda ds: ds.map(odd_or_half, num_parallel_calls=2, deterministic=False),
    "filter": lambda ds: ds.filter(lambda x: bool(x % 3)),
    "failing filter": lambda ds: ds.filter(lambda x: failing(x) % 2 == 0),
    "column filter": lambda ds: ds.filter(lambda x: x % 2 == 0),
    "repeat": lambda ds: ds.repeat(2),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(4)),
    "concatenated": lambda ds: Dataset.range(3).map(odd_or_half).concatenate(ds),
    "flat_map": lambda ds: ds.flat_map(nested),
    "drawn flat_map": lambda ds: ds.flat_map(drawn),
    "prefetch": lambda ds: ds.prefetch(2),
    "shuffle": lambda ds: ds.shuffle(4),
    "batch, unbatch": lambda ds: ds.batch(1).unbatch(),
}
#: Steps that may stand at the end, over any of these.
ABOVE = {
    "nothing": lambda ds: ds,
    "batch": lambda ds: ds.batch(3),
    "padded batch": lambda ds: ds.padded_batch(2),
    "batches of batches": lambda ds: ds.batch(2).map(lambda x: x.sum()).batch(3),
    "shuffle, filter": lambda ds: ds.shuffle(5).filter(lambda x: bool(x % 4)),
    "shuffled batches": lambda ds: ds.batch(2).shuffle(3),
    "buckets": lambda ds: ds.bucket_by_sequence_length(
        lambda x: int(x) % 7, [2, 4], [3, 2, 2], no_padding=True
    ),
    "packed": lambda ds: ds.map(lambda x: np.full(int(x) % 4 + 1, x)).pack_sequences(6, num_bins=2),
    "batches by cost": lambda ds: ds.batch_by_cost(5, lambda x: int(x) % 3 + 1),
}
INTERLEAVES = {
    "none": lambda ds: ds,
    "interleave": lambda ds: ds.interleave(nested, cycle_length=3, block_length=2),
    "drawn interleave": lambda ds: ds.interleave(drawn, cycle_length=4),
    "threaded interleave": lambda ds: ds.interleave(drawn, cycle_length=3, num_parallel_calls=2),
    "free interleave": lambda ds: ds.interleave(
        drawn, cycle_length=3, num_parallel_calls=2, deterministic=False
    ),
}


def has_ids(plan):
    """Return whether the elements of a plan have ids."""
    try:
        build_iterator(plan, next_splits=lambda: None, with_element_ids=True).close()
    except FailedPreconditionError:
        return False
    return True


def random_plan(chance, *, above):
    """Return a plan, and the names of its steps."""
    names = [chance.choice([*SOURCES])]
    dataset = SOURCES[names[0]]()
    steps = [(name, WITHIN[name]) for name in chance.choices([*WITHIN], k=chance.randint(0, 3))]
    steps += [(name, INTERLEAVES[name]) for name in chance.choices([*INTERLEAVES])]
    steps += [(name, WITHIN[name]) for name in chance.choices([*WITHIN], k=chance.randint(0, 1))]
    for name, step in steps:
        more = step(dataset)
        if has_ids(more.plan):  # not if a split has several outer elements
            dataset = more
            names.append(name)
    if above:
        names.append(chance.choice([*ABOVE]))
        dataset = ABOVE[names[-1]](dataset)
    return dataset.plan, names


def divide_at_random(chance, splits):
    """Return ranges that together are all splits, in arbitrary order."""
    cuts = {chance.randint(0, splits) for _ in range(chance.randint(0, 6))} | {0, splits}
    ranges = list(pairwise(sorted(cuts)))
    chance.shuffle(ranges)
    return ranges


def elements_by_id(seen):
    """Return a dict from element id to element, for elements that are not batches."""
    found = {}
    for element, ids in seen.elements:
        ((split, ordinal),) = ids
        assert (split, ordinal) not in found
        found[split, ordinal] = element
    return found


def has_boundary_at_end(plan):
    """Return whether no step is above the boundary; an unordered step over larger splits is."""
    prepared = prepare(plan)
    free = find_unordered_steps(prepared.plan, prepared.options.deterministic)
    return isinstance(insert_boundaries(prepared.plan, free), PartitionBoundary)


def sizes_of(plan, elements, splits):
    """Return the number of elements of each split at the boundary; filters above may drop some."""
    if has_boundary_at_end(plan):
        counted = Counter(split for split, _ in elements)
        return {split: counted[split] for split in range(splits)}
    return read_with_ids(plan, [(0, splits)]).ended


ABOVE_WITHOUT_FILTERS = {"batch", "padded batch", "batches of batches", "shuffled batches"}
SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_element_id_identifies_the_same_element_for_every_reader(seed):
    chance = random.Random(seed)
    plan, names = random_plan(chance, above=False)
    print(seed, names)
    splits = count_plan_splits(plan)
    want = elements_by_id(read_with_ids(plan, [(0, splits)]))
    grants = [[] for _ in range(chance.randint(1, 3))]
    for one in divide_at_random(chance, splits):
        chance.choice(grants).append(one)
    got, ended = {}, {}
    for mine in grants:
        seen = read_with_ids(plan, mine, limit=chance.choice([1, 3, 50]))
        found = elements_by_id(seen)
        assert not got.keys() & found.keys()
        got |= found
        ended |= seen.ended
    assert got == want
    sizes = sizes_of(plan, want, splits)
    assert ended == sizes
    if has_boundary_at_end(plan):
        for split, size in sizes.items():
            assert {ordinal for one, ordinal in want if one == split} == set(range(size))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_element_made_of_several_has_the_ids_of_all(seed):
    chance = random.Random(seed)
    plan, names = random_plan(chance, above=True)
    print(seed, names)
    splits = count_plan_splits(plan)
    seen = read_with_ids(plan, divide_at_random(chance, splits), limit=chance.choice([1, 4, 50]))
    ids = [one for _, of_one in seen.elements for one in of_one]
    assert len(set(ids)) == len(ids)
    for split, ordinal in ids:
        assert 0 <= ordinal < seen.ended[split]
    assert set(seen.ended) == set(range(splits))
    if {names[-1]} <= ABOVE_WITHOUT_FILTERS and not seen.errors and "free map" not in names:
        assert len(ids) == sum(seen.ended.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_two_readers_of_a_partial_split_each_read_every_element_once(seed):
    chance = random.Random(seed)
    plan, names = random_plan(chance, above=False)
    print(seed, names)
    splits = count_plan_splits(plan)
    want = elements_by_id(read_with_ids(plan, [(0, splits)]))
    sizes = sizes_of(plan, want, splits)
    grants = [[], []]
    for split in range(splits):
        size = sizes[split]
        if not size or chance.random() < 0.5:
            chance.choice(grants).append((split, split + 1))
            continue
        mine = [chance.randint(0, 1) for _ in range(size)]
        for reader in (0, 1):
            wanted = ranges_of([n for n in range(size) if mine[n] == reader], size)
            if wanted:
                grants[reader].append(PartialSplit(split, wanted))
    got = {}
    for assigned_ranges in grants:
        chance.shuffle(assigned_ranges)
        seen = read_with_ids(plan, assigned_ranges, limit=chance.choice([1, 3, 50]))
        found = elements_by_id(seen)
        assert not got.keys() & found.keys()
        got |= found
        for split, elements in seen.ended.items():
            assert elements == sizes[split]
    assert got == want


def ranges_of(ordinals, size):
    """Return ordinals as ranges; the last has no end where it goes up to the last one."""
    ranges = []
    for ordinal in ordinals:
        if ranges and ranges[-1][1] == ordinal:
            ranges[-1][1] = ordinal + 1
        else:
            ranges.append([ordinal, ordinal + 1])
    if ranges and ranges[-1][1] == size:
        ranges[-1][1] = None
    return tuple(tuple(one) for one in ranges)


def test_splits_with_one_element_each_form_one_run():
    waiting = iter([(100, 160)])
    plan = Dataset.range(1000).map(odd_or_half).plan
    iterator = build_iterator(plan, next_splits=lambda: next(waiting, None), with_element_ids=True)
    chunk = iterator.next_chunk(40)
    assert element_id_runs(chunk) == (IdRun(100, 40, 0, 1),)
    assert element_id_runs(chunk.slice(3, 5)) == (IdRun(103, 2, 0, 1),)
    assert iterator.take_finished() == (FinishedSplits(100, 40, 1),)
    assert iterator.take_finished() == ()


def test_counts_are_kept_only_for_open_splits():
    progress, leaf = SplitProgress(), frozenset([0])
    progress.record_assigned(0, 0, 10**12, 7)
    for first in range(0, 10_000, 100):
        splits, ordinals = constituent_ids(
            progress.add_ids(split_column(np.arange(first, first + 100), None))()
        )
        assert (splits == np.arange(first + 7, first + 107)).all()
        assert not ordinals.any()
        progress.record_finished(leaf, first + 100)
    assert progress.take_finished() == (FinishedSplits(7, 10_000, 1),)
    progress.record_finished(leaf, 10**12)
    assert progress.take_finished() == (FinishedSplits(10_007, 10**12 - 10_000, 0),)
    progress.record_assigned(0, 10**12, 3, 50)
    assert constituent_ids(progress.add_ids(split_column(np.full(2, 10**12 + 2), None))())[
        0
    ].tolist() == [52, 52]
    progress.record_finished(leaf, 10**12 + 3)
    assert progress.take_finished() == (FinishedSplits(50, 2, 0), FinishedSplits(52, 1, 2))


def test_splits_of_several_leaves_finish_separately():
    progress = SplitProgress()
    progress.record_assigned(0, 0, 2, 10)
    progress.record_assigned(1, 2, 2, 40)
    progress.record_assigned(0, 4, 1, 12)
    splits, ordinals = constituent_ids(
        progress.add_ids(split_column(np.array([4, 0, 0, 2, 4]), None))()
    )
    assert splits.tolist() == [12, 10, 10, 40, 12]
    assert ordinals.tolist() == [0, 0, 1, 0, 1]
    progress.record_finished(frozenset([0]), 5)
    assert progress.take_finished() == (
        FinishedSplits(10, 1, 2),
        FinishedSplits(11, 1, 0),
        FinishedSplits(12, 1, 2),
    )
    progress.record_finished(frozenset([1]), 5)
    assert progress.take_finished() == (FinishedSplits(40, 1, 1), FinishedSplits(41, 1, 0))


def test_chunks_get_ids_together_before_their_splits_finish():
    progress, leaf = SplitProgress(), frozenset([0])
    progress.record_assigned(0, 0, 3, 10)
    columns = [split_column(np.array(splits), None) for splits in ([0, 1], [0, 2], [0])]
    first, second, third = [progress.add_ids(column) for column in columns]
    assert second().tolist() == [(10, 1), (12, 0)]
    assert first().base is third().base  # made with one call
    assert first().tolist() == [(10, 0), (11, 0)]
    assert third().tolist() == [(10, 2)]
    late = progress.add_ids(split_column(np.array([1, 2]), None))
    progress.record_finished(leaf, 3)
    assert progress.take_finished() == (FinishedSplits(10, 1, 3), FinishedSplits(11, 2, 2))
    assert late().tolist() == [(11, 1), (12, 1)]


def test_skipped_elements_are_counted_after_pending_ids():
    progress = SplitProgress()
    progress.record_assigned(0, 0, 1, 5)
    before = progress.add_ids(split_column(np.zeros(2, np.int64), None))
    progress.record_skipped(0, 3)
    after = progress.add_ids(split_column(np.zeros(1, np.int64), None))
    assert before().tolist() == [(5, 0), (5, 1)]
    assert after().tolist() == [(5, 5)]


def test_columns_with_and_without_element_numbers_get_ids_separately():
    progress = SplitProgress()
    progress.record_assigned(0, 0, 1, 5)
    plain = progress.add_ids(split_column(np.zeros(2, np.int64), None))
    placed = progress.add_ids(split_column(np.zeros(1, np.int64), np.array([77], np.uint64)))
    assert placed().tolist() == [(77, 5, 2)]
    assert plain().tolist() == [(5, 0), (5, 1)]


def test_consecutive_splits_stay_compact_until_elements_are_selected():
    rows = np.arange(16 * 64).reshape(16, 64)
    waiting = iter([(100, 1000)])
    iterator = build_iterator(
        Dataset.from_tensor_slices(rows).repeat().plan,
        next_splits=lambda: next(waiting, None),
        with_element_ids=True,
        is_read_only=True,
    )
    chunks = [iterator.next_chunk(30) for _ in range(3)]  # passes of 16 elements, from one on
    assert [chunk.size for chunk in chunks] == [12, 16, 16]
    columns = [chunk.compact_metadata for chunk in chunks]
    assert all(isinstance(column, ConsecutiveSplits) for column in columns)
    joined = concatenate_columns(columns)
    assert isinstance(joined, ConsecutiveSplits)
    assert (joined.first_split, joined.size, joined.ordinal) == (100, 44, 0)
    assert element_id_runs(chunks[1]) == (IdRun(112, 16, 0, 1),)
    assert chunks[1].compact_metadata.tolist() == [(split, 0) for split in range(112, 128)]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.map(odd_or_half),
        lambda ds: ds.filter(lambda x: not isinstance(x, str)),
    ],
    ids=["map", "filter that keeps all"],
)
def test_a_python_function_per_row_keeps_ids_compact(step):
    waiting = iter([(100, 1000)])
    iterator = build_iterator(
        step(Dataset.range(10_000)).plan,
        next_splits=lambda: next(waiting, None),
        with_element_ids=True,
        is_read_only=True,
    )
    assert iterator.next_chunk(1) is not None
    column = iterator.next_chunk(30).compact_metadata
    assert isinstance(column, ConsecutiveSplits)
    assert (column.first_split, column.size, column.ordinal) == (101, 30, 0)


def test_the_ids_of_a_batch_do_not_keep_its_elements_alive():
    made = []

    def fresh(x):
        array = np.full(3, int(x))
        made.append(weakref.ref(array))
        return array

    def batches():
        waiting = iter([(0, 8)])
        files = Dataset.range(8).interleave(lambda x: Dataset.range(3 * x), cycle_length=3)
        plan = files.map(fresh).batch(4).plan
        iterator = build_iterator(
            plan, next_splits=lambda: next(waiting, None), with_element_ids=True
        )
        while (chunk := iterator.next_chunk(1)) is not None:
            yield chunk

    at_once = [element_id_runs(chunk) for chunk in batches()]
    later = list(batches())
    gc.collect()
    assert len(later) == 21
    assert not [array for array in made if array() is not None]
    assert [element_id_runs(chunk.slice(0, 1)) for chunk in reversed(later)] == at_once[::-1]
    assert [element_id_runs(chunk) for chunk in later] == at_once


@pytest.mark.parametrize("ordinal", [None, 3])
def test_a_compact_column_equals_its_array(ordinal):
    row = ConsecutiveSplits(7, 5, ordinal)
    array = row.to_array()
    assert row.dtype == array.dtype
    assert len(row) == len(array) == 5
    for part in (slice(1, 3), slice(0, 9), slice(4, 4)):
        assert row[part].to_array().tolist() == array[part].tolist()
    for after in (
        ConsecutiveSplits(12, 2, ordinal),
        ConsecutiveSplits(11, 2, ordinal),
        ConsecutiveSplits(13, 0, ordinal),
    ):
        for columns in ([row, after], [row, after.to_array()], [array, after]):
            both = concatenate_columns(columns)
            made = both if isinstance(both, np.ndarray) else both.to_array()
            assert made.tolist() == [*array.tolist(), *after.to_array().tolist()]
    assert isinstance(
        concatenate_columns([row, ConsecutiveSplits(12, 2, ordinal)]), ConsecutiveSplits
    )


def test_split_progress_counts_consecutive_splits_like_their_array():
    draw = random.Random(5)
    for _ in range(200):
        ledgers = SplitProgress(), SplitProgress()
        starts = [0, *sorted(draw.sample(range(1, 30), draw.randrange(3))), 30]
        for first, stop in pairwise(starts):
            for progress in ledgers:
                progress.record_assigned(0, first, stop - first, 100 * first)
        later = []
        for _ in range(draw.randrange(1, 8)):
            first = draw.randrange(29)
            row = ConsecutiveSplits(first, draw.randrange(1, 31 - first))
            column = row.to_array() if draw.random() < 0.2 else row
            later.append((ledgers[0].add_ids(column), ledgers[1].add_ids(row.to_array())))
            if draw.random() < 0.5:
                ledgers[0].count_pending()
        for in_row, of_array in later:
            found = in_row() if callable(in_row) else in_row
            made = found if isinstance(found, np.ndarray) else found.to_array()
            assert made.tolist() == of_array().tolist()
        for progress in ledgers:
            progress.record_finished(frozenset([0]), 30)
        assert ledgers[0].take_finished() == ledgers[1].take_finished()


@pytest.mark.parametrize("seed", range(60))
def test_many_splits_with_one_element_each_finish_as_if_counted(seed):
    draw = random.Random(seed)
    ledgers = SplitProgress(), SplitProgress()
    ended, assigned, at, over, names = ({}, {}), 0, 0, 0, ([], [])
    for _ in range(draw.randrange(5, 400)):
        while assigned < at + 20 or draw.random() < 0.2:
            size = draw.randrange(1, 30)
            split = 10_000 + assigned if draw.random() < 0.5 else draw.randrange(100_000)
            for progress in ledgers:
                progress.record_assigned(0, assigned, size, split)
            assigned += size
        what = draw.random()
        first, size = at, draw.randrange(1, 20)
        if what < 0.02:
            first, size = at + 1, 1  # the previous split failed
        elif what < 0.04 and at > over:
            first, size = at - 1, 1  # of the last one, another element
        column = ConsecutiveSplits(first, size)
        names[0].append(ledgers[0].add_ids(column))
        names[1].append(ledgers[1].add_ids(column.to_array()))
        at = first + size
        if draw.random() < 0.5:
            over = draw.randrange(over, at + 1)
            for progress in ledgers:
                progress.record_finished(frozenset({0}), over)
        if draw.random() < 0.3:
            for progress, got in zip(ledgers, ended, strict=True):
                for split, splits, elements in progress.take_finished():
                    for each in range(split, split + splits):
                        got.setdefault(each, []).append(elements)
    assert ended[0] == ended[1]
    for brief, counted in zip(*names, strict=True):
        brief = brief() if callable(brief) else brief
        assert (brief if isinstance(brief, np.ndarray) else brief.to_array()).tolist() == (
            counted().tolist()
        )


@pytest.mark.parametrize("far", [1, 7, 100_000])
@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("ascends", [False, True])
def test_runs_of_mixed_splits_equal_those_of_sorted_splits(far, has_gaps, ascends):
    draw = random.Random(far)
    for _ in range(50):
        counts, splits, ordinals = Counter(), [], []
        for _ in range(draw.randrange(1, 60)):
            split = far * draw.randrange(1, 6)
            counts[split] += has_gaps and draw.random() < 0.1
            splits.append(split)
            ordinals.append(counts[split])
            counts[split] += 1
        ids = list(zip(splits, ordinals, strict=True))
        if not ascends:
            draw.shuffle(ids)
        splits, ordinals = np.array(ids).T
        order, runs = sort_to_runs(splits, ordinals)
        assert order.tolist() == sort_order(splits, ordinals).tolist()
        assert runs == to_runs(splits[order], ordinals[order])


def test_a_split_in_several_chunks_is_finished_after_the_last():
    waiting = iter([(2, 4)])
    plan = Dataset.range(4).flat_map(lambda x: Dataset.range(int(x) + 3)).plan
    iterator = build_iterator(plan, next_splits=lambda: next(waiting, None), with_element_ids=True)
    portions = []
    while (chunk := iterator.next_chunk(4)) is not None:
        portions.append((element_id_runs(chunk), iterator.take_finished()))
    assert portions[:2] == [((IdRun(2, 1, 0, 4),), ()), ((IdRun(2, 1, 4, 1),), ())]
    assert [run for runs, _ in portions[2:] for run in runs] == [
        IdRun(3, 1, 0, 4),
        IdRun(3, 1, 4, 2),
    ]
    ended = [one for _, ended in portions for one in ended] + list(iterator.take_finished())
    assert ended == [FinishedSplits(2, 1, 5), FinishedSplits(3, 1, 6)]


def test_splits_without_remaining_elements_finish_with_zero_elements():
    seen = read_with_ids(Dataset.range(9).filter(lambda x: bool(x == 4)).plan, [(6, 9), (0, 6)])
    assert seen.ended == {split: int(split == 4) for split in range(9)}


def test_a_batch_that_is_one_split_has_one_id():
    seen = read_with_ids(Dataset.range(10).map(odd_or_half).batch(4).plan, [(1, 3)])
    assert [ids for _, ids in seen.elements] == [[(1, 0)], [(2, 0)]]


def test_a_single_split_plan_counts_its_elements():
    rows = Dataset.range(9).filter(lambda x: bool(x % 2))
    plan = Dataset.zip(rows, rows).plan
    whole = elements_by_id(read_with_ids(plan, [(0, 1)]))
    assert list(whole) == [(0, n) for n in range(4)]
    part = read_with_ids(plan, [PartialSplit(0, ((1, 2), (3, None)))])
    assert elements_by_id(part) == {(0, n): whole[0, n] for n in (1, 3)}
    assert part.ended == {0: 4}


def test_elements_skipped_without_failures_are_not_computed():
    called = []

    def slow(x):
        called.append(int(x))
        return x * 2 if x >= 0 else -x  # by rows

    plan = Dataset.range(3).flat_map(lambda x: Dataset.range(10)).map(slow).plan
    part = PartialSplit(1, ((7, 9),), may_have_failed=False)
    seen = read_with_ids(plan, [part], limit=1)
    assert [element for element, _ in seen.elements] == ["14", "16"]
    assert [ids for _, ids in seen.elements] == [[(1, 7)], [(1, 8)]]
    assert set(called) == {7, 8}
    assert seen.ended == {}  # its end was not read


def test_a_known_error_is_not_raised_again():
    plan = Dataset.range(3).flat_map(lambda x: Dataset.range(14)).map(failing).plan  # 3 and 10
    whole = read_with_ids(plan, [(1, 2)])
    assert len(whole.errors) == 2
    later = read_with_ids(plan, [PartialSplit(1, ((5, None),))])
    assert [element for element, _ in later.elements] == ["6", "7", "8", "9", "11", "12", "13"]
    assert len(later.errors) == 1
    assert later.ended == {1: 12}


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.take(3),
        lambda ds: ds.enumerate(),
        lambda ds: ds.scan(0, lambda total, x: (total, x)),
        lambda ds: ds.batch(2).unbatch(),
        lambda ds: ds.shuffle(3).flat_map(nested),
        lambda ds: ds.group_by_window(lambda x: x % 2, lambda key, w: w.batch(2), 2),
        lambda ds: ds.interleave(nested, cycle_length=2),
    ],
    ids=["take", "enumerate", "scan", "unbatch", "flat_map", "windows", "interleave"],
)
def test_a_step_on_the_whole_stream_has_no_ids_and_is_rejected_by_name(step):
    dataset = Dataset.range(9).flat_map(nested)
    with pytest.raises(FailedPreconditionError, match="works on the whole stream"):
        build_iterator(step(dataset).plan, next_splits=lambda: None, with_element_ids=True)


def test_an_interleave_over_one_element_splits_is_below_the_boundary():
    plan = Dataset.range(9).filter(lambda x: bool(x % 3)).shuffle(4).interleave(drawn).plan
    want = elements_by_id(read_with_ids(plan, [(0, 9)]))
    again = {}
    for split in range(9):
        again |= elements_by_id(read_with_ids(plan, [(split, split + 1)]))
    assert again == want


def joined(iterator, count):
    """Return the next elements as one chunk."""
    chunks = []
    while (missing := count - sum(map(len, chunks))) and (chunk := iterator.next_chunk(missing)):
        chunks.append(chunk)
    return concatenate(chunks)


def test_sorted_ids_of_mixed_splits_form_few_runs():
    waiting = iter([(3, 6)])
    plan = Dataset.range(9).interleave(lambda x: Dataset.range(8), cycle_length=3).plan
    iterator = build_iterator(plan, next_splits=lambda: next(waiting, None), with_element_ids=True)
    chunk = joined(iterator, 24)
    assert len(element_id_runs(chunk)) == 8
    assert element_id_runs(chunk, is_sorted=True) == (IdRun(3, 3, 0, 8),)
    sorted_chunk = group_by_split(chunk)
    assert element_id_runs(sorted_chunk) == (IdRun(3, 3, 0, 8),)
    assert [int(x) for x in sorted_chunk.rows()] == [*range(8)] * 3


@pytest.mark.parametrize("far", [1, 1 << 20, 1 << 40])
@pytest.mark.parametrize("ascends", [True, False])
def test_mixed_splits_are_sorted_even_if_far_apart(far, ascends):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    splits = chance.integers(0, 9, 200) * far
    ordinals = np.arange(200) if ascends else chance.permutation(200) * far
    order = sort_order(splits, ordinals)
    assert order.tolist() == np.lexsort((ordinals, splits)).tolist()


@pytest.mark.parametrize("count", [0, 1, 3, 6, 7, 14])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_interleaved_splits_start_again_after_the_last(start, count):
    column = round_robin_column([5, 2, 9], 2, start, count).to_array()
    assert column["split"].tolist() == ([5, 5, 2, 2, 9, 9] * 4)[start : start + count]
    doubled = round_robin_column([5, 2, 5], 2, start, count)
    assert doubled["split"].tolist() == ([5, 5, 2, 2, 5, 5] * 4)[start : start + count]


def interleaved_columns(draw):
    """Return an interleaved column with ids assigned at the boundary."""
    splits = tuple(draw.sample(range(3, 30), draw.randrange(1, 7)))
    ordinals = tuple(draw.randrange(9) for _ in splits)
    each, start = draw.randrange(1, 5), draw.randrange(40)
    if draw.random() < 0.2:  # larger than what is held of it
        each = draw.choice([100, 1 << 40])
        start = draw.randrange(1, 9) * each - draw.randrange(20)
    return InterleavedSplits(splits, each, start, draw.randrange(1, 60), ordinals)


def test_an_interleaved_column_equals_its_array():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        turns = interleaved_columns(draw)
        if draw.random() < 0.5:
            turns = InterleavedSplits(turns.splits, turns.turn_size, turns.start, turns.size)
        array = turns.to_array()
        assert turns.dtype == array.dtype
        assert len(turns) == len(array)
        splits = array["split"].tolist()
        assert turns.max_split() == max(splits)
        assert turns.num_turns == len(
            {(turns.start + i) // turns.turn_size for i in range(turns.size)}
        )
        assert [
            (turns.splits[shard.cycle_index], shard.size) for shard in turns.split_elements()
        ] == list(Counter(splits).items())
        for shard in turns.split_elements():
            split = turns.splits[shard.cycle_index]
            assert turns.indices_of(shard).tolist() == [
                i for i, x in enumerate(splits) if x == split
            ]
        a, b = sorted(draw.choices(range(turns.size + 3), k=2))
        assert turns[a:b].to_array().tolist() == array[a:b].tolist()
        parts = [turns[:a], turns[a:b], turns[b:]]
        whole = concatenate_columns(parts)
        assert isinstance(whole, InterleavedSplits)
        assert whole.to_array().tolist() == array.tolist()
        # Positions later in the cycle, or in another cycle.
        other = draw.choice([turns[a:], interleaved_columns(draw), ConsecutiveSplits(3, 4, 1)])
        if other.dtype == turns.dtype:
            both = concatenate_columns([turns, other])
            made = both if isinstance(both, np.ndarray) else both.to_array()
            assert made.tolist() == [*array.tolist(), *other.to_array().tolist()]


@pytest.mark.parametrize("block", [1 << 40, 1 << 63, 1 << 64])
def test_a_block_may_be_longer_than_any_dataset(block):
    waiting = iter([(0, 4)])
    iterator = build_iterator(
        Dataset.range(4)
        .interleave(
            lambda n: Dataset.range(9).map(lambda x: x if x >= 0 else -x),
            cycle_length=2,
            block_length=block,
        )
        .plan,
        next_splits=lambda: next(waiting, None),
        with_element_ids=True,
    )
    found = []
    while (chunk := iterator.next_chunk(5)) is not None:
        found += [(int(split), int(ordinal)) for split, ordinal in chunk.metadata]
    assert found == [(split, ordinal) for split in range(4) for ordinal in range(9)]


def test_columns_of_several_cycles_are_concatenated_like_their_arrays():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(100):
        parts = [interleaved_columns(draw) for _ in range(draw.randrange(2, 6))]
        joined = concatenate_columns(parts)
        made = joined if isinstance(joined, np.ndarray) else joined.to_array()
        assert made.tolist() == np.concatenate([part.to_array() for part in parts]).tolist()


def check_runs(column):
    """Compare the order and the runs of a column with those of its array."""
    positions = column.to_array()
    splits, ordinals = positions["split"], positions["ordinal"]
    is_mixed, runs = round_robin_runs(column)
    if (splits[1:] >= splits[:-1]).all():
        assert not is_mixed
        assert runs == to_runs(splits, ordinals)
        return
    assert is_mixed
    want_order, want_runs = sort_to_runs(splits, ordinals)
    assert runs == want_runs
    assert round_robin_order(column).tolist() == want_order.tolist()


def test_runs_of_interleaved_splits_equal_those_of_their_array():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(500):
        turns = interleaved_columns(draw)
        if draw.random() < 0.3:
            turns = InterleavedSplits(
                tuple(sorted(turns.splits)), turns.turn_size, 0, turns.size, turns.first_ordinals
            )
        check_runs(turns)


def test_split_progress_counts_interleaved_splits_like_their_array():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        ledgers = SplitProgress(), SplitProgress()
        starts = [0, *sorted(draw.sample(range(1, 12), draw.randrange(3))), 12]
        for first, stop in pairwise(starts):
            for progress in ledgers:
                progress.record_assigned(0, first, stop - first, 100 * (20 - first))
        later, position = [], 0
        splits = tuple(draw.sample(range(12), draw.randrange(1, 6)))
        each = draw.randrange(1, 4)
        for _ in range(draw.randrange(1, 8)):
            if draw.random() < 0.2:
                splits, position = tuple(draw.sample(range(12), draw.randrange(1, 6))), 0
            turns = InterleavedSplits(
                splits, each, position % (each * len(splits)), draw.randrange(1, 20)
            )
            position += turns.size
            column = turns.to_array() if draw.random() < 0.2 else turns
            later.append((ledgers[0].add_ids(column), ledgers[1].add_ids(turns.to_array())))
            if draw.random() < 0.5:
                ledgers[0].count_pending()
        for in_turns_, of_array in later:
            found = in_turns_()
            made = found if isinstance(found, np.ndarray) else found.to_array()
            assert made.tolist() == of_array().tolist()
        for progress in ledgers:
            progress.record_finished(frozenset([0]), 12)
        assert ledgers[0].take_finished() == ledgers[1].take_finished()


def test_elements_without_ids_raise_an_error():
    chunk = build_iterator(Dataset.range(3).plan).next_chunk(2)
    with pytest.raises(ValueError, match="with_element_ids=True"):
        element_id_runs(chunk)
