"""Instrumentation sees every iterator of a plan and changes nothing."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.iterator import InstrumentedIterator
from headrace.plan.elements import GatherIndices, Indices
from headrace.plan.ordering import Repeat
from headrace.plan.traverse import walk
from headrace.rewrites.optimize import prepare

from .contract import plain
from .pipelines import PIPELINES, odd_or_half

Dataset = hr.Dataset


class Counts:
    """Counts the elements of each iterator, by node."""

    def __init__(self):
        self.lock = threading.Lock()
        self.kinds = Counter()
        self.passed = Counter()

    def watch(self, node, iterator):
        with self.lock:
            self.kinds[node.kind or type(node).__name__] += 1
        return Counted(iterator, self, node)


class Counted(InstrumentedIterator):
    def __init__(self, stage, counts, node):
        super().__init__(stage)
        self.counts = counts
        self.name = node.kind or type(node).__name__

    def count(self, number):
        with self.counts.lock:
            self.counts.passed[self.name] += number

    def next_chunk(self, limit):
        chunk = super().next_chunk(limit)
        self.count(0 if chunk is None else chunk.size)
        return chunk

    def lazy_rows(self):
        got = super().lazy_rows()
        return got and (self.counted(got[0]), got[1])

    def counted(self, rows):
        for row in rows:
            self.count(1)
            yield row


def outcomes(iterator, most=60):
    """Return elements and errors, with the state before each."""
    found = []
    while len(found) < most:
        state = iterator.get_state()
        try:
            chunk = iterator.next_chunk(1)
        except (UserFunctionError, InvalidElementError):
            found.append((state, "failed"))
            continue
        if chunk is None:
            break
        found.append((state, plain(chunk.rows()[0])))
    return found, iterator.get_state()


@pytest.mark.parametrize("name", PIPELINES)
def test_every_instrumented_iterator_yields_the_same_elements(name):
    plan, counts = PIPELINES[name]().plan, Counts()
    # A plan each: what a cache holds would change the states.
    plain_one = build_iterator(PIPELINES[name]().plan, seed=7)
    watched = build_iterator(plan, seed=7, instrument=counts.watch)
    want, got = outcomes(plain_one), outcomes(watched)
    assert got == want
    # A repeat or gather over numbers counts them itself.
    nodes = [*walk(prepare(plan).plan)]
    counted = [node.input for node in nodes if isinstance(node, Repeat | GatherIndices)]
    nodes = [node for node in nodes if not (isinstance(node, Indices) and node in counted)]
    steps = Counter(node.kind or type(node).__name__ for node in nodes)
    assert not steps - counts.kinds
    found, _ = want
    for position in range(0, len(found), 1 + len(found) // 3):
        watched.set_state(found[position][0])
        assert watched.get_state() == found[position][0]
        rest, _ = outcomes(watched, 5)
        assert [element for _, element in rest] == [
            element for _, element in found[position : position + len(rest)]
        ]
    plain_one.close()
    watched.close()


def test_the_elements_of_nested_datasets_are_counted():
    counts = Counts()
    dataset = Dataset.range(5).flat_map(lambda x: Dataset.range(int(x)).map(odd_or_half)).batch(4)
    iterator = build_iterator(dataset.plan, instrument=counts.watch)
    while iterator.next_chunk(3) is not None:
        pass
    iterator.close()
    assert counts.kinds["map"] == 5
    assert counts.passed["map"] == counts.passed["interleave"] == 10
    assert counts.passed["batch"] == 3


def test_a_plan_with_assigned_splits_is_instrumented():
    counts, splits = Counts(), iter([(2, 4), (0, 1)])
    plan = Dataset.range(8).shuffle(4).map(odd_or_half).batch(2).plan
    iterator = build_iterator(plan, next_splits=lambda: next(splits, None), instrument=counts.watch)
    while iterator.next_chunk(3) is not None:
        pass
    assert counts.passed["batch"] == 3
    assert counts.passed["map"] == 6
    assert counts.kinds["shuffle"] == 1


def test_without_instrumentation_iterators_are_not_replaced():
    dataset = Dataset.range(8).map(odd_or_half)
    same = build_iterator(dataset.plan, instrument=lambda node, iterator: iterator)
    assert type(build_iterator(dataset.plan)) is type(same)
