"""Workers that leave while they are read: nothing is missing, nothing comes twice."""

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


def dealt(dataset: hr.Dataset, cluster: LocalCluster) -> hr.Dataset:
    return dataset.apply(distribute("distributed_epoch", cluster.target))


@pytest.mark.parametrize("buffer", [None, 1000])
def test_a_worker_that_gets_sigterm_loses_and_doubles_nothing(buffer: int | None) -> None:
    count = 4000
    with LocalCluster(num_workers=2) as cluster:
        dataset = hr.Dataset.range(count).map(slowly)
        if buffer is not None:
            # Above the filter the elements themselves are held.
            dataset = dataset.filter(lambda x: x >= 0).shuffle(buffer)
        reader = iter(dealt(dataset, cluster))
        got = [int(next(reader)) for _ in range(200)]
        os.kill(cluster.workers[0].pid, signal.SIGTERM)
        got += numbers(reader)
        assert Counter(got) == dict.fromkeys(range(count), 1)
        wait_until(lambda: not cluster.workers[0].is_running)


@pytest.mark.parametrize("processes", [False, True])
def test_a_worker_that_is_stopped_hands_back_what_nobody_was_given(processes: bool) -> None:
    count = 2000
    with LocalCluster(num_workers=2, processes=processes) as cluster:
        reader = iter(dealt(hr.Dataset.range(count).map(slowly), cluster))
        got = [int(next(reader)) for _ in range(100)]
        cluster.stop_worker(0)
        got += numbers(reader)
        seen = Counter(got)
        assert max(seen.values()) == 1
        # What was on its way to this process when the worker stopped may have been dropped.
        assert len(seen) > count - 50


def test_a_function_that_exits_fails_its_element_and_hangs_nobody() -> None:
    def exits(x: Any) -> Any:
        if x == 50:
            raise SystemExit(3)
        return x

    with LocalCluster(num_workers=2, processes=False) as cluster:
        reader = iter(dealt(hr.Dataset.range(100).map(exits), cluster))
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


def test_a_worker_that_stops_after_its_iteration_was_closed_warns_of_no_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, processes=False, heartbeat_interval_ms=600_000) as cluster:
        with iter(dealt(hr.Dataset.range(4000).map(slowly), cluster)) as reader:
            got = [int(next(reader)) for _ in range(100)]
        assert len(got) == 100
        # No heartbeat tells the worker that it was closed: it may still hold units.
        cluster.stop_worker(0)
    assert "lost" not in caplog.text
    assert "undelivered" not in caplog.text


def test_a_worker_whose_client_left_early_drains_at_once_and_the_next_client_gets_the_rest() -> (
    None
):
    count = 2000
    with LocalCluster(num_workers=2) as cluster:
        data = hr.Dataset.range(count).map(slowly)
        with iter(data.apply(distribute("distributed_epoch", cluster.target, "job"))) as first:
            got = [int(next(first)) for _ in range(200)]
        began = time.monotonic()
        os.kill(cluster.workers[0].pid, signal.SIGTERM)
        wait_until(lambda: not cluster.workers[0].is_running)
        assert time.monotonic() - began < 20.0  # it would wait 25 s for clients
        got += numbers(iter(data.apply(distribute("distributed_epoch", cluster.target, "job"))))
        assert Counter(got) == dict.fromkeys(range(count), 1)
