"""Walking plans in order, however deep they are; what each step says of itself."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.plan.fingerprint import fingerprint
from headrace.plan.identity import describe_first_difference, identity
from headrace.plan.node import Node, describe_function
from headrace.plan.options import Options
from headrace.plan.ordering import ShardBlocks
from headrace.plan.partition_nodes import (
    PartitionBoundary,
    RaiseDeferredErrors,
    ReadSplits,
    TagUpstreamErrors,
)
from headrace.plan.serialize import dump_plan, load_plan
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import (
    cardinality,
    element_spec,
    find_leaves,
    fold,
    merged_options,
    outline,
    transform,
    walk,
)
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.optimize import prepare
from headrace.rewrites.split_space import compute_split_space

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
def test_plans_with_thousands_of_steps_are_supported(name):
    plan = DEEP[name]
    count = sum(1 for _ in walk(plan))
    assert count > STEPS
    assert transform(plan, lambda node: node) is plan
    cardinality(plan)
    assert len(outline(plan).splitlines()) == count
    assert element_spec(plan, infer=lambda node: INT) == INT
    assert len(fingerprint(plan)) == 32
    assert describe_first_difference(identity(plan), plan) is None
    copy = load_plan(dump_plan(plan))
    assert outline(copy) == outline(plan)
    normal = prepare(plan).plan
    assert len(find_leaves(normal)) in (1, STEPS + 1)
    assign = compute_split_space(normal)
    assert sum(last - first for _, _, first, last in assign.locate(0, 3)) == 3
    assert repr(plan).startswith("<")


def test_walk_and_fold_visit_every_occurrence_in_order():
    half = Dataset.range(3).take(2)
    plan = Dataset.zip(half, half, Dataset.range(5)).skip(1).plan
    kinds = ["source", "take", "source", "take", "source", "zip", "skip"]
    assert [node.kind for node in walk(plan)] == kinds
    text = fold(plan, lambda node, inputs: f"{node.kind}({','.join(inputs)})")
    assert text == "skip(zip(take(source()),take(source()),source()))"
    seen = []
    fold(plan, lambda node, inputs: seen.append(node.kind), once=True)
    assert seen == ["source", "take", "source", "zip", "skip"]


def test_a_node_that_occurs_twice_is_transformed_once():
    half = Dataset.range(3).take(2)
    plan = transform(half.concatenate(half).plan, lambda node: node.copy_with_inputs(node.inputs))
    assert plan.first is plan.second
    assert plan.first is not half.plan


def test_a_spec_is_inferred_from_one_element():
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


# --- what a step says of itself holds together: rules, the engine and the service rely on it ------


def kept(x):
    return x


def steps() -> dict[str, Node]:
    """Return a step of each kind, as written and in the canonical form."""
    numbers = Dataset.range(9)
    whole = Dataset.zip(
        numbers.map(kept, num_parallel_calls=2).filter(bool).shuffle(4).cache().prefetch(2),
        numbers.repeat(3).take(20).skip(1).shard(2, 0).enumerate().batch(2).unbatch(),
        numbers.flat_map(Dataset.range).concatenate(Dataset.from_generator(lambda: [1])),
        numbers.scan(0, lambda total, x: (total, x)).take_while(bool).padded_batch(2),
        numbers.group_by_window(kept, lambda key, window: window, 2),
        numbers.window(2).flat_map(lambda window: window.batch(2)),
        numbers.bucket_by_sequence_length(kept, [3], [2, 2]),
        numbers.batch(2).pack_sequences(3).batch_by_cost(3, len),
        numbers.batch(2).pack_sequences(3, "concat_then_split"),
        numbers.unique().ragged_batch(2),
        Dataset.sample_from_datasets([numbers, numbers]),
        Dataset.choose_from_datasets([numbers, numbers], numbers),
        numbers.random_map(lambda x, rng: x).ignore_errors().snapshot("unused"),
    ).with_options(hr.Options(seed=1))
    failing = (RaiseDeferredErrors(input=whole.plan), TagUpstreamErrors(input=whole.plan))
    stages = (PartitionBoundary(input=whole.plan), ReadSplits(num_splits=3, count=9), *failing)
    shards = (ShardBlocks(input=whole.plan, num_shards=2, index=0, block_size=3),)
    plans = (whole.plan, canonicalize(whole.plan).plan, *stages, *shards)
    return {node.kind: node for plan in plans for node in walk(plan)}


ALL_STEPS = steps()


def cardinality_of(step: Node, count: int) -> int:
    return step.cardinality(*[count] * max(1, len(step.inputs)))


def test_the_examples_cover_all_kinds_of_steps():
    # Adapters define their own steps; base classes are not steps.
    here = (kind for kind in derived(Node) if kind.__module__.startswith("headrace.plan."))
    kinds = {kind.kind for kind in here if kind.kind}
    assert set(ALL_STEPS) == kinds


def derived(kind):
    for each in kind.__subclasses__():
        yield each
        yield from derived(each)


@pytest.mark.parametrize("kind", ALL_STEPS)
def test_one_to_one_steps_preserve_the_cardinality(kind):
    step = ALL_STEPS[kind]
    assert step.preserves_count or not step.one_to_one
    if step.preserves_count:
        assert [cardinality_of(step, n) for n in (0, 7, INFINITE, UNKNOWN)] == [
            0, 7, INFINITE, UNKNOWN,
        ]  # fmt: skip


@pytest.mark.parametrize("kind", ALL_STEPS)
def test_split_sizes_pass_through_count_preserving_steps_and_grow_in_batches(kind):
    step = ALL_STEPS[kind]
    below = {"batch": 6, "padded_batch": 6, "ragged_batch": 6}.get(
        kind, 3 if step.preserves_count else None
    )
    assert step.input_split_size(3) == below


@pytest.mark.parametrize("kind", ALL_STEPS)
def test_random_steps_are_index_plans_or_keep_the_order_below(kind):
    step = ALL_STEPS[kind]
    # The words of `random_map` follow from element numbers, in any order.
    in_any_order = step.kind == "random_words"
    assert not step.is_random or step.is_index_step or step.rereads_input or in_any_order


@pytest.mark.parametrize("kind", ALL_STEPS)
def test_a_step_with_its_own_spec_does_not_request_its_inputs_spec(kind):
    step = ALL_STEPS[kind]
    if step.has_own_spec:
        step.spec()
    assert set(step.performance_fields) <= set(step.parameters())
