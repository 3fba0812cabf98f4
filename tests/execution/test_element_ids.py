"""Elements of dealt plans say where they come from: the same origins, whoever reads them."""

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


def number_of_units(plan):
    return compute_split_space(prepare(plan).plan).size


class Seen:
    """What one reader saw: each element with its origins, and how many elements units had."""

    def __init__(self):
        self.elements = []
        self.ended = {}
        self.errors = []


def read_named(plan, grants, *, limit=5, seed=7):
    """Return what one worker reads that is dealt these units, or parts of units."""
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
                units, ordinals = constituent_ids(chunk.metadata[index : index + 1])
                origins = list(zip(units.tolist(), ordinals.tolist(), strict=True))
                seen.elements.append((text(row), origins))
        for one in iterator.take_finished():
            for unit in range(one.first_split, one.first_split + one.num_splits):
                assert unit not in seen.ended
                seen.ended[unit] = one.num_elements
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
#: Steps that work within one unit, whatever is below.
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


def is_rooted(plan):
    """Say whether the elements of a plan can be named."""
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
        if is_rooted(more.plan):  # not where a unit has several outer elements, for one
            dataset = more
            names.append(name)
    if above:
        names.append(chance.choice([*ABOVE]))
        dataset = ABOVE[names[-1]](dataset)
    return dataset.plan, names


def cut_at_random(chance, units):
    """Return ranges of units that are all of them, in any order."""
    cuts = {chance.randint(0, units) for _ in range(chance.randint(0, 6))} | {0, units}
    ranges = list(pairwise(sorted(cuts)))
    chance.shuffle(ranges)
    return ranges


def named_elements(seen):
    """Return origin -> element, of elements that are no batches, each of which has its own."""
    found = {}
    for element, origins in seen.elements:
        ((unit, ordinal),) = origins
        assert (unit, ordinal) not in found
        found[unit, ordinal] = element
    return found


def is_rooted_at_its_end(plan):
    """Say whether no step is above the root: one whose order is free is, over units of many."""
    prepared = prepare(plan)
    free = find_unordered_steps(prepared.plan, prepared.options.deterministic)
    return isinstance(insert_boundaries(prepared.plan, free), PartitionBoundary)


def sizes_of(plan, elements, units):
    """Return how many elements each unit has at the root: filters above may leave some out."""
    if is_rooted_at_its_end(plan):
        counted = Counter(unit for unit, _ in elements)
        return {unit: counted[unit] for unit in range(units)}
    return read_named(plan, [(0, units)]).ended


