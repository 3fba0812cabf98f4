"""Speculative execution with real processes: stragglers delay nothing."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

_SLEEP = 60.0


def slow_in_one_process(number: int, *, mark: str, first: int = 20) -> int:
    """Sleep long in the first process that gets a number of at least `first`."""
    if number >= first:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            time.sleep(0.02)
        else:
            time.sleep(_SLEEP)
    return number * number


@pytest.mark.timeout(120)
def test_a_sleeping_worker_does_not_delay_ordered_reading(tmp_path: Path) -> None:
    dataset = hr.Dataset.range(100).map(partial(slow_in_one_process, mark=str(tmp_path / "mark")))
    with LocalCluster(num_workers=2) as cluster:
        remote = dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))
        since = time.monotonic()
        got = [int(element) for element in remote.as_numpy_iterator()]
        took = time.monotonic() - since
        cluster.kill_worker(0)
        cluster.kill_worker(1)
    assert got == [number * number for number in range(100)]
    assert (tmp_path / "mark").exists()
    assert took < _SLEEP / 2


def large(number: int, *, mark: str) -> np.ndarray:
    slow_in_one_process(number, mark=mark, first=5)
    return np.full(4 << 20, number % 250, np.uint8)


@pytest.mark.timeout(120)
def test_a_sleeping_worker_does_not_delay_a_reader_with_a_full_buffer(tmp_path: Path) -> None:
    """The other worker waits after 256 MiB, long before all splits are assigned."""
    dataset = hr.Dataset.range(200).map(partial(large, mark=str(tmp_path / "mark")))
    with LocalCluster(num_workers=2) as cluster:
        remote = dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))
        since = time.monotonic()
        got = []
        for element in remote.as_numpy_iterator():
            assert element.shape == (4 << 20,)
            got.append(int(element[-1]))
        took = time.monotonic() - since
        cluster.kill_worker(0)
        cluster.kill_worker(1)
    assert got == [number % 250 for number in range(200)]
    assert (tmp_path / "mark").exists()
    assert took < _SLEEP / 2


def sleepy(number: int) -> int:
    time.sleep(0.02)
    return number


@pytest.mark.timeout(120)
def test_a_paused_worker_does_not_delay_the_end() -> None:
    dataset = hr.Dataset.range(200).map(sleepy)
    with LocalCluster(num_workers=2, worker_timeout_ms=3_600_000) as cluster:
        remote = dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))
        stuck = cluster.workers[0].pid
        with iter(remote.as_numpy_iterator()) as elements:
            got = [int(next(elements)) for _ in range(20)]
            os.kill(stuck, signal.SIGSTOP)
            try:
                got += [int(element) for element in elements]
            finally:
                os.kill(stuck, signal.SIGCONT)
    assert got == list(range(200))


# --- resuming from a state does not compute elements before it again ------------------------------


def opened(folder: str, number: int) -> hr.Dataset:
    (Path(folder) / f"{number}-{uuid.uuid4().hex}").touch()
    return hr.Dataset.range(1000 * number, 1000 * number + (200 if number == 3 else 4))


def test_resuming_does_not_reopen_datasets_that_were_read_completely(tmp_path: Path) -> None:
    def distribute_over(cluster: LocalCluster, folder: Path) -> hr.Dataset:
        opens = functools.partial(opened, str(folder))
        dataset = hr.Dataset.range(60).interleave(opens, cycle_length=2)
        return dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        everything = [int(each) for each in distribute_over(cluster, before)]
        with iter(distribute_over(cluster, before)) as iterator:
            first = [int(next(iterator)) for _ in range(300)]
            state = json.dumps(iterator.get_state())
    read = {number // 1000 for number in first} - {3, first[-1] // 1000, first[-2] // 1000}
    assert len(read) > 20, "they were read while dataset 3 was open"
    with LocalCluster(num_workers=2, processes=False) as cluster:
        iterator = iter(distribute_over(cluster, after))
        iterator.set_state(json.loads(state))
        assert first + [int(each) for each in iterator] == everything
    reopened = {int(path.name.partition("-")[0]) for path in after.iterdir()}
    assert 3 in reopened
    assert not reopened & read
