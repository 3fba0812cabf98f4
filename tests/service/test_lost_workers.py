"""Workers and clients that stop or die during an epoch, and elements in flight."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from headrace.service.client.reader import RemoteReader
from tests.service.reading import numbers, slowly, wait_until

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
def test_a_stopping_worker_keeps_partially_delivered_splits(plan: Any, read: int) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        reader = iter(dealt(cluster, plan()))
        got = [int(next(reader)) for _ in range(read)]
        cluster.stop_worker(0)
        cluster.add_worker()
        got += [int(value) for value in reader]
    assert max(Counter(got).values()) == 1
    assert set(got) <= set(range(2000))


def test_a_stopping_worker_loses_no_split_of_one_element() -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        reader = iter(dealt(cluster, hr.Dataset.range(3000).map(lambda x: x + 0)))
        got = [int(next(reader)) for _ in range(40)]
        cluster.stop_worker(0)
        got += [int(value) for value in reader]
    assert sorted(got) == list(range(3000))


# --- killed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_worker_duplicates_nothing_and_loses_little(attempt: int) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    with LocalCluster(num_workers=2) as cluster:
        reader = iter(dealt(cluster, hr.Dataset.range(4000).map(slowly)))
        got = [int(next(reader)) for _ in range(chance.randrange(1, 3500))]
        cluster.kill_worker(chance.randrange(2))
        got += [int(value) for value in reader]
    assert max(Counter(got).values()) == 1, f"seed {seed}"
    assert len(got) == 4000, f"seed {seed}: missing {sorted(set(range(4000)) - set(got))}"


def test_clients_of_one_job_lose_no_elements_in_flight() -> None:
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


def test_at_most_the_open_splits_are_lost() -> None:
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


def test_a_poison_split_is_abandoned_and_nothing_else_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=2) as cluster:
        plan = hr.Dataset.range(300).map(deadly)
        got = [int(value) for value in dealt(cluster, plan, on_data_loss="warn")]
        deaths = len(cluster.workers) - 2
    assert sorted(got) == [value for value in range(300) if value != 77]
    assert "1 abandoned after 3 worker processes died computing it: 127.0.0.1:" in caplog.text
    assert "(split 77)" in caplog.text
    # Twice while it is one of many, then in halves down to it alone, and thrice there.
    assert deaths <= 6


# --- elements sent to a client that closes early or dies reach the other clients of its job -------


@pytest.fixture
def target() -> Iterator[str]:
    with DispatchServer(DispatcherConfig(client_timeout_ms=3000)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)), WorkerServer(WorkerConfig(address)):
            yield dispatcher.target


def shared(target: str, size: int = 2000, batch: int = 1) -> hr.Dataset:
    dataset = hr.Dataset.range(size)
    dataset = dataset.batch(batch) if batch > 1 else dataset
    return dataset.apply(
        hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, target, job_name="shared")
    )


def said_to_be_lost(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many positions a warning said to be lost."""
    found = [
        re.search(r"this epoch lost elements of up to (\d+)", r.getMessage())
        for r in caplog.records
    ]
    return sum(int(match[1]) for match in found if match is not None)


