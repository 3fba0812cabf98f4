"""Where `cache` keeps elements: on a worker that reads a whole dataset, and in the client."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

_SIZE = 20
_EPOCHS = 3

calls: list[int] = []


def record(x):
    calls.append(int(x))
    return x


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(1, processes=False) as started:
        yield started


def count_calls(dataset):
    """Read a dataset, and return how often an element was computed on average."""
    calls.clear()
    assert sum(1 for _ in dataset) == _SIZE * _EPOCHS
    return len(calls) / _SIZE


@pytest.mark.parametrize(
    ("policy", "computations"), [(ShardingPolicy.OFF, 1), (ShardingPolicy.DYNAMIC, _EPOCHS)]
)
def test_cache_before_distribute_has_no_effect_with_dynamic_sharding(cluster, policy, computations):
    dataset = hr.Dataset.range(_SIZE).map(record).cache().repeat(_EPOCHS)
    assert count_calls(dataset.apply(distribute(policy, cluster.target))) == computations


def test_cache_after_distribute_keeps_the_elements_in_the_client(cluster):
    remote = (
        hr.Dataset.range(_SIZE).map(record).apply(distribute("distributed_epoch", cluster.target))
    )
    assert count_calls(remote.cache().repeat(_EPOCHS)) == 1
