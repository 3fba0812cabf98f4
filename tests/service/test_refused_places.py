"""States of one process that cannot be gone on from over the service are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

Dataset = hr.Dataset
DYNAMIC = ShardingPolicy.DYNAMIC


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(num_workers=1, processes=False) as cluster:
        yield cluster


def above_two(x):
    return bool(x > 2)


def opened(x):
    return Dataset.range(int(x) % 4)


def summed(total, x):
    return total + x, total + x


OPENING = {
    "interleave": lambda: Dataset.range(13).filter(above_two).interleave(opened, cycle_length=3),
    "flat_map": lambda: Dataset.range(13).filter(above_two).shuffle(5).flat_map(opened),
}
CACHED = {
    "scan": lambda: Dataset.range(9).scan(np.int64(0), summed).cache(),
    "take": lambda: Dataset.range(9).filter(above_two).take(5).cache().batch(2),
    "repeat": lambda: Dataset.range(9).filter(above_two).take(5).cache().repeat(2),
}


def state_of(dataset, taken):
    with iter(dataset) as iterator:
        for _ in range(taken):
            next(iterator)
        return json.loads(json.dumps(iterator.get_state()))


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("plan", OPENING)
def test_in_any_order_one_of_a_step_that_would_open_datasets_here_is_refused(cluster, plan, taken):
    state = state_of(OPENING[plan](), taken)
    iterator = iter(OPENING[plan]().apply(distribute(DYNAMIC, cluster.target)))
    with iterator, pytest.raises(FailedPreconditionError, match="would open datasets"):
        iterator.set_state(state)


@pytest.mark.parametrize("which", [{}, {"num_consumers": 1, "consumer_index": 0, "job_name": "j"}])
@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("plan", CACHED)
def test_in_order_one_of_a_cache_that_keeps_nothing_there_is_refused(cluster, plan, taken, which):
    state = state_of(CACHED[plan](), taken)
    terms = distribute(DYNAMIC, cluster.target, ordered=True, **which)
    iterator = iter(CACHED[plan]().apply(terms))
    with iterator, pytest.raises(FailedPreconditionError, match=r"cache.* keeps nothing"):
        iterator.set_state(state)


@pytest.mark.parametrize("plan", ["scan", "take"])
def test_a_place_over_a_cache_that_was_saved_over_the_service_is_gone_on_from(cluster, plan):
    def read():
        return CACHED[plan]().apply(distribute(DYNAMIC, cluster.target, ordered=True))

    state = state_of(read(), 1)
    with iter(read()) as iterator:
        iterator.set_state(state)
        rest = [np.asarray(x).tolist() for x in iterator]
    assert rest == [np.asarray(x).tolist() for x in CACHED[plan]()][1:]
