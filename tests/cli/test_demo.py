"""Tests of `headrace demo`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from headrace.cli.demo import _BATCHES_BEFORE_KILL, EpochStats, WorkerKill, _summarize
from headrace.cli.digits_data import BATCH_SIZE


@pytest.mark.heavy
@pytest.mark.timeout(150)
def test_demo_trains_through_a_worker_kill_and_reports_it():
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "demo"],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("demo: ok")
    assert "each of 1437 training examples was visited exactly once" in last
    assert re.search(r"\b(\d+) of 1437 (examples were lost with worker w0|lost)", last)
    assert "and the next epoch was complete" in last
    assert "killed worker w0 after" in done.stdout


def epoch(visits, by_worker, batches=_BATCHES_BEFORE_KILL):
    return EpochStats(visits=Counter(visits), batches=batches, by_worker=by_worker)


class FakeCluster:
    """Fake cluster of two workers that records kills."""

    def __init__(self):
        self.workers = [SimpleNamespace(address="a:1"), SimpleNamespace(address="b:1")]
        self.killed = []

    def kill_worker(self, index):
        self.killed.append(index)


def test_worker_is_killed_once_after_both_have_delivered_a_batch():
    cluster = FakeCluster()
    kill = WorkerKill(cluster)
    assert not kill.kill_if_due(epoch({}, {"a:1": 512, "b:1": BATCH_SIZE - 1}))
    assert not kill.kill_if_due(epoch({}, {"a:1": 256, "b:1": 256}, _BATCHES_BEFORE_KILL - 1))
    assert not kill.is_done
    assert kill.kill_if_due(epoch({}, {"a:1": 256, "b:1": 256}))
    assert not kill.kill_if_due(epoch({}, {"a:1": 512, "b:1": 512}))
    assert kill.is_done
    assert cluster.killed == [0]


def test_examples_of_the_other_worker_after_the_kill_are_counted():
    kill = WorkerKill(FakeCluster())
    assert kill.delivered_since(epoch({}, {"b:1": 9})) == 0
    kill.kill_if_due(epoch({}, {"a:1": 256, "b:1": 256}))
    assert kill.delivered_since(epoch({}, {"a:1": 300, "b:1": 256})) == 0
    assert kill.delivered_since(epoch({}, {"a:1": 300, "b:1": 700})) == 444


def test_summary_explains_lost_examples():
    complete, incomplete = Counter(range(4)), Counter(range(3))
    assert _summarize(epoch(complete, {}), 4) == (
        "training continued to the end of the epoch: 0 of 4 lost (no example is delivered twice)"
    )
    assert _summarize(epoch(incomplete, {}), 4).endswith(
        "1 of 4 examples were lost with worker w0 (assigned to it and not delivered; no example is "
        "delivered twice)"
    )
