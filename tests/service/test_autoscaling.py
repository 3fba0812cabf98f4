"""Local clusters that add and drain workers while datasets are read: nothing is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute
from headrace.service.dispatcher.worker_scaling import ScalingPolicy
from tests.service.reading import numbers, slowly, wait_until

pytestmark = pytest.mark.system

COUNT = 2000


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only item is the number of workers that the dispatcher wants."""
    answer = [1]
    monkeypatch.setattr(ScalingPolicy, "decide", lambda self, load, state: (answer[0], state))
    return answer


def count_active(cluster: LocalCluster) -> int:
    """Return the number of registered workers that do not drain."""
    return sum(not worker.draining for worker in cluster.dispatcher.stats().workers)


def read_while_scaling(
    reader: Iterator[Any], cluster: LocalCluster, wanted: list[int], steps: list[int]
) -> list[int]:
    """Return the elements read until the cluster had each of these numbers of workers."""
    got: list[int] = []
    for step in steps:
        wanted[0] = step
        deadline = time.monotonic() + 60.0
        while count_active(cluster) != step:
            assert time.monotonic() < deadline, f"not {step} workers: {cluster}"
            # Slowly, so that the dataset does not end before.
            if len(got) < COUNT // 4:
                got += [int(next(reader)) for _ in range(5)]
            time.sleep(0.02)
    return got


@pytest.mark.parametrize("processes", [True, False])
def test_dynamic_sharding_delivers_each_element_once_while_workers_come_and_go(
    wanted: list[int], processes: bool
) -> None:
    with LocalCluster(1, processes, max_workers=3) as cluster:
        # After a filter, the shuffle buffer holds the elements themselves.
        data = hr.Dataset.range(COUNT).map(slowly).filter(lambda x: x >= 0).shuffle(200)
        reader = iter(data.apply(distribute("distributed_epoch", cluster.target)))
        got = read_while_scaling(reader, cluster, wanted, [3, 1, 2])
        got += numbers(reader)
        assert Counter(got) == dict.fromkeys(range(COUNT), 1)
        # Drained workers ended.
        wait_until(lambda: len(cluster.dispatcher.stats().workers) == 2)
        wait_until(lambda: sum(worker.is_running for worker in cluster.workers) == 2)
        # The newest were removed.
        assert cluster.workers[0].is_running


def test_ordered_reading_keeps_the_order_while_workers_come_and_go(wanted: list[int]) -> None:
    with LocalCluster(1, False, max_workers=3) as cluster:
        data = hr.Dataset.range(COUNT).map(slowly)
        reader = iter(data.apply(distribute("distributed_epoch", cluster.target, ordered=True)))
        got = read_while_scaling(reader, cluster, wanted, [3, 1, 2])
        got += numbers(reader)
        assert got == list(range(COUNT))


def test_without_sharding_each_worker_that_joins_adds_a_copy(wanted: list[int]) -> None:
    with LocalCluster(1, False, max_workers=2) as cluster:
        data = hr.Dataset.range(COUNT).map(slowly)
        reader = iter(data.apply(distribute(ShardingPolicy.OFF, cluster.target)))
        got = read_while_scaling(reader, cluster, wanted, [2])
        while len(set(got)) == len(got):
            got.append(int(next(reader)))
        got += read_while_scaling(reader, cluster, wanted, [1])
        got += numbers(reader)
        counts = Counter(got)
        # The first worker's copy is complete; that of the second ends where it was drained.
        assert counts.keys() == set(range(COUNT))
        assert max(counts.values()) == 2


def test_rounds_stay_complete_while_workers_come_and_go(wanted: list[int]) -> None:
    number = 2
    with LocalCluster(1, False, max_workers=3) as cluster:
        data = hr.Dataset.range(1 << 40).flat_map(
            lambda x: hr.Dataset.range(x * number, x * number + number)
        )
        found: list[list[int]] = [[] for _ in range(number)]
        ended = threading.Event()

        def read(index: int) -> None:
            consumer = distribute(
                "distributed_epoch",
                cluster.target,
                job_name="rounds",
                consumer_index=index,
                num_consumers=number,
            )
            with iter(data.apply(consumer)) as reader:
                # All consumers read the same number of rounds.
                while not ended.is_set() or len(found[index]) < max(map(len, found)):
                    found[index].append(int(next(reader)))
                    time.sleep(0.001)

        threads = [threading.Thread(target=read, args=(index,)) for index in range(number)]
        for thread in threads:
            thread.start()
        for step in (3, 1, 2):
            wanted[0] = step
            wait_until(lambda step=step: count_active(cluster) == step, 60.0)
        # Draining workers end although the consumers continue.
        wait_until(lambda: len(cluster.dispatcher.stats().workers) == 2, 60.0)
        ended.set()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a consumer does not end"
        rounds = list(zip(*found, strict=False))
        assert all(first % number == 0 and second == first + 1 for first, second in rounds)
        assert len({first for first, _ in rounds}) == len(rounds)


