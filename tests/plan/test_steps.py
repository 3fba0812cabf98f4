"""What a step says of itself holds together: rules, the engine and the service rely on it."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.plan.node import Node
from headrace.plan.ordering import ShardBlocks
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import walk
from headrace.plan.units import FailsBelow, RaiseFailed, Root, Units
from headrace.rewrites.normal import normalize

Dataset = hr.Dataset


def keep(x):
    return x


def steps() -> dict[str, Node]:
    """Return a step of each kind, as written and in the normal form."""
    numbers = Dataset.range(9)
    whole = Dataset.zip(
        numbers.map(keep, num_parallel_calls=2).filter(bool).shuffle(4).cache().prefetch(2),
        numbers.repeat(3).take(20).skip(1).shard(2, 0).enumerate().batch(2).unbatch(),
        numbers.flat_map(Dataset.range).concatenate(Dataset.from_generator(lambda: [1])),
        numbers.scan(0, lambda total, x: (total, x)).take_while(bool).padded_batch(2),
        numbers.group_by_window(keep, lambda key, window: window, 2),
        numbers.bucket_by_sequence_length(keep, [3], [2, 2]),
        Dataset.sample_from_datasets([numbers, numbers]),
        Dataset.choose_from_datasets([numbers, numbers], numbers),
    ).with_options(hr.Options(seed=1))
    failing = (RaiseFailed(input=whole.plan), FailsBelow(input=whole.plan))
    halves = (Root(input=whole.plan), Units(size=3, count=9), *failing)
    shares = (ShardBlocks(input=whole.plan, num_shards=2, index=0, block=3),)
    plans = (whole.plan, normalize(whole.plan).plan, *halves, *shares)
    return {node.kind: node for plan in plans for node in walk(plan)}


STEPS = steps()


def cardinality(step: Node, count: int) -> int:
    return step.cardinality(*[count] * max(1, len(step.inputs)))


def test_all_kinds_of_steps_are_here():
    # Adapters have steps of their own; what several steps have in common is none.
    here = (kind for kind in derived(Node) if kind.__module__.startswith("headrace.plan."))
    kinds = {kind.kind for kind in here if kind.kind}
    assert set(STEPS) == kinds


def derived(kind):
    for each in kind.__subclasses__():
        yield each
        yield from derived(each)


@pytest.mark.parametrize("kind", STEPS)
def test_what_makes_one_element_of_each_keeps_their_number(kind):
    step = STEPS[kind]
    assert step.keeps_count or not step.one_to_one
    if step.keeps_count:
        assert [cardinality(step, n) for n in (0, 7, INFINITE, UNKNOWN)] == [
            0, 7, INFINITE, UNKNOWN,
        ]  # fmt: skip


@pytest.mark.parametrize("kind", STEPS)
def test_units_pass_through_what_keeps_the_number_and_grow_in_batches(kind):
    step = STEPS[kind]
    below = {"batch": 6, "padded_batch": 6}.get(kind, 3 if step.keeps_count else None)
    assert step.unit_below(3) == below


@pytest.mark.parametrize("kind", STEPS)
def test_what_draws_is_arithmetic_or_keeps_the_order_below_it(kind):
    step = STEPS[kind]
    assert not step.draws or step.index_step or step.reads_again


@pytest.mark.parametrize("kind", STEPS)
def test_what_has_a_spec_of_its_own_asks_for_no_other(kind):
    step = STEPS[kind]
    if step.own_spec:
        step.spec()
    assert set(step.speed_only) <= set(step.parameters())
