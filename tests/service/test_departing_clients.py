"""What was sent to a client that closes early, or dies, reaches the others of its job."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import headrace as hr
from headrace.service import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer
from tests.service.reading import numbers

pytestmark = pytest.mark.system


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
    found = [re.search(r"this pass lost up to (\d+)", r.getMessage()) for r in caplog.records]
    return sum(int(match[1]) for match in found if match is not None)


@pytest.mark.parametrize("used", [0, 1, 40])
def test_what_a_client_that_closes_early_did_not_use_comes_to_the_others(
    target: str, used: int, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = (iter(shared(target)) for _ in range(2))
    got = [int(next(early)) for _ in range(used)]
    got += [int(next(late)) for _ in range(10)]
    early.close()
    got += numbers(late)
    assert len(set(got)) == len(got), "an element came twice"
    missing = set(range(2000)) - set(got)
    assert len(missing) <= said_to_be_lost(caplog)
    if used < 2:
        assert not missing


def test_what_a_client_that_is_killed_did_not_use_comes_to_the_others(
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
    # At most what it used after its last acknowledgement comes again.
    assert len(set(rest) & set(got)) <= 3
    assert not missing