def test_a_killed_worker_is_replaced_while_the_cluster_scales(wanted: list[int]) -> None:
    with LocalCluster(1, max_workers=3) as cluster:
        data = hr.Dataset.range(COUNT).map(slowly)
        reader = iter(
            data.apply(distribute("distributed_epoch", cluster.target, visitation="exactly_once"))
        )
        got = read_while_scaling(reader, cluster, wanted, [2])
        cluster.kill_worker(1)
        got += read_while_scaling(reader, cluster, wanted, [3, 1])
        assert len(cluster.workers) == 4
        got += numbers(reader)
        assert Counter(got) == dict.fromkeys(range(COUNT), 1)


def test_a_restarted_dispatcher_keeps_the_workers_and_scales_on(
    wanted: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.service.worker_scaler")
    with LocalCluster(1, False, tmp_path, max_workers=3) as cluster:
        data = hr.Dataset.range(COUNT).map(slowly)
        reader = iter(data.apply(distribute("distributed_epoch", cluster.target)))
        got = read_while_scaling(reader, cluster, wanted, [3])
        cluster.restart_dispatcher()
        got += read_while_scaling(reader, cluster, wanted, [2])
        got += numbers(reader)
        assert Counter(got) == dict.fromkeys(range(COUNT), 1)
    # It did not fall to the minimum in between.
    assert "to 1 workers" not in caplog.text


def test_a_draining_worker_waits_for_a_consumer_that_pauses(wanted: list[int]) -> None:
    with LocalCluster(1, max_workers=2) as cluster:
        data = hr.Dataset.range(COUNT).map(slowly).shuffle(COUNT // 4)
        reader = iter(data.apply(distribute("distributed_epoch", cluster.target)))
        got = read_while_scaling(reader, cluster, wanted, [2])
        wanted[0] = 1
        wait_until(lambda: count_active(cluster) == 1)
        got += numbers(reader)
        assert Counter(got) == dict.fromkeys(range(COUNT), 1)
        wait_until(lambda: len(cluster.dispatcher.stats().workers) == 1)


def test_a_consumer_that_closes_frees_the_workers(wanted: list[int]) -> None:
    with LocalCluster(1, max_workers=3) as cluster:
        data = hr.Dataset.range(COUNT).map(slowly)
        with iter(data.apply(distribute("distributed_epoch", cluster.target))) as reader:
            got = read_while_scaling(reader, cluster, wanted, [3])
        assert got
        wanted[0] = 0
        wait_until(lambda: len(cluster.dispatcher.stats().workers) == 1)
        wait_until(lambda: [each.is_running for each in cluster.workers] == [True, False, False])


def test_a_starved_consumer_gets_workers_and_a_slow_one_gives_them_back() -> None:
    """The real policy decides, from the statistics of a real service."""
    with LocalCluster(1, False, max_workers=3) as cluster:

        def read(reader: Iterator[Any], until: int, pause: float) -> None:
            deadline = time.monotonic() + 120.0
            while (count := count_active(cluster)) != until:
                assert time.monotonic() < deadline, f"{count} workers, expected {until}"
                got.append(int(next(reader)))
                time.sleep(pause)

        got: list[int] = []
        data = hr.Dataset.range(1 << 40).map(_in_20_ms)
        with iter(data.apply(distribute("distributed_epoch", cluster.target))) as reader:
            read(reader, 3, 0.0)
        # The job has ended.
        wait_until(lambda: count_active(cluster) == 1, 120.0)
        assert max(Counter(got).values()) == 1


def _in_20_ms(x: Any) -> Any:
    time.sleep(0.02)
    return x


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_workers=1 must not be less than num_workers=2"):
        LocalCluster(2, max_workers=1)
    with pytest.raises(ValueError, match="max_workers=2 cannot be combined with worker_addresses"):
        LocalCluster(1, max_workers=2, worker_addresses=["localhost"])
