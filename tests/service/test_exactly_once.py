"""Exactly-once delivery with real processes that are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.plan import traverse
from headrace.plan.elements import FromSource
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
    from_dataset_id,
    register_dataset,
)
from headrace.service.client.source import RemoteSource
from tests.service.reading import numbers

pytestmark = pytest.mark.system

FILES, ROWS = 24, 60


def file_of(number: int) -> hr.Dataset:
    return hr.Dataset.range(ROWS * number, ROWS * number + ROWS)


def slowly(number: int) -> int:
    time.sleep(0.001)
    return number


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
def test_each_element_is_delivered_once_although_workers_are_killed(plan: str) -> None:
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


def test_each_element_is_delivered_once_across_dispatcher_restarts(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
    dispatcher = DispatchServer(config)
    address = dispatcher.target.removeprefix("tcp://")
    port = int(address.rsplit(":", 1)[1])
    got: list[int] = []
    with WorkerServer(WorkerConfig(address)) as first, WorkerServer(WorkerConfig(address)):
        iterator = iter(files().apply(distribute(ShardingPolicy.DYNAMIC, address)))
        got += [int(next(iterator)) for _ in range(200)]
        dispatcher.stop()
        again = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True, port=port)
        with DispatchServer(again):
            got += [int(next(iterator)) for _ in range(200)]
            first.stop()
            got += [int(each) for each in iterator]
    assert Counter(got) == Counter(range(FILES * ROWS))


READER = """
import sys, time
from tests.service.test_exactly_once import files
from headrace.service import ShardingPolicy, distribute
shared = distribute(ShardingPolicy.DYNAMIC, sys.argv[1], job_name="job")
for element in files().apply(shared).as_numpy_iterator():
    print(int(element), flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def service() -> Iterator[str]:
    with DispatchServer(DispatcherConfig(client_timeout_ms=3000)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)), WorkerServer(WorkerConfig(address)):
            yield address


def test_unconsumed_elements_of_a_killed_client_are_redelivered(service: str) -> None:
    job = distribute(ShardingPolicy.DYNAMIC, service, job_name="job")
    iterator = iter(files().apply(job))
    mine = [int(next(iterator)) for _ in range(10)]
    with subprocess.Popen(
        [sys.executable, "-c", READER, service], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = [int(other.stdout.readline()) for _ in range(50)]
        reading = threading.Thread(target=lambda: mine.extend(int(each) for each in iterator))
        reading.start()
        other.send_signal(signal.SIGKILL)
        theirs += [int(line) for line in other.stdout if line.endswith("\n")]
    reading.join(60.0)
    assert not reading.is_alive()
    assert max(Counter(mine).values()) == 1, "a live client receives no element twice"
    assert set(mine) | set(theirs) == set(range(FILES * ROWS))
    # Elements after its last acknowledgement are redelivered: one message per worker at most.
    assert len(set(mine) & set(theirs)) < 100


def visitation_of(dataset: hr.Dataset) -> str | None:
    (source,) = [
        node.source
        for node in traverse.walk(dataset.plan)
        if isinstance(node, FromSource) and isinstance(node.source, RemoteSource)
    ]
    return source.options.visitation


def test_dynamic_defaults_to_exactly_once(service: str) -> None:
    dynamic = distribute(ShardingPolicy.DYNAMIC, service)
    assert visitation_of(files().apply(dynamic)) == "exactly_once"
    assert visitation_of(files().filter(bool).take(5).apply(dynamic)) == "exactly_once"
    dataset_id = register_dataset(service, files())
    by_id = from_dataset_id(ShardingPolicy.DYNAMIC, service, dataset_id)
    assert visitation_of(by_id) == "exactly_once"
    assert sorted(numbers(by_id)) == list(range(FILES * ROWS))
    assert visitation_of(files().apply(distribute(ShardingPolicy.OFF, service))) is None
