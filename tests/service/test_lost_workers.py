"""Workers that stop, or die at any instant, while a DYNAMIC epoch is read."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

import headrace as hr
from headrace.service import LocalCluster, distribute
from tests.service.reading import wait_until

pytestmark = pytest.mark.system


def dealt(cluster: LocalCluster, dataset: hr.Dataset, **options: Any) -> hr.Dataset:
    return dataset.apply(distribute("distributed_epoch", cluster.target, **options))


def several(x: Any) -> hr.Dataset:
    return hr.Dataset.range(50).map(lambda y: x * 50 + y)


@pytest.mark.parametrize("read", [1, 30, 90, 333])
@pytest.mark.parametrize(
    "plan",
    [
        lambda: hr.Dataset.range(40).interleave(several, cycle_length=4),
        lambda: hr.Dataset.range(40).flat_map(several).prefetch(4),
        lambda: hr.Dataset.range(2000).filter(lambda x: x >= 0).shuffle(100),
    ],
    ids=["interleave", "flat_map", "shuffle"],
)
def test_a_worker_that_stops_hands_back_nothing_of_which_something_was_given(
    plan: Any, read: int
) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        reader = iter(dealt(cluster, plan()))
        got = [int(next(reader)) for _ in range(read)]
        cluster.stop_worker(0)
        cluster.add_worker()
        got += [int(value) for value in reader]
    assert max(Counter(got).values()) == 1
    assert set(got) <= set(range(2000))


def test_a_worker_that_stops_loses_no_element_that_is_a_unit() -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        reader = iter(dealt(cluster, hr.Dataset.range(3000).map(lambda x: x + 0)))
        got = [int(next(reader)) for _ in range(40)]
        cluster.stop_worker(0)
        got += [int(value) for value in reader]
    assert sorted(got) == list(range(3000))


# --- killed ------------------------------------------------------------------------------------


def slowly(x: Any) -> Any:
    time.sleep(0.001)
    return x


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_worker_doubles_nothing_and_loses_next_to_nothing(attempt: int) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    with LocalCluster(num_workers=2) as cluster:
        reader = iter(dealt(cluster, hr.Dataset.range(4000).map(slowly)))
        got = [int(next(reader)) for _ in range(chance.randrange(1, 3500))]
        cluster.kill_worker(chance.randrange(2))
        got += [int(value) for value in reader]
    assert max(Counter(got).values()) == 1, f"seed {seed}"
    assert len(got) == 4000, f"seed {seed}: missing {sorted(set(range(4000)) - set(got))}"


def test_clients_of_one_job_lose_nothing_of_what_was_on_its_way_to_any_of_them() -> None:
    got: list[list[int]] = [[], []]
    with LocalCluster(num_workers=2) as cluster:
        plan = hr.Dataset.range(3000).map(slowly)
        readers = [iter(dealt(cluster, plan, job_name="shared")) for _ in got]

        def read(number: int) -> None:
            for value in readers[number]:
                got[number].append(int(value))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(map(len, got)) > 600 or not threads[0].is_alive())
        cluster.kill_worker(0)
        for thread in threads:
            thread.join(60)
    assert sorted(got[0] + got[1]) == list(range(3000))


def test_the_last_worker_that_is_killed_leaves_its_units_to_the_next() -> None:
    with LocalCluster(num_workers=1) as cluster:
        reader = iter(dealt(cluster, hr.Dataset.range(1500).map(slowly)))
        got = [int(next(reader)) for _ in range(500)]
        cluster.kill_worker(0)
        cluster.add_worker()
        got += [int(value) for value in reader]
    assert sorted(got) == list(range(1500))


def test_what_is_lost_of_units_that_were_open_is_at_most_what_was_open() -> None:
    with LocalCluster(num_workers=2) as cluster:
        plan = hr.Dataset.range(40).interleave(several, cycle_length=4).map(slowly)
        reader = iter(dealt(cluster, plan))
        got = [int(next(reader)) for _ in range(700)]
        cluster.kill_worker(0)
        got += [int(value) for value in reader]
    assert max(Counter(got).values()) == 1
    missing = set(range(2000)) - set(got)
    assert len({value // 50 for value in missing}) <= 8


def deadly(x: Any) -> Any:
    if x == 77:
        os._exit(3)
    return x


def test_an_element_that_kills_its_workers_is_given_up_and_nothing_else_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=2) as cluster:
        plan = hr.Dataset.range(300).map(deadly)
        got = [int(value) for value in dealt(cluster, plan, on_data_loss="warn")]
        deaths = len(cluster.workers) - 2
    assert sorted(got) == [value for value in range(300) if value != 77]
    assert "1 given up after 3 worker processes ended while computing it (127.0.0.1:" in caplog.text
    assert "(positions 77)" in caplog.text
    # Twice while it is one of many, then in halves down to it alone, and thrice there.
    assert deaths <= 6