ABOVE_LEAVES_OUT_NOTHING = {"batch", "padded batch", "batches of batches", "shuffled batches"}
SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_origin_names_the_same_element_whoever_reads_it(seed):
    chance = random.Random(seed)
    plan, names = random_plan(chance, above=False)
    print(seed, names)
    units = number_of_units(plan)
    want = named_elements(read_named(plan, [(0, units)]))
    grants = [[] for _ in range(chance.randint(1, 3))]
    for one in cut_at_random(chance, units):
        chance.choice(grants).append(one)
    got, ended = {}, {}
    for mine in grants:
        seen = read_named(plan, mine, limit=chance.choice([1, 3, 50]))
        found = named_elements(seen)
        assert not got.keys() & found.keys()
        got |= found
        ended |= seen.ended
    assert got == want
    sizes = sizes_of(plan, want, units)
    assert ended == sizes
    if is_rooted_at_its_end(plan):
        for unit, size in sizes.items():
            assert {ordinal for one, ordinal in want if one == unit} == set(range(size))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_made_of_several_elements_has_the_origins_of_all(seed):
    chance = random.Random(seed)
    plan, names = random_plan(chance, above=True)
    print(seed, names)
    units = number_of_units(plan)
    seen = read_named(plan, cut_at_random(chance, units), limit=chance.choice([1, 4, 50]))
    origins = [one for _, of_one in seen.elements for one in of_one]
    assert len(set(origins)) == len(origins)
    for unit, ordinal in origins:
        assert 0 <= ordinal < seen.ended[unit]
    assert set(seen.ended) == set(range(units))
    if {names[-1]} <= ABOVE_LEAVES_OUT_NOTHING and not seen.errors and "free map" not in names:
        assert len(origins) == sum(seen.ended.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_two_readers_of_parts_of_a_unit_read_all_of_it_once(seed):
    chance = random.Random(seed)
    plan, names = random_plan(chance, above=False)
    print(seed, names)
    units = number_of_units(plan)
    want = named_elements(read_named(plan, [(0, units)]))
    sizes = sizes_of(plan, want, units)
    grants = [[], []]
    for unit in range(units):
        size = sizes[unit]
        if not size or chance.random() < 0.5:
            chance.choice(grants).append((unit, unit + 1))
            continue
        mine = [chance.randint(0, 1) for _ in range(size)]
        for reader in (0, 1):
            wanted = ranges_of([n for n in range(size) if mine[n] == reader], size)
            if wanted:
                grants[reader].append(PartialSplit(unit, wanted))
    got = {}
    for granted in grants:
        chance.shuffle(granted)
        seen = read_named(plan, granted, limit=chance.choice([1, 3, 50]))
        found = named_elements(seen)
        assert not got.keys() & found.keys()
        got |= found
        for unit, elements in seen.ended.items():
            assert elements == sizes[unit]
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


def test_units_that_have_one_element_each_are_one_run():
    waiting = iter([(100, 160)])
    plan = Dataset.range(1000).map(odd_or_half).plan
    iterator = build_iterator(plan, next_splits=lambda: next(waiting, None), with_element_ids=True)
    chunk = iterator.next_chunk(40)
    assert element_id_runs(chunk) == (IdRun(100, 40, 0, 1),)
    assert element_id_runs(chunk.slice(3, 5)) == (IdRun(103, 2, 0, 1),)
    assert iterator.take_finished() == (FinishedSplits(100, 40, 1),)
    assert iterator.take_finished() == ()


def test_what_is_counted_is_of_the_units_that_are_open_however_many_were_dealt():
    ledger, leaf = SplitProgress(), frozenset([0])
    ledger.record_assigned(0, 0, 10**12, 7)
    for first in range(0, 10_000, 100):
        units, ordinals = constituent_ids(
            ledger.add_ids(split_column(np.arange(first, first + 100), None))()
        )
        assert (units == np.arange(first + 7, first + 107)).all()
        assert not ordinals.any()
        ledger.record_finished(leaf, first + 100)
    assert ledger.take_finished() == (FinishedSplits(7, 10_000, 1),)
    ledger.record_finished(leaf, 10**12)
    assert ledger.take_finished() == (FinishedSplits(10_007, 10**12 - 10_000, 0),)
    ledger.record_assigned(0, 10**12, 3, 50)
    assert constituent_ids(ledger.add_ids(split_column(np.full(2, 10**12 + 2), None))())[
        0
    ].tolist() == [52, 52]
    ledger.record_finished(leaf, 10**12 + 3)
    assert ledger.take_finished() == (FinishedSplits(50, 2, 0), FinishedSplits(52, 1, 2))


def test_units_of_several_leaves_end_each_with_its_own():
    ledger = SplitProgress()
    ledger.record_assigned(0, 0, 2, 10)
    ledger.record_assigned(1, 2, 2, 40)
    ledger.record_assigned(0, 4, 1, 12)
    units, ordinals = constituent_ids(
        ledger.add_ids(split_column(np.array([4, 0, 0, 2, 4]), None))()
    )
    assert units.tolist() == [12, 10, 10, 40, 12]
    assert ordinals.tolist() == [0, 0, 1, 0, 1]
    ledger.record_finished(frozenset([0]), 5)
    assert ledger.take_finished() == (
        FinishedSplits(10, 1, 2),
        FinishedSplits(11, 1, 0),
        FinishedSplits(12, 1, 2),
    )
    ledger.record_finished(frozenset([1]), 5)
    assert ledger.take_finished() == (FinishedSplits(40, 1, 1), FinishedSplits(41, 1, 0))


def test_chunks_are_named_together_when_one_is_asked_and_before_their_units_end():
    ledger, leaf = SplitProgress(), frozenset([0])
    ledger.record_assigned(0, 0, 3, 10)
    columns = [split_column(np.array(units), None) for units in ([0, 1], [0, 2], [0])]
    first, second, third = [ledger.add_ids(column) for column in columns]
    assert second().tolist() == [(10, 1), (12, 0)]
    assert first().base is third().base  # made with one call
    assert first().tolist() == [(10, 0), (11, 0)]
    assert third().tolist() == [(10, 2)]
    late = ledger.add_ids(split_column(np.array([1, 2]), None))
    ledger.record_finished(leaf, 3)
    assert ledger.take_finished() == (FinishedSplits(10, 1, 3), FinishedSplits(11, 2, 2))
    assert late().tolist() == [(11, 1), (12, 1)]


def test_what_is_passed_over_comes_after_what_was_named_before():
    ledger = SplitProgress()
    ledger.record_assigned(0, 0, 1, 5)
    before = ledger.add_ids(split_column(np.zeros(2, np.int64), None))
    ledger.record_skipped(0, 3)
    after = ledger.add_ids(split_column(np.zeros(1, np.int64), None))
    assert before().tolist() == [(5, 0), (5, 1)]
    assert after().tolist() == [(5, 5)]


def test_columns_with_and_without_places_are_named_apart():
    ledger = SplitProgress()
    ledger.record_assigned(0, 0, 1, 5)
    plain = ledger.add_ids(split_column(np.zeros(2, np.int64), None))
    placed = ledger.add_ids(split_column(np.zeros(1, np.int64), np.array([77], np.uint64)))
    assert placed().tolist() == [(77, 5, 2)]
    assert plain().tolist() == [(5, 0), (5, 1)]


def test_units_in_a_row_are_said_in_few_numbers_as_long_as_nobody_chooses_among_them():
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
    assert chunks[1].compact_metadata.tolist() == [(unit, 0) for unit in range(112, 128)]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.map(odd_or_half),
        lambda ds: ds.filter(lambda x: not isinstance(x, str)),
    ],
    ids=["map", "filter that keeps all"],
)
def test_a_python_function_for_each_row_keeps_them_in_few_numbers(step):
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


