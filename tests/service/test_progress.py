"""Progress, with real processes: what is held above units is given although workers die."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

_KILLS = 6
_STANDSTILL = 30.0
"""Seconds without an element that are too many, on a busy machine too."""


def slowly(number: int) -> int:
    time.sleep(0.002)
    return number


def twice(number: int) -> hr.Dataset:
    return hr.Dataset.range(2 * number, 2 * number + 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outstanding", [None, 1])
def test_a_shuffle_of_values_goes_on_after_many_workers_were_killed(
    outstanding: int | None,
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    source = hr.Dataset.range(480).map(slowly).flat_map(twice).shuffle(64, seed=1)
    with LocalCluster(num_workers=3) as cluster:
        dataset = source.apply(
            distribute(ShardingPolicy.DYNAMIC, cluster.target, max_outstanding_requests=outstanding)
        )
        is_over = threading.Event()

        def kill() -> None:
            living = [0, 1, 2]
            for number in range(_KILLS):
                if is_over.wait(0.4 + 0.7 * chance.random()):
                    return
                cluster.kill_worker(living.pop(chance.randrange(3)))
                cluster.add_worker()
                living.append(3 + number)

        killer = threading.Thread(target=kill)
        killer.start()
        got: list[int] = []
        longest, since = 0.0, time.monotonic()
        try:
            for element in dataset.as_numpy_iterator():
                got.append(int(element))
                longest, since = max(longest, time.monotonic() - since), time.monotonic()
        finally:
            is_over.set()
            killer.join()
    assert Counter(got) == Counter(range(960))
    assert longest < _STANDSTILL
