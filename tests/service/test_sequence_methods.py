"""Methods over the whole sequence, with a data service: the elements of a single process."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system
Dataset = hr.Dataset


@pytest.fixture(scope="module")
def service():
    with LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster.target


def branch(x):
    """Branch, so that it is called element by element."""
    return x // 3 if x % 2 else x // 2


def ragged(x):
    return {"n": x, "x": np.full(int(x) % 5, x)}


PIPELINES = {
    "unique": lambda: Dataset.range(60).map(branch).unique(),
    "unique, mapped": lambda: Dataset.range(60).map(branch).unique().map(lambda x: x + 1),
    "unique of an interleave": lambda: (
        Dataset.range(12).interleave(lambda x: Dataset.range(int(x)), cycle_length=3).unique()
    ),
    "rebatch": lambda: Dataset.range(60).map(branch).batch(7).rebatch(4),
    "ragged_batch": lambda: Dataset.range(61).map(ragged).ragged_batch(4),
    "whole ragged batches": lambda: Dataset.range(61).map(ragged).ragged_batch(4, True),
}


def plain(element):
    """Return an element as text."""
    return json.dumps(element, default=lambda x: x.tolist())


def rows_of(elements):
    """Return the number of times that each row occurs, of batches or single elements."""
    counts = Counter()
    for element in elements:
        if isinstance(element, dict):
            rows = zip(element["n"].tolist(), element["x"].to_list(), strict=True)
            counts.update((n, *row) for n, row in rows)
        else:
            counts.update(np.ravel(element).tolist())
    return counts


@pytest.mark.parametrize("name", PIPELINES)
def test_ordered_reading_has_the_elements_of_one_process(service, name):
    dataset = PIPELINES[name]()
    want = list(map(plain, dataset))
    read = dataset.apply(distribute(ShardingPolicy.DYNAMIC, service, ordered=True))
    assert list(map(plain, read)) == want
    with iter(read) as iterator:
        first = [plain(next(iterator)) for _ in range(5)]
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(read) as iterator:
        iterator.set_state(state)
        assert first + list(map(plain, iterator)) == want


@pytest.mark.parametrize("name", PIPELINES)
def test_dynamic_reading_has_each_row_once(service, name):
    dataset = PIPELINES[name]()
    found = list(dataset.apply(distribute(ShardingPolicy.DYNAMIC, service)))
    if name == "whole ragged batches":
        # The remainder is that of the whole stream; which rows it has depends on the order.
        assert [len(batch["n"]) for batch in found] == [4] * 15
        assert rows_of(found) < rows_of(Dataset.range(61).map(ragged).ragged_batch(4))
    else:
        assert rows_of(found) == rows_of(dataset)


@pytest.mark.parametrize("name", PIPELINES)
def test_each_worker_reads_all_elements_with_off(service, name):
    dataset = PIPELINES[name]()
    found = Counter(map(plain, dataset.apply(distribute(ShardingPolicy.OFF, service))))
    assert found == Counter({text: 2 * n for text, n in Counter(map(plain, dataset)).items()})


@pytest.mark.parametrize("ordered", [True, False])
def test_results_are_those_of_the_distributed_elements(service, ordered):
    numbers = (
        Dataset.range(50)
        .map(branch)
        .apply(distribute(ShardingPolicy.DYNAMIC, service, ordered=ordered))
    )
    assert numbers.reduce(0, lambda total, x: total + x) == sum(map(branch, range(50)))
    assert numbers.batch(60).get_single_element().shape == (50,)
    assert sorted(map(int, numbers.unique())) == sorted(set(map(branch, range(50))))


def test_vocabulary_of_a_distributed_dataset(service):
    words = Dataset.range(60).map(lambda x: ["abc"[int(x) % 3], "abc"[: int(x) % 4 // 3 or 1]])
    local = hr.Lookup.from_dataset(words)
    for ordered in (True, False):
        read = words.apply(distribute(ShardingPolicy.DYNAMIC, service, ordered=ordered))
        found = hr.Lookup.from_dataset(read)
        assert found.words[0] == local.words[0] == "a"
        assert set(found.words) == set(local.words)
    ordered_read = words.apply(distribute(ShardingPolicy.DYNAMIC, service, ordered=True))
    assert hr.Lookup.from_dataset(ordered_read).words == local.words
