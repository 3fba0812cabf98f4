"""A prefetch changes when elements are read, and nothing else: no state and no order."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.plan.buffering import Prefetch
from headrace.plan.traverse import walk
from headrace.rewrites.canonicalize import canonicalize

from ..execution.contract import copied, plain

Dataset = hr.Dataset
SEED = hr.Options(seed=3)


def is_even(x):
    return x % 2 == 0


STEPS = {
    "nothing": lambda ds: ds,
    "map": lambda ds: ds.map(lambda x: x + 1),
    "filter": lambda ds: ds.filter(is_even),
    "batch": lambda ds: ds.batch(2),
    "batch of batches": lambda ds: ds.batch(2).batch(2),
    "unbatch": lambda ds: ds.batch(2).unbatch(),
    "enumerate": lambda ds: ds.enumerate(),
    "shuffle over enumerate": lambda ds: ds.enumerate().shuffle(3),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(8)),
    "zip on the right": lambda ds: Dataset.zip(Dataset.range(12), ds),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(5)),
    "concatenate at the end": lambda ds: Dataset.range(5).concatenate(ds),
    "shuffle over concatenate": lambda ds: ds.concatenate(Dataset.range(5)).shuffle(7),
    "shuffle": lambda ds: ds.shuffle(4),
    "shuffle and batch": lambda ds: ds.shuffle(4).batch(3),
    "repeat": lambda ds: ds.repeat(2),
    "take": lambda ds: ds.take(7),
    "skip": lambda ds: ds.skip(2),
    "shard": lambda ds: ds.shard(2, 1),
    "cache": lambda ds: ds.cache(),
}


def states_and_elements(dataset):
    iterator = iter(dataset)
    states, elements = [copied(iterator.get_state())], []
    for element in iterator:
        elements.append(plain(element))
        states.append(copied(iterator.get_state()))
    return states, elements


def without_hints(value):
    if isinstance(value, dict):
        return {key: without_hints(v) for key, v in value.items() if key != "hint"}
    return [without_hints(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", [1, 3, hr.AUTOTUNE])
def test_states_are_the_same_with_and_without_prefetch(name, size):
    bare = STEPS[name](Dataset.range(10)).with_options(SEED)
    ahead = STEPS[name](Dataset.range(10).prefetch(size)).with_options(SEED)
    states, elements = states_and_elements(bare)
    others, same = states_and_elements(ahead)
    assert same == elements
    if name != "filter":  # its place may be before or after elements that it drops
        assert without_hints(others) == without_hints(states)
    for position in range(0, len(elements), 3):
        for dataset, state in ((bare, others[position]), (ahead, states[position])):
            iterator = iter(dataset)
            iterator.set_state(state)
            assert [plain(x) for x in iterator] == elements[position:]


@pytest.mark.parametrize("name", STEPS)
def test_nested_datasets_draw_the_same(name):
    def shuffled(*element):
        return Dataset.range(6).shuffle(6)

    bare = STEPS[name](Dataset.range(10)).flat_map(shuffled).with_options(SEED)
    ahead = STEPS[name](Dataset.range(10).prefetch(1)).flat_map(shuffled).with_options(SEED)
    assert [int(x) for x in ahead] == [int(x) for x in bare]


def test_a_prefetch_below_a_batch_holds_as_many_elements():
    plan = canonicalize(Dataset.range(100).prefetch(50).batch(20).plan).plan
    (prefetch,) = [step for step in walk(plan) if isinstance(step, Prefetch)]
    assert prefetch.buffer_size == 3