@pytest.mark.parametrize("used", [0, 1, 40])
def test_unconsumed_elements_of_a_closed_client_go_to_the_others(
    target: str, used: int, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = (iter(shared(target)) for _ in range(2))
    got = [int(next(early)) for _ in range(used)]
    got += [int(next(late)) for _ in range(10)]
    early.close()
    got += numbers(late)
    assert len(set(got)) == len(got), "an element was delivered twice"
    missing = set(range(2000)) - set(got)
    assert len(missing) <= said_to_be_lost(caplog)
    if used < 2:
        assert not missing


def test_unconsumed_elements_of_a_killed_client_go_to_the_others(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    code = (
        "import sys, time, headrace as hr\n"
        "share = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, sys.argv[1],"
        " job_name='shared')\n"
        "it = iter(hr.Dataset.range(2000).apply(share))\n"
        "for _ in range(3): print(int(next(it)), flush=True)\n"
        "time.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, target], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child:
        got = [int(child.stdout.readline()) for _ in range(3)]
        late = iter(shared(target))
        got += [int(next(late)) for _ in range(10)]
        child.send_signal(signal.SIGKILL)
        since = time.monotonic()
        rest = numbers(late)
        assert time.monotonic() - since < 30
    missing = set(range(2000)) - {*got, *rest}
    assert len(missing) <= said_to_be_lost(caplog)
    assert len(set(rest)) == len(rest)
    # Only elements consumed after its last acknowledgement may be redelivered.
    assert len(set(rest) & set(got)) <= 3
    assert not missing


# --- progress, with real processes: what is held above units is given although workers die --------


_KILLS = 6
_STANDSTILL = 30.0
"""Seconds without an element that are too many, on a busy machine too."""


def very_slowly(number: int) -> int:
    time.sleep(0.002)
    return number


def twice(number: int) -> hr.Dataset:
    return hr.Dataset.range(2 * number, 2 * number + 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outstanding", [None, 1])
def test_a_shuffle_of_values_continues_after_many_killed_workers(
    outstanding: int | None,
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    source = hr.Dataset.range(480).map(very_slowly).flat_map(twice).shuffle(64, seed=1)
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


# --- `max_outstanding_requests=n`: at most n unconsumed elements are computed ---------------------


MADE: list[int] = []
"""What `_noted` was called with; workers of this process share it."""
_LOCK = threading.Lock()


def _noted(number: int) -> int:
    with _LOCK:
        MADE.append(int(number))
    return number


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    MADE.clear()
    with LocalCluster(num_workers=request.param, processes=False) as cluster:
        yield cluster


@pytest.mark.parametrize("most", [2, 3, 16, 100])
@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_at_most_n_elements_are_computed_ahead(cluster: LocalCluster, mode: str, most: int) -> None:
    dataset = hr.Dataset.range(100_000).map(_noted)
    share = distribute(mode, cluster.target, max_outstanding_requests=most)
    with iter(dataset.apply(share)) as iterator:
        for used in range(0, 400):
            next(iterator)
            # The last returned element counts as in use until the next one is requested.
            assert len(MADE) <= used + most, used
            if used % 100 == 50:
                time.sleep(0.05)
                assert len(MADE) <= used + most, used
        wait_until(lambda: len(MADE) > 400)


@pytest.mark.catalogue("OP13")
def test_one_element_at_a_time() -> None:
    MADE.clear()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.range(50).map(_noted)
        share = distribute("parallel_epochs", cluster.target, max_outstanding_requests=1)
        for number, value in enumerate(dataset.apply(share)):
            assert value == number
            assert len(MADE) <= number + 1


def test_elements_of_one_reply_are_taken_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    read = RemoteReader.read

    def noted(reader: RemoteReader, limit: int) -> Chunk | None:
        chunk = read(reader, limit)
        taken.append(0 if chunk is None else chunk.size)
        return chunk

    monkeypatch.setattr(RemoteReader, "read", noted)
    monkeypatch.setattr(
        "headrace.execution.input_buffer._MAX_CONSUMER_SECONDS", math.inf
    )  # however busy the machine is
    rows = np.arange(512 << 13).reshape(512, 1 << 13)  # of 64 KiB
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.from_tensor_slices(rows).apply(
            distribute("distributed_epoch", cluster.target)
        )
        assert all((got == row).all() for got, row in zip(dataset, rows, strict=True))
    assert sum(taken) == 512
    assert max(taken) >= 64, "each is taken on its own"


def test_splits_of_the_last_killed_worker_go_to_the_next() -> None:
    with LocalCluster(num_workers=1) as cluster:
        reader = iter(dealt(cluster, hr.Dataset.range(1500).map(slowly)))
        got = [int(next(reader)) for _ in range(500)]
        cluster.kill_worker(0)
        cluster.add_worker()
        got += [int(value) for value in reader]
    assert sorted(got) == list(range(1500))