def test_what_a_batch_says_of_its_origins_does_not_keep_what_it_was_made_of():
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
def test_a_column_in_a_row_is_the_array_that_it_stands_for(ordinal):
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


def test_the_ledger_counts_units_in_a_row_as_it_counts_their_array():
    draw = random.Random(5)
    for _ in range(200):
        ledgers = SplitProgress(), SplitProgress()
        starts = [0, *sorted(draw.sample(range(1, 30), draw.randrange(3))), 30]
        for first, stop in pairwise(starts):
            for ledger in ledgers:
                ledger.record_assigned(0, first, stop - first, 100 * first)
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
        for ledger in ledgers:
            ledger.record_finished(frozenset([0]), 30)
        assert ledgers[0].take_finished() == ledgers[1].take_finished()


@pytest.mark.parametrize("seed", range(60))
def test_a_long_stream_of_units_that_give_one_element_each_ends_as_if_all_were_counted(seed):
    draw = random.Random(seed)
    ledgers = SplitProgress(), SplitProgress()
    ended, dealt, at, over, names = ({}, {}), 0, 0, 0, ([], [])
    for _ in range(draw.randrange(5, 400)):
        while dealt < at + 20 or draw.random() < 0.2:
            size = draw.randrange(1, 30)
            unit = 10_000 + dealt if draw.random() < 0.5 else draw.randrange(100_000)
            for ledger in ledgers:
                ledger.record_assigned(0, dealt, size, unit)
            dealt += size
        what = draw.random()
        first, size = at, draw.randrange(1, 20)
        if what < 0.02:
            first, size = at + 1, 1  # the unit before failed
        elif what < 0.04 and at > over:
            first, size = at - 1, 1  # of the last one, another element
        column = ConsecutiveSplits(first, size)
        names[0].append(ledgers[0].add_ids(column))
        names[1].append(ledgers[1].add_ids(column.to_array()))
        at = first + size
        if draw.random() < 0.5:
            over = draw.randrange(over, at + 1)
            for ledger in ledgers:
                ledger.record_finished(frozenset({0}), over)
        if draw.random() < 0.3:
            for ledger, got in zip(ledgers, ended, strict=True):
                for unit, units, elements in ledger.take_finished():
                    for each in range(unit, unit + units):
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
def test_runs_of_mixed_units_are_those_of_the_units_once_they_are_sorted(far, has_gaps, ascends):
    draw = random.Random(far)
    for _ in range(50):
        counts, units, ordinals = Counter(), [], []
        for _ in range(draw.randrange(1, 60)):
            unit = far * draw.randrange(1, 6)
            counts[unit] += has_gaps and draw.random() < 0.1
            units.append(unit)
            ordinals.append(counts[unit])
            counts[unit] += 1
        origins = list(zip(units, ordinals, strict=True))
        if not ascends:
            draw.shuffle(origins)
        units, ordinals = np.array(origins).T
        order, runs = sort_to_runs(units, ordinals)
        assert order.tolist() == sort_order(units, ordinals).tolist()
        assert runs == to_runs(units[order], ordinals[order])


def test_a_unit_that_comes_in_several_portions_says_when_it_has_ended():
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


