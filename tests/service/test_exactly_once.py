"""Exactly once, with real processes: whoever is killed, each element comes once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import headrace as hr
from headrace.plan import traverse
from headrace.plan.elements import FromSource
from headrace.service import (
    LocalCluster,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from headrace.service.client.source import RemoteSource
from tests.service.reading import numbers, slowly

pytestmark = pytest.mark.system

FILES, ROWS = 24, 60


def file_of(number: int) -> hr.Dataset:
    return hr.Dataset.range(ROWS * number, ROWS * number + ROWS)


def files() -> hr.Dataset:
    return hr.Dataset.range(FILES).interleave(file_of, cycle_length=3).map(slowly)


PLANS: dict[str, Any] = {
    "files": lambda: files(),
    "a filter": lambda: files().filter(lambda x: x % 3 != 1),
    "shuffled": lambda: files().shuffle(50, seed=3),
    "in batches": lambda: files().batch(7).map(lambda x: x),
    "rows": lambda: hr.Dataset.range(FILES * ROWS).shuffle(100).map(slowly),
}


@pytest.mark.parametrize("plan", PLANS)
def test_each_element_comes_once_though_workers_are_killed(plan: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    kills = sorted(chance.sample(range(50, 700), 2))
    got: list[int] = []
    with LocalCluster(num_workers=2) as cluster:
        dataset = PLANS[plan]().apply(distribute(ShardingPolicy.DYNAMIC, cluster.target))
        killed = 0
        for element in dataset.as_numpy_iterator():
            got += [int(each) for each in element.ravel()]
            if killed < len(kills) and len(got) >= kills[killed]:
                cluster.add_worker()
                cluster.kill_worker(killed)
                killed += 1
    everything = range(FILES * ROWS)
    expected = [x for x in everything if plan != "a filter" or x % 3 != 1]
    assert Counter(got) == Counter(expected)
    assert killed == 2


def visitation_of(dataset: hr.Dataset) -> str | None:
    (source,) = [
        node.source
        for node in traverse.walk(dataset.plan)
        if isinstance(node, FromSource) and isinstance(node.source, RemoteSource)
    ]
    return source.options.visitation


def test_exactly_once_is_what_dynamic_does_where_it_can(service: str) -> None:
    dynamic = distribute(ShardingPolicy.DYNAMIC, service)
    assert visitation_of(files().apply(dynamic)) == "exactly_once"
    assert visitation_of(files().filter(bool).take(5).apply(dynamic)) == "exactly_once"
    dataset_id = register_dataset(service, files())
    by_id = from_dataset_id(ShardingPolicy.DYNAMIC, service, dataset_id)
    assert visitation_of(by_id) == "exactly_once"
    assert sorted(numbers(by_id)) == list(range(FILES * ROWS))
    assert visitation_of(files().apply(distribute(ShardingPolicy.OFF, service))) is None
