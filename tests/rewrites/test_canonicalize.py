"""The canonical form: what moves where, what is numbered, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.plan.combined_sources import RandomizedSource, reads_unresolved_source
from headrace.plan.elements import FromSource, GatherIndices, Indices, ReadIndices
from headrace.plan.options import Options, WithOptions
from headrace.plan.source import Source
from headrace.plan.traverse import cardinality, element_spec, transform, walk
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.optimize import optimize, prepare
from headrace.sources.memory import RangeSource
from tests.rewrites.plans import pipelines

Dataset = hr.Dataset


def steps(dataset):
    """The kinds of steps of the canonical form, the first one first."""
    return [node.kind for node in walk(canonicalize(dataset.plan).plan)]


def keep(x):
    return str(x)


class Elsewhere(Source):
    size = 1
    splittable = False
    element_spec = ArraySpec((), np.int64)

    def __init__(self, written=None):
        self.remote_plan = written

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


def test_gather_moves_above_steps_that_do_not_look_at_elements():
    dataset = (
        Dataset.from_tensor_slices(np.arange(12))
        .shuffle(5, seed=1).repeat(2).skip(1).take(20).shard(2, 0).batch(3)
    )  # fmt: skip
    assert steps(dataset) == [
        "indices", "shuffle", "repeat", "skip", "take", "shard", "batch", "gather",
    ]  # fmt: skip


def test_selecting_steps_move_below_functions():
    dataset = Dataset.range(9).map(keep).shuffle(3).prefetch(1).map(len).take(4).repeat().batch(2)
    assert steps(dataset) == [
        "indices", "shuffle", "take", "repeat", "gather", "map", "prefetch", "map", "batch",
    ]  # fmt: skip


def test_no_step_moves_below_a_step_that_is_not_one_to_one():
    dataset = Dataset.range(9).filter(bool).take(4).map(keep).batch(2).skip(1).unbatch().take(3)
    assert steps(dataset) == [
        "indices", "gather", "filter", "take", "map", "batch", "skip", "unbatch", "take",
    ]  # fmt: skip
    cached = Dataset.range(9).map(keep).cache().take(3)
    assert steps(cached) == ["indices", "gather", "map", "cache", "take"]


def test_a_batch_moves_below_a_gather_and_prefetches_only():
    assert steps(Dataset.range(9).prefetch(1).batch(3)) == [
        "indices", "batch", "gather", "prefetch",
    ]  # fmt: skip
    assert steps(Dataset.range(9).map(keep).batch(3)) == ["indices", "gather", "map", "batch"]


def test_zipped_rows_are_gathered_together():
    images, labels = Dataset.from_tensor_slices(np.ones((9, 2))), Dataset.range(9)
    both = Dataset.zip({"x": images, "y": Dataset.zip(labels, labels.skip(1))}).enumerate(5)
    assert steps(both.shuffle(4).batch(2)) == [
        *["indices", "indices", "indices", "skip", "zip", "zip", "enumerate", "shuffle"],
        *["batch", "gather"],
    ]
    spec = (ArraySpec((), int), {"x": ArraySpec((2,), float), "y": (ArraySpec((), int),) * 2})
    assert element_spec(canonicalize(both.plan).plan) == spec
    batches = Dataset.zip(images.batch(3), labels)
    assert steps(batches) == ["indices", "batch", "indices", "zip", "gather"]
    spec = (ArraySpec((None, 2), float), ArraySpec((), int))
    assert element_spec(canonicalize(batches.plan).plan) == spec


def test_concatenated_rows_are_gathered_together_if_their_specs_match():
    both = Dataset.range(9).shuffle(3).concatenate(Dataset.range(4)).concatenate(Dataset.range(2))
    assert steps(both.shuffle(20).batch(4)) == [
        "indices", "shuffle", "indices", "concatenate", "indices", "concatenate", "shuffle",
        "batch", "gather",
    ]  # fmt: skip
    found = [node for node in walk(canonicalize(both.plan).plan) if isinstance(node, Indices)]
    assert [(node.start, node.size) for node in found] == [(0, 9), (9, 4), (13, 2)]
    nested = Dataset.range(5).concatenate(both)
    found = [node for node in walk(canonicalize(nested.plan).plan) if isinstance(node, Indices)]
    assert [(node.start, node.size) for node in found] == [(15, 5), (0, 9), (9, 4), (13, 2)]
    batches = Dataset.range(9).batch(2).concatenate(Dataset.range(9).batch(4))
    assert steps(batches) == ["indices", "batch", "indices", "batch", "concatenate", "gather"]


@pytest.mark.parametrize(
    "other",
    [
        Dataset.range(4, output_type=np.int32),
        Dataset.range(4).map(keep),
        Dataset.range(4).enumerate(),
        Dataset.from_source(RangeSource(0, None)),
        Dataset.range(4).batch(2, drop_remainder=True),
    ],
)
def test_rows_with_different_specs_are_gathered_separately(other):
    assert steps(Dataset.range(9).concatenate(other))[-1] == "concatenate"
    assert steps(other.concatenate(Dataset.range(9)))[-1] == "concatenate"


def test_rows_zipped_with_a_function_are_not_gathered_together():
    both = Dataset.zip(Dataset.range(9).map(keep), Dataset.range(9)).enumerate()
    assert steps(both) == ["indices", "gather", "map", "indices", "gather", "zip", "enumerate"]


def test_a_source_of_rows_is_gathered_and_a_source_of_groups_is_read(tmp_path):
    rows = canonicalize(Dataset.from_tensor_slices(np.arange(5)).plan).plan
    assert isinstance(rows, GatherIndices)
    assert isinstance(rows.input, Indices)
    assert rows.input.size == 5
    files = canonicalize(hr.TFRecordDataset([str(tmp_path / "a"), str(tmp_path / "b")]).plan).plan
    assert isinstance(files, ReadIndices)
    assert files.input.size == 2
    assert cardinality(files) == hr.UNKNOWN_CARDINALITY
    assert element_spec(files) == ArraySpec((), "S")
    generator = canonicalize(Dataset.from_generator(lambda: iter([1])).plan).plan
    assert isinstance(generator, ReadIndices)


def test_an_indivisible_source_is_not_changed():
    assert steps(Dataset.from_source(Elsewhere()).map(keep).take(3)) == ["source", "take", "map"]


def test_a_step_keeps_its_location():
    plan = canonicalize(Dataset.range(3).map(keep).shuffle(2).plan).plan
    assert all("test_canonicalize.py:" in node.location for node in walk(plan))


def numbers(dataset):
    return [
        (node.kind, node.number) for node in walk(canonicalize(dataset.plan).plan) if node.is_random
    ]


def test_random_steps_are_numbered_inputs_first():
    left = Dataset.range(3).shuffle(2).map(keep).flat_map(Dataset.from_tensors)
    right = Dataset.range(3).batch(2).shuffle(4)
    both = Dataset.zip(left, right).shuffle(5)
    assert numbers(both) == [("shuffle", 0), ("interleave", 1), ("shuffle", 2), ("shuffle", 3)]


def test_transparent_steps_do_not_change_numbers():
    plain = Dataset.range(9).shuffle(3).filter(bool).shuffle(2)
    dressed = Dataset.range(9).prefetch(2).map(keep).shuffle(3).cache().filter(bool).take(3)
    dressed = dressed.with_options(Options(deterministic=True)).shuffle(2)
    assert numbers(plain) == numbers(dressed) == [("shuffle", 0), ("shuffle", 1)]


def test_a_step_that_occurs_twice_draws_separately():
    half = Dataset.range(9).shuffle(3)
    assert numbers(half.concatenate(half)) == [("shuffle", 0), ("shuffle", 1)]
    assert half.plan.number is None
    elsewhere = Dataset.from_source(Elsewhere())
    plan = canonicalize(elsewhere.concatenate(elsewhere).plan).plan
    assert len({id(node) for node in walk(plan)}) == 3


def test_a_cache_that_occurs_twice_has_the_same_elements():
    kept = Dataset.range(9).shuffle(3).filter(keep).cache()
    both = kept.shuffle(2).concatenate(kept).concatenate(Dataset.zip(kept, kept)).shuffle(4)
    assert [number for _, number in numbers(both)] == [0, 1, 0, 0, 0, 2]
    again = Dataset.range(9).shuffle(3).filter(keep).cache()
    assert [number for _, number in numbers(kept.concatenate(again))] == [0, 1]
    found = list(walk(canonicalize(both.plan).plan))
    assert len({id(node) for node in found}) == len(found)
    assert len({node.key for node in found if node.kind == "cache"}) == 1


def test_numbers_continue_through_a_source_with_a_remote_plan():
    inner = Dataset.range(9).shuffle(3).flat_map(Dataset.range)
    service = Dataset.from_source(Elsewhere(inner.plan))
    assert numbers(service.shuffle(2)) == [("shuffle", 2)]
    twice = Dataset.from_source(Elsewhere(service.plan))
    assert numbers(twice.shuffle(2)) == [("shuffle", 2)]


def test_later_options_take_precedence_in_any_position():
    dataset = (
        Dataset.range(9).with_options(Options(seed=1, deterministic=False))
        .map(keep).with_options(Options(seed=2))
    )  # fmt: skip
    normal = canonicalize(dataset.plan)
    assert normal.options == Options(seed=2, deterministic=False)
    assert not any(isinstance(node, WithOptions) for node in walk(normal.plan))
    other = Dataset.range(9).with_options(Options(seed=3))
    assert canonicalize(Dataset.zip(dataset, other).plan).options.seed == 3
    assert canonicalize(Dataset.zip(other, dataset).plan).options.seed == 2
    service = Dataset.from_source(Elsewhere(dataset.plan))
    assert canonicalize(service.plan).options.seed == 2


def test_the_plan_as_written_is_not_modified():
    dataset = Dataset.range(9).map(keep).shuffle(3)
    before = [(id(node), node.number) for node in walk(dataset.plan)]
    prepare(dataset.plan)
    assert [(id(node), node.number) for node in walk(dataset.plan)] == before


def shape(plan):
    return [(node.describe(), node.number) for node in walk(plan)]


@given(dataset=pipelines())
def test_the_canonical_form_is_equivalent_and_idempotent(dataset):
    normal = canonicalize(dataset.plan)
    assert element_spec(normal.plan) == element_spec(dataset.plan)
    assert cardinality(normal.plan) == cardinality(dataset.plan)
    assert shape(canonicalize(normal.plan).plan) == shape(normal.plan)
    assert canonicalize(normal.plan).options == Options()
    found = list(walk(normal.plan))
    assert len({id(node) for node in found}) == len(found)
    assert not any(isinstance(node, FromSource | WithOptions) for node in found)
    drawing = {node.number for node in found if node.is_random}
    for node in filter(reads_unresolved_source, found):
        members = getattr(node.source, "members", [node.source])
        drawing |= {
            m.number for m in members if isinstance(m, RandomizedSource) and not m.has_fixed_seed
        }
    assert drawing == set(range(len(drawing)))


@given(dataset=pipelines())
def test_walk_and_transform_do_not_modify_the_plan(dataset):
    plan = dataset.plan
    assert transform(plan, lambda node: node) is plan
    copy = transform(plan, lambda node: node.copy_with_inputs(node.inputs))
    assert shape(copy) == shape(plan)
    shared = len({id(node) for node in walk(plan)})
    assert len({id(node) for node in walk(copy)}) == shared


@given(dataset=pipelines())
def test_optimizing_changes_only_maps_and_filters(dataset):
    plan = canonicalize(dataset.plan).plan
    kinds = [(node.kind, node.number) for node in walk(plan)]
    assert [(node.kind, node.number) for node in walk(optimize(plan))] == kinds
    known = element_spec(plan)
    assert known is None or element_spec(optimize(plan)) == known


def test_repeated_doubling_of_a_plan_is_cheap_until_it_runs():
    dataset = Dataset.range(3)
    for _ in range(60):
        dataset = dataset.concatenate(dataset)
    assert dataset.cardinality() == 3 << 60
    assert dataset.element_spec == ArraySpec((), np.int64)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_every_source_is_equivalent_in_its_canonical_form(size):
    for dataset in (Dataset.range(size), Dataset.from_tensors(size).repeat(size)):
        normal = canonicalize(dataset.plan).plan
        assert cardinality(normal) == dataset.cardinality() == size
        assert element_spec(normal) == dataset.element_spec
