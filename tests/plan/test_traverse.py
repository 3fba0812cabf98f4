"""Walking plans: in order, whatever is shared, however deep they are."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.plan.elements import Gather
from headrace.plan.fingerprint import fingerprint
from headrace.plan.identity import first_difference, identity
from headrace.plan.node import describe_function, distinct
from headrace.plan.options import Options
from headrace.plan.serialize import dump_plan, load_plan
from headrace.plan.traverse import (
    cardinality,
    element_spec,
    fold,
    leaves,
    lending_steps,
    merged_options,
    outline,
    transform,
    walk,
)
from headrace.rewrites.normal import normalize
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of

Dataset = hr.Dataset
INT = ArraySpec((), np.int64)
STEPS = 5000


def keep(x):
    return str(x)


def maps():
    dataset = Dataset.range(9)
    for _ in range(STEPS):
        dataset = dataset.map(keep)
    return dataset.plan


def mixed():
    dataset = Dataset.range(9)
    for _ in range(STEPS // 5):
        dataset = dataset.shuffle(3).map(lambda x: x + 1).take(8).repeat(2).filter(lambda x: x > 0)
    return dataset.plan


def to_the_left():
    dataset = Dataset.range(1)
    for _ in range(STEPS):
        dataset = dataset.concatenate(Dataset.range(1).filter(keep))
    return dataset.plan


def to_the_right():
    dataset = Dataset.range(1)
    for _ in range(STEPS):
        dataset = Dataset.range(1).filter(keep).concatenate(dataset)
    return dataset.plan


DEEP = {"maps": maps(), "mixed": mixed(), "left": to_the_left(), "right": to_the_right()}


@pytest.mark.parametrize("name", DEEP)
def test_plans_of_thousands_of_steps_are_as_good_as_any(name):
    plan = DEEP[name]
    count = sum(1 for _ in walk(plan))
    assert count > STEPS
    assert transform(plan, lambda node: node) is plan
    cardinality(plan)
    assert len(outline(plan).splitlines()) == count
    assert element_spec(plan, infer=lambda node: INT) == INT
    assert len(fingerprint(plan)) == 32
    assert first_difference(identity(plan), plan) is None
    copy = load_plan(dump_plan(plan))
    assert outline(copy) == outline(plan)
    normal = prepare(plan).plan
    assert len(leaves(normal)) in (1, STEPS + 1)
    deal = deal_of(normal)
    assert sum(last - first for _, _, first, last in deal.locate(0, 3)) == 3
    assert repr(plan).startswith("<")


def test_walking_and_folding_go_through_every_place_in_order():
    half = Dataset.range(3).take(2)
    plan = Dataset.zip(half, half, Dataset.range(5)).skip(1).plan
    kinds = ["source", "take", "source", "take", "source", "zip", "skip"]
    assert [node.kind for node in walk(plan)] == kinds
    text = fold(plan, lambda node, inputs: f"{node.kind}({','.join(inputs)})")
    assert text == "skip(zip(take(source()),take(source()),source()))"
    seen = []
    fold(plan, lambda node, inputs: seen.append(node.kind), once=True)
    assert seen == ["source", "take", "source", "zip", "skip"]


def test_a_node_that_stands_in_two_places_is_transformed_once():
    half = Dataset.range(3).take(2)
    plan = transform(half.concatenate(half).plan, lambda node: node.with_inputs(node.inputs))
    assert plan.first is plan.second
    assert plan.first is not half.plan


def test_one_element_is_enough_to_find_a_spec():
    asked = []

    def infer(node):
        asked.append(node)
        return ArraySpec((), "U")

    chain = Dataset.range(9).map(keep).shuffle(100).map(keep).filter(len).map(keep)
    assert element_spec(chain.batch(3).plan, infer) == ArraySpec((None,), "U")
    assert asked == [chain.plan]
    asked.clear()
    both = Dataset.zip(chain, chain)
    assert element_spec(both.plan, infer) == (ArraySpec((), "U"),) * 2
    assert asked == [chain.plan]
    assert element_spec(both.plan) is None


def test_options_are_merged_for_the_whole_plan():
    dataset = Dataset.range(3).with_options(Options(seed=1, deterministic=False))
    plan = dataset.map(keep).with_options(Options(seed=2)).plan
    assert merged_options(plan) == Options(seed=2, deterministic=False)
    assert merged_options(Dataset.range(3).plan) == Options()


def test_a_step_describes_itself_in_one_line():
    assert describe_function(keep).startswith("keep:")
    text = repr(Dataset.from_tensor_slices(np.zeros((1000, 3))).map(keep).batch(2).plan)
    assert text.startswith("<Batch(size=2, drop_remainder=False)  # test_traverse.py:")
    long = Dataset.range(3).cache("x" * 500).plan.describe()
    assert len(long) < 200


# --- What is kept is lent where no function of the user's stands between it and who only reads ----


def rows():
    return Dataset.from_tensor_slices(np.arange(8.0).reshape(4, 2))


def lent(dataset) -> list[bool]:
    """Return for each place where elements are fetched whether they may be lent there."""
    plan = normalize(dataset.plan).plan
    lending = lending_steps(plan)
    return [id(node) in lending for node in distinct([plan]) if isinstance(node, Gather)]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds,
        lambda ds: ds.shuffle(2).repeat(2).batch(2),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.cache(),
        lambda ds: ds.cache().shuffle(2).repeat().batch(2).unbatch().take(3).skip(1).shard(2, 0),
        lambda ds: ds.cache().enumerate(),
        lambda ds: ds.padded_batch(2).prefetch(2),
        lambda ds: Dataset.sample_from_datasets([ds.cache()]),
    ],
)
def test_what_is_only_passed_on_is_lent(step):
    assert lent(step(rows())) == [True]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.map(lambda x: x),
        lambda ds: ds.batch(2).map(lambda x: x).prefetch(2),
        lambda ds: ds.filter(lambda x: True),
        lambda ds: ds.take_while(lambda x: True),
        lambda ds: ds.scan(0, lambda value, x: (value, x)),
        lambda ds: ds.bucket_by_sequence_length(len, [], [2]),
        lambda ds: ds.group_by_window(lambda x: 0, lambda key, w: w.batch(2), window_size=2),
        lambda ds: ds.flat_map(Dataset.from_tensors),
        lambda ds: ds.interleave(Dataset.from_tensors).batch(2),
    ],
)
def test_what_a_function_gets_is_not_lent(step):
    assert lent(step(rows())) == [False]


def test_of_two_inputs_each_is_lent_by_itself():
    mapped = rows().map(lambda x: x)
    assert lent(Dataset.zip(rows().cache(), mapped)) == [True, False]
    assert lent(rows().cache().concatenate(mapped)) == [True, False]
    assert lent(Dataset.sample_from_datasets([rows(), mapped])) == [True, False]


def test_a_step_that_stands_in_two_places_is_lent_only_if_it_may_be_in_both():
    shared = normalize(rows().plan).plan
    plain, mapped = hr.Dataset(shared), hr.Dataset(shared).map(lambda x: x)
    both = Dataset.zip(plain.cache(), mapped).plan
    assert id(shared) not in lending_steps(both)
    assert id(shared) in lending_steps(Dataset.zip(plain.cache(), plain).plan)
