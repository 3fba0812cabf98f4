"""Workers that stop during reading: no element is lost or duplicated."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any

import pytest

import headrace as hr
from headrace.service import LocalCluster, distribute
from tests.service.reading import numbers, slowly, wait_until

pytestmark = pytest.mark.system


def distributed(dataset: hr.Dataset, cluster: LocalCluster) -> hr.Dataset:
    return dataset.apply(distribute("distributed_epoch", cluster.target))


@pytest.mark.parametrize("buffer", [None, 1000])
def test_sigterm_loses_and_duplicates_no_element(buffer: int | None) -> None:
    count = 4000
    with LocalCluster(num_workers=2) as cluster:
        dataset = hr.Dataset.range(count).map(slowly)
        if buffer is not None:
            # After a filter, the shuffle buffer holds the elements themselves.
            dataset = dataset.filter(lambda x: x >= 0).shuffle(buffer)
        reader = iter(distributed(dataset, cluster))
        got = [int(next(reader)) for _ in range(200)]
        os.kill(cluster.workers[0].pid, signal.SIGTERM)
        got += numbers(reader)
        assert Counter(got) == dict.fromkeys(range(count), 1)
        wait_until(lambda: not cluster.workers[0].is_running)


@pytest.mark.parametrize("processes", [False, True])
def test_a_stopped_worker_returns_undelivered_splits(processes: bool) -> None:
    count = 2000
    with LocalCluster(num_workers=2, processes=processes) as cluster:
        reader = iter(distributed(hr.Dataset.range(count).map(slowly), cluster))
        got = [int(next(reader)) for _ in range(100)]
        cluster.stop_worker(0)
        got += numbers(reader)
        seen = Counter(got)
        assert max(seen.values()) == 1
        # Elements in transit when the worker stopped may have been dropped.
        assert len(seen) > count - 50


def test_a_function_that_exits_fails_only_its_element() -> None:
    def exits(x: Any) -> Any:
        if x == 50:
            raise SystemExit(3)
        return x

    with LocalCluster(num_workers=2, processes=False) as cluster:
        reader = iter(distributed(hr.Dataset.range(100).map(exits), cluster))
        got: list[int] = []
        errors = []
        while True:
            try:
                got.append(int(next(reader)))
            except StopIteration:
                break
            except hr.errors.UserFunctionError as error:
                errors.append(error.original_type)
        assert errors == ["SystemExit"]
        assert sorted(got) == [n for n in range(100) if n != 50]


def test_a_worker_stopped_after_its_iteration_closed_reports_no_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, processes=False, heartbeat_interval_ms=600_000) as cluster:
        with iter(distributed(hr.Dataset.range(4000).map(slowly), cluster)) as reader:
            got = [int(next(reader)) for _ in range(100)]
        assert len(got) == 100
        # No heartbeat reports the closing: the worker may still hold splits.
        cluster.stop_worker(0)
    assert "lost" not in caplog.text
    assert "undelivered" not in caplog.text


def test_a_worker_drains_at_once_after_its_client_left() -> None:
    count = 2000
    with LocalCluster(num_workers=2) as cluster:
        data = hr.Dataset.range(count).map(slowly)
        with iter(data.apply(distribute("distributed_epoch", cluster.target, "job"))) as first:
            got = [int(next(first)) for _ in range(200)]
        started_at = time.monotonic()
        os.kill(cluster.workers[0].pid, signal.SIGTERM)
        wait_until(lambda: not cluster.workers[0].is_running)
        assert time.monotonic() - started_at < 20.0  # with a client, it would wait 25 s
        got += numbers(iter(data.apply(distribute("distributed_epoch", cluster.target, "job"))))
        assert Counter(got) == dict.fromkeys(range(count), 1)
