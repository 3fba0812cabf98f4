"""Packed rows and batches by cost, computed by the data service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster

LENGTHS = np.clip(np.random.default_rng(1).lognormal(2, 1, 120).astype(int), 1, 40)


def sequences() -> hr.Dataset:
    return hr.Dataset.range(len(LENGTHS)).map(lambda i: {"tokens": np.full(LENGTHS[i], i + 1)})


STEPS = {
    "first fit": lambda ds: ds.pack_sequences(40, num_bins=4),
    "best fit": lambda ds: ds.pack_sequences({"tokens": 40}, "best_fit", num_bins=3),
    "concat then split": lambda ds: ds.pack_sequences(40, "concat_then_split"),
    "cost": lambda ds: ds.batch_by_cost(90, lambda element: len(element["tokens"])),
}


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster.target


def tokens(elements: list) -> list[int]:
    found = np.concatenate([element["tokens"].ravel() for element in elements])
    return np.sort(found[found > 0]).tolist()


ALL_TOKENS = np.repeat(np.arange(len(LENGTHS)) + 1, LENGTHS).tolist()


def distributed(name: str, service: str, mode: str, **options: Any) -> hr.Dataset:
    return STEPS[name](sequences()).apply(hr.service.distribute(mode, service, **options))


@pytest.mark.parametrize("name", STEPS)
def test_dynamic_sharding_delivers_each_token_once(name: str, service: str) -> None:
    assert tokens(list(distributed(name, service, "distributed_epoch"))) == ALL_TOKENS


@pytest.mark.parametrize("name", STEPS)
def test_without_sharding_each_worker_delivers_all_tokens(name: str, service: str) -> None:
    found = tokens(list(distributed(name, service, "parallel_epochs")))
    assert found == np.repeat(ALL_TOKENS, 2).tolist()


@pytest.mark.parametrize("name", STEPS)
def test_ordered_reading_delivers_the_rows_of_one_process(name: str, service: str) -> None:
    dataset = distributed(name, service, "distributed_epoch", ordered=True)
    expected = list(STEPS[name](sequences()))
    with iter(dataset) as iterator:
        found = [next(iterator) for _ in range(len(expected) // 2)]
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(dataset) as iterator:
        iterator.set_state(state)
        found += iterator
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        assert all((row[key] == wanted[key]).all() for key in wanted)


@pytest.mark.parametrize("name", ["first fit", "best fit", "cost"])
def test_a_state_without_order_has_the_tokens_that_were_delivered(name: str, service: str) -> None:
    dataset = distributed(name, service, "distributed_epoch")
    with iter(dataset) as iterator:
        found = [next(iterator) for _ in range(9)]
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(dataset) as iterator:
        iterator.set_state(state)
        assert tokens([*found, *iterator]) == ALL_TOKENS


def test_split_sequences_without_order_have_no_state(service: str) -> None:
    with iter(distributed("concat then split", service, "distributed_epoch")) as iterator:
        next(iterator)
        with pytest.raises(FailedPreconditionError, match=r"concat_then_split .*ordered=True"):
            iterator.get_state()


@pytest.mark.parametrize("name", ["best fit", "concat then split", "cost"])
def test_ordered_consumers_share_the_rows_of_one_process(name: str) -> None:
    expected = list(STEPS[name](sequences()))
    middle, end = 2, len(expected) // 2

    def consumer(index: int, job: str) -> hr.DatasetIterator:
        options = {"job_name": job, "consumer_index": index, "num_consumers": 2}
        return iter(distributed(name, cluster.target, "distributed_epoch", ordered=True, **options))

    with LocalCluster(num_workers=2, processes=False) as cluster:
        with consumer(0, "a") as first, consumer(1, "a") as second:
            found = [[next(each) for _ in range(middle)] for each in (first, second)]
            states = [json.loads(json.dumps(each.get_state())) for each in (first, second)]
        with consumer(0, "b") as first, consumer(1, "b") as second:
            for index, iterator in enumerate((first, second)):
                iterator.set_state(states[index])
                found[index] += [next(iterator) for _ in range(end - middle)]
    for index in range(2):
        rows = [row["tokens"].tolist() for row in found[index]]
        assert rows == [row["tokens"].tolist() for row in expected[index : 2 * end : 2]]
