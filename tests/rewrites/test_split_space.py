"""Split spaces: every position occurs once, in order, and no batch is divided."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import headrace as hr
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.combining import Concatenate
from headrace.plan.ordering import Repeat
from headrace.plan.source import INFINITE, Source
from headrace.plan.traverse import cardinality, find_leaves, is_index_plan, walk
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.split_space import compute_split_space
from tests.rewrites.plans import pipelines

Dataset = hr.Dataset


def split_space_of(dataset):
    return compute_split_space(canonicalize(dataset.plan).plan)


def keep(x):
    return str(x)


def some(x):
    return int(x) % 2 == 0


def test_an_index_plan_is_one_leaf_of_any_size():
    assert split_space_of(Dataset.range(10)).locate(0, 10) == [(0, (), 0, 10)]
    repeated = split_space_of(Dataset.range(10).shuffle(3).repeat(3))
    assert repeated.size == 30
    assert repeated.locate(7, 23) == [(0, (), 7, 23)]


def test_an_infinite_index_plan_has_infinitely_many_positions():
    endless = split_space_of(Dataset.range(10).shuffle(4).repeat().map(keep))
    assert endless.size == INFINITE
    assert endless.locate(10**12, 10**12 + 5) == [(0, (), 10**12, 10**12 + 5)]


def test_a_batch_above_one_to_one_steps_is_one_split():
    batches = split_space_of(Dataset.range(10).shuffle(3).map(keep).prefetch(2).cache().batch(4))
    assert batches.size == 3
    assert batches.locate(0, 3) == [(0, (), 0, 10)]
    assert batches.locate(1, 2) == [(0, (), 4, 8)]
    assert batches.locate(2, 3) == [(0, (), 8, 10)]


def test_batches_of_batches_multiply():
    nested = split_space_of(Dataset.range(100).map(keep).batch(4).map(len).batch(5))
    assert nested.size == 5
    assert nested.locate(4, 5) == [(0, (), 80, 100)]


def test_batches_within_an_index_plan_are_its_positions():
    assert split_space_of(Dataset.range(10).batch(4)).locate(0, 3) == [(0, (), 0, 3)]
    assert split_space_of(Dataset.range(10).batch(4).map(len).batch(2)).locate(1, 2) == [
        (0, (), 2, 3)
    ]


def test_a_batch_above_a_filter_does_not_affect_splits():
    assert split_space_of(Dataset.range(10).filter(some).batch(4)).locate(3, 4) == [(0, (), 3, 4)]
    below = split_space_of(Dataset.range(10).map(keep).batch(4).filter(lambda x: True).batch(9))
    assert below.locate(1, 2) == [(0, (), 4, 8)]


def test_a_padded_batch_above_count_preserving_steps_is_one_split():
    padded = split_space_of(Dataset.range(10).shuffle(3).map(keep).padded_batch(4))
    assert padded.locate(0, 3) == [(0, (), 0, 10)]
    assert padded.locate(1, 2) == [(0, (), 4, 8)]
    summed = Dataset.range(10).map(keep).scan(0, lambda total, x: (total, x))
    assert split_space_of(summed.padded_batch(4)).locate(2, 3) == [(0, (), 8, 10)]
    assert split_space_of(summed).size == 10


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.take_while(some),
        lambda ds: ds.group_by_window(int, lambda key, window: window, 3),
        lambda ds: ds.bucket_by_sequence_length(len, [3], [2, 2]),
        lambda ds: ds.pack_sequences(3),
        lambda ds: ds.pack_sequences(3, "concat_then_split"),
        lambda ds: ds.batch_by_cost(3, len),
    ],
)
def test_steps_that_end_or_collect_do_not_affect_splits(step):
    assert split_space_of(step(Dataset.range(10).map(keep))).locate(3, 5) == [(0, (), 3, 5)]
    assert split_space_of(step(Dataset.range(10).map(keep)).padded_batch(4)).size == 10
    assert split_space_of(step(Dataset.range(10).map(keep).batch(2))).locate(3, 4) == [
        (0, (), 6, 8)
    ]


@pytest.mark.parametrize(
    "mixed",
    [
        Dataset.sample_from_datasets([Dataset.range(5), Dataset.range(7)]),
        Dataset.choose_from_datasets([Dataset.range(5)] * 2, Dataset.range(2).repeat()),
    ],
)
def test_mixed_streams_are_a_single_split(mixed):
    assert split_space_of(mixed).is_single_split
    assert split_space_of(mixed.map(keep).batch(3).repeat()).size == 1


def test_epochs_above_other_steps_are_counted():
    epochs = split_space_of(Dataset.range(5).filter(some).repeat(2).filter(some).repeat(3))
    assert epochs.size == 30
    assert epochs.locate(3, 12) == [
        (0, (0, 0), 3, 5),
        (0, (0, 1), 0, 5),
        (0, (1, 0), 0, 2),
    ]
    endless = split_space_of(Dataset.range(5).filter(some).repeat())
    assert endless.size == INFINITE
    assert endless.locate(5 * 10**9 - 1, 5 * 10**9 + 1) == [
        (0, (10**9 - 1,), 4, 5),
        (0, (10**9,), 0, 1),
    ]


def test_a_batch_ends_with_its_epoch_if_repeat_is_above():
    batches = split_space_of(Dataset.range(5).map(keep).batch(2).repeat(2))
    assert batches.size == 6
    assert batches.locate(2, 4) == [(0, (0,), 4, 5), (0, (1,), 0, 2)]


def test_concatenated_leaves_follow_each_other():
    first = Dataset.range(3).filter(some)
    both = split_space_of(
        first.concatenate(Dataset.range(4).filter(some)).concatenate(first).repeat(2)
    )
    assert both.size == 20
    assert both.locate(2, 12) == [
        (0, (0,), 2, 3),
        (1, (0,), 0, 4),
        (2, (0,), 0, 3),
        (0, (1,), 0, 2),
    ]


def test_nothing_follows_an_infinite_leaf():
    endless = Dataset.range(3).filter(some).repeat()
    after = split_space_of(endless.concatenate(Dataset.range(4).filter(some)).repeat(2))
    assert after.size == INFINITE
    assert after.locate(3, 5) == [(0, (0, 1), 0, 2)]


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(0),
        Dataset.range(0).repeat(),
        Dataset.range(5).repeat(0),
        Dataset.range(0).filter(some).repeat(),
        Dataset.range(3).filter(some).repeat(0),
    ],
)
def test_an_empty_plan_has_no_splits(dataset):
    assert split_space_of(dataset).size == 0
    assert split_space_of(dataset).locate(0, 0) == []


def test_files_are_positions(tmp_path):
    names = [str(tmp_path / name) for name in "abc"]
    files = split_space_of(hr.TFRecordDataset(names).shuffle(10).batch(2))
    assert files.size == 3
    assert files.locate(1, 3) == [(0, (), 1, 3)]
    names_first = Dataset.from_tensor_slices(names).shuffle(3).interleave(hr.TFRecordDataset)
    assert split_space_of(names_first.repeat(2)).locate(2, 4) == [(0, (0,), 2, 3), (0, (1,), 0, 1)]


def test_zipped_rows_are_positions():
    both = split_space_of(
        Dataset.zip(Dataset.range(9), Dataset.range(7).shuffle(3)).enumerate().batch(2)
    )
    assert both.size == 4
    assert both.locate(1, 3) == [(0, (), 1, 3)]


def test_zipped_streams_are_a_single_split():
    both = split_space_of(
        Dataset.zip(Dataset.range(6).filter(some), Dataset.range(4).map(keep)).repeat()
    )
    assert both.is_single_split
    assert both.size == 1
    assert both.locate(0, 1) == [(0, (), 0, 6), (1, (), 0, 4)]
    assert both.locate(0, 0) == []
    assert not split_space_of(Dataset.range(4)).is_single_split


class Elsewhere(Source):
    size = 3
    splittable = False

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


def test_an_indivisible_source_has_no_split_space():
    assert split_space_of(Dataset.from_source(Elsewhere())) is None
    assert split_space_of(Dataset.range(3).concatenate(Dataset.from_source(Elsewhere()))) is None


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11), (11, 11)])
def test_splits_out_of_range_are_rejected(start, stop):
    with pytest.raises(
        ValueError, match=f"splits {start} to {stop} are out of range: the number of splits is 10"
    ):
        split_space_of(Dataset.range(10)).locate(start, stop)


def test_leaves_are_listed_for_each_occurrence():
    half = Dataset.range(4).shuffle(2)
    normal = canonicalize(half.concatenate(half.filter(some)).plan).plan
    found = find_leaves(normal)
    assert [cardinality(leaf) for leaf in found] == [4, 4]
    assert found[0] is not found[1]
    assert all(is_index_plan(leaf) for leaf in found)
    assert not is_index_plan(normal)
    assert [node.number for node in walk(normal) if node.is_random] == [0, 1]


def units_of(plan, numbers):
    """Every split as a list of (leaf, epochs, position), and whether a batch above adds to it."""
    if id(plan) in numbers:
        leaf = numbers[id(plan)]
        return [[(leaf, (), position)] for position in range(cardinality(plan))], True
    inputs = [units_of(node, numbers) for node in plan.inputs]
    splits, is_whole = inputs[0]
    match plan:
        case Batch(size=size) | PaddedBatch(size=size):
            if is_whole:
                groups = [splits[i : i + size] for i in range(0, len(splits), size)]
                splits = [[place for split in group for place in split] for group in groups]
            return splits, is_whole  # batches of batches take whole ones
        case Repeat(count=count):
            splits = [
                [(leaf, (number, *epochs), position) for leaf, epochs, position in split]
                for number in range(count)
                for split in splits
            ]
        case Concatenate():
            splits = splits + inputs[1][0]
    return splits, is_whole and plan.preserves_count


@given(dataset=pipelines(leave_out=("with itself",)), data=st.data())
def test_ranges_cover_every_position_of_every_epoch_in_order(dataset, data):
    plan = canonicalize(dataset.plan).plan
    assigned = compute_split_space(plan)
    assume(not assigned.is_single_split)
    splits, _ = units_of(plan, {id(leaf): number for number, leaf in enumerate(find_leaves(plan))})
    assert assigned.size == len(splits)
    assume(len(splits) < 500)
    cuts = data.draw(st.sets(st.integers(0, len(splits)), max_size=12))
    edges = sorted({0, len(splits), *cuts})
    for start, stop in pairwise(edges):
        found = [
            (leaf, epochs, position)
            for leaf, epochs, first, last in assigned.locate(start, stop)
            for position in range(first, last)
        ]
        assert found == [place for split in splits[start:stop] for place in split]