def test_units_of_which_nothing_is_left_have_ended_with_no_elements():
    seen = read_named(Dataset.range(9).filter(lambda x: bool(x == 4)).plan, [(6, 9), (0, 6)])
    assert seen.ended == {unit: int(unit == 4) for unit in range(9)}


def test_a_batch_that_is_a_unit_has_one_origin():
    seen = read_named(Dataset.range(10).map(odd_or_half).batch(4).plan, [(1, 3)])
    assert [origins for _, origins in seen.elements] == [[(1, 0)], [(2, 0)]]


def test_a_plan_of_one_unit_counts_its_elements():
    rows = Dataset.range(9).filter(lambda x: bool(x % 2))
    plan = Dataset.zip(rows, rows).plan
    whole = named_elements(read_named(plan, [(0, 1)]))
    assert list(whole) == [(0, n) for n in range(4)]
    part = read_named(plan, [PartialSplit(0, ((1, 2), (3, None)))])
    assert named_elements(part) == {(0, n): whole[0, n] for n in (1, 3)}
    assert part.ended == {0: 4}


def test_what_is_passed_over_without_failures_is_not_computed():
    called = []

    def slow(x):
        called.append(int(x))
        return x * 2 if x >= 0 else -x  # by rows

    plan = Dataset.range(3).flat_map(lambda x: Dataset.range(10)).map(slow).plan
    part = PartialSplit(1, ((7, 9),), may_have_failed=False)
    seen = read_named(plan, [part], limit=1)
    assert [element for element, _ in seen.elements] == ["14", "16"]
    assert [origins for _, origins in seen.elements] == [[(1, 7)], [(1, 8)]]
    assert set(called) == {7, 8}
    assert seen.ended == {}  # nobody looked whether it has more


def test_an_error_that_was_raised_before_is_not_raised_again():
    plan = Dataset.range(3).flat_map(lambda x: Dataset.range(14)).map(failing).plan  # 3 and 10
    whole = read_named(plan, [(1, 2)])
    assert len(whole.errors) == 2
    later = read_named(plan, [PartialSplit(1, ((5, None),))])
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
def test_a_step_over_the_whole_stream_has_no_origins_and_is_refused_by_name(step):
    dataset = Dataset.range(9).flat_map(nested)
    with pytest.raises(FailedPreconditionError, match="works on the whole stream"):
        build_iterator(step(dataset).plan, next_splits=lambda: None, with_element_ids=True)


def test_an_interleave_over_units_of_one_element_each_is_below_the_root():
    plan = Dataset.range(9).filter(lambda x: bool(x % 3)).shuffle(4).interleave(drawn).plan
    want = named_elements(read_named(plan, [(0, 9)]))
    again = {}
    for unit in range(9):
        again |= named_elements(read_named(plan, [(unit, unit + 1)]))
    assert again == want


def joined(iterator, count):
    """Return the next elements as one chunk."""
    chunks = []
    while (missing := count - sum(map(len, chunks))) and (chunk := iterator.next_chunk(missing)):
        chunks.append(chunk)
    return concatenate(chunks)


def test_origins_of_units_that_are_mixed_are_few_runs_when_they_are_sorted():
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
def test_mixed_units_are_sorted_however_far_apart_they_are(far, ascends):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = np.random.default_rng(seed)
    units = chance.integers(0, 9, 200) * far
    ordinals = np.arange(200) if ascends else chance.permutation(200) * far
    order = sort_order(units, ordinals)
    assert order.tolist() == np.lexsort((ordinals, units)).tolist()


@pytest.mark.parametrize("count", [0, 1, 3, 6, 7, 14])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_units_in_turns_begin_again_after_the_last(start, count):
    column = round_robin_column([5, 2, 9], 2, start, count).to_array()
    assert column["split"].tolist() == ([5, 5, 2, 2, 9, 9] * 4)[start : start + count]
    doubled = round_robin_column([5, 2, 5], 2, start, count)
    assert doubled["split"].tolist() == ([5, 5, 2, 2, 5, 5] * 4)[start : start + count]


def some_turns(draw):
    """Return a column in turns from the root on."""
    units = tuple(draw.sample(range(3, 30), draw.randrange(1, 7)))
    ordinals = tuple(draw.randrange(9) for _ in units)
    each, start = draw.randrange(1, 5), draw.randrange(40)
    if draw.random() < 0.2:  # larger than what is held of it
        each = draw.choice([100, 1 << 40])
        start = draw.randrange(1, 9) * each - draw.randrange(20)
    return InterleavedSplits(units, each, start, draw.randrange(1, 60), ordinals)


def test_a_column_in_turns_is_the_array_that_it_stands_for():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        turns = some_turns(draw)
        if draw.random() < 0.5:
            turns = InterleavedSplits(turns.splits, turns.turn_size, turns.start, turns.size)
        array = turns.to_array()
        assert turns.dtype == array.dtype
        assert len(turns) == len(array)
        units = array["split"].tolist()
        assert turns.max_split() == max(units)
        assert turns.num_turns == len(
            {(turns.start + i) // turns.turn_size for i in range(turns.size)}
        )
        assert [
            (turns.splits[share.cycle_index], share.size) for share in turns.split_elements()
        ] == list(Counter(units).items())
        for share in turns.split_elements():
            unit = turns.splits[share.cycle_index]
            assert turns.indices_of(share).tolist() == [i for i, x in enumerate(units) if x == unit]
        a, b = sorted(draw.choices(range(turns.size + 3), k=2))
        assert turns[a:b].to_array().tolist() == array[a:b].tolist()
        parts = [turns[:a], turns[a:b], turns[b:]]
        whole = concatenate_columns(parts)
        assert isinstance(whole, InterleavedSplits)
        assert whole.to_array().tolist() == array.tolist()
        # What follows elsewhere in the cycle, or from another cycle.
        other = draw.choice([turns[a:], some_turns(draw), ConsecutiveSplits(3, 4, 1)])
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
        found += [(int(unit), int(ordinal)) for unit, ordinal in chunk.metadata]
    assert found == [(unit, ordinal) for unit in range(4) for ordinal in range(9)]


def test_columns_of_several_cycles_are_joined_as_their_arrays():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(100):
        parts = [some_turns(draw) for _ in range(draw.randrange(2, 6))]
        joined = concatenate_columns(parts)
        made = joined if isinstance(joined, np.ndarray) else joined.to_array()
        assert made.tolist() == np.concatenate([part.to_array() for part in parts]).tolist()


def check_runs(column):
    """Compare the order and the runs of a column with those of its array."""
    places = column.to_array()
    units, ordinals = places["split"], places["ordinal"]
    is_mixed, runs = round_robin_runs(column)
    if (units[1:] >= units[:-1]).all():
        assert not is_mixed
        assert runs == to_runs(units, ordinals)
        return
    assert is_mixed
    want_order, want_runs = sort_to_runs(units, ordinals)
    assert runs == want_runs
    assert round_robin_order(column).tolist() == want_order.tolist()


def test_runs_of_units_in_turns_are_those_of_their_array():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(500):
        turns = some_turns(draw)
        if draw.random() < 0.3:
            turns = InterleavedSplits(
                tuple(sorted(turns.splits)), turns.turn_size, 0, turns.size, turns.first_ordinals
            )
        check_runs(turns)


def test_the_ledger_counts_units_in_turns_as_it_counts_their_array():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        ledgers = SplitProgress(), SplitProgress()
        starts = [0, *sorted(draw.sample(range(1, 12), draw.randrange(3))), 12]
        for first, stop in pairwise(starts):
            for ledger in ledgers:
                ledger.record_assigned(0, first, stop - first, 100 * (20 - first))
        later, place = [], 0
        units = tuple(draw.sample(range(12), draw.randrange(1, 6)))
        each = draw.randrange(1, 4)
        for _ in range(draw.randrange(1, 8)):
            if draw.random() < 0.2:
                units, place = tuple(draw.sample(range(12), draw.randrange(1, 6))), 0
            turns = InterleavedSplits(
                units, each, place % (each * len(units)), draw.randrange(1, 20)
            )
            place += turns.size
            column = turns.to_array() if draw.random() < 0.2 else turns
            later.append((ledgers[0].add_ids(column), ledgers[1].add_ids(turns.to_array())))
            if draw.random() < 0.5:
                ledgers[0].count_pending()
        for in_turns_, of_array in later:
            found = in_turns_()
            made = found if isinstance(found, np.ndarray) else found.to_array()
            assert made.tolist() == of_array().tolist()
        for ledger in ledgers:
            ledger.record_finished(frozenset([0]), 12)
        assert ledgers[0].take_finished() == ledgers[1].take_finished()


def test_elements_without_origins_say_so():
    chunk = build_iterator(Dataset.range(3).plan).next_chunk(2)
    with pytest.raises(ValueError, match="origins=True"):
        element_id_runs(chunk)
