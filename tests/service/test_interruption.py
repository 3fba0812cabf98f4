"""Ctrl-C at any instant of `next` over the service: it goes on, nothing is lost or doubled."""

from __future__ import annotations

import _weakrefset
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute
from tests.service.reading import wait_until

pytestmark = pytest.mark.system

Dataset = hr.Dataset


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster


#: What is raised where Python calls back (a finalizer), it reports and forgets.
CALLED_BACK = (weakref.__file__, _weakrefset.__file__)


class Alarm(BaseException):
    """Not an error: something that comes from outside."""


PIPELINES: dict[str, Callable[[Dataset], Dataset]] = {
    "alone": lambda remote: remote,
    "map": lambda remote: remote.map(lambda x: x + 0),
    "batch": lambda remote: remote.batch(7).unbatch(),
    "shuffle": lambda remote: remote.shuffle(50, seed=3),
    "filter": lambda remote: remote.filter(lambda x: int(x) >= 0),
    "repeat": lambda remote: remote.take(3000),
}


def interrupt_at_random(
    iterator: Iterator[object], seconds: float, seed: int
) -> tuple[list[int], int]:
    """Read to the end, with an alarm at random instants of `next`; return also how many."""
    chance = random.Random(seed)
    inside = False

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if not inside:
            return
        while frame is not None and frame.f_code.co_filename not in CALLED_BACK:
            if frame.f_code is hr.DatasetIterator.__next__.__code__:
                raise Alarm
            frame = frame.f_back

    # Connections that are being made are left to the garbage collector.
    got = [int(next(iterator))]  # type: ignore[call-overload]
    alarms, patience = 0, 1.0
    gc.disable()  # what is raised while it calls back goes nowhere, as in a finalizer
    before = signal.signal(signal.SIGALRM, on_alarm)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 1e-3) * patience)
            inside = True
            try:
                element = next(iterator)
            except Alarm:
                inside = False
                alarms += 1
                # Building again takes time, and more where others work.
                patience = min(patience * 1.5, 100.0)
                continue
            except StopIteration:
                break
            inside = False
            patience = 1.0
            got.append(int(element))  # type: ignore[call-overload]
        else:
            raise AssertionError(f"not at the end after {seconds:g} s and {len(got)} elements")
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    return got, alarms


@pytest.mark.parametrize("mode", [ShardingPolicy.DYNAMIC, ShardingPolicy.OFF])
@pytest.mark.parametrize("name", PIPELINES)
def test_an_interrupt_at_any_instant_loses_and_repeats_nothing(
    cluster: LocalCluster, name: str, mode: ShardingPolicy
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    size = 3000
    if mode == ShardingPolicy.OFF:
        size = 1500  # two copies
    remote = Dataset.range(size).apply(distribute(mode, cluster.target))
    want = sorted(list(range(size)) * (3000 // size))
    alarms = 0
    while not alarms:  # all may be over before the first
        with iter(PIPELINES[name](remote)) as iterator:
            got, alarms = interrupt_at_random(iterator, 40.0, seed + alarms)
        assert sorted(got) == want


def test_an_interrupted_client_loses_no_element_of_a_shared_job(
    cluster: LocalCluster,
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    share = distribute(ShardingPolicy.DYNAMIC, cluster.target, job_name=f"job {seed}")
    one, two = (iter(Dataset.range(3000).apply(share)) for _ in range(2))
    with one, two:
        rest = [int(next(two)) for _ in range(100)]
        got, alarms = interrupt_at_random(one, 60.0, seed)
        rest += [int(x) for x in two]
    assert sorted(got + rest) == list(range(3000))
    assert alarms > 0


def test_a_raised_error_is_not_raised_again_after_an_interrupt(
    cluster: LocalCluster,
) -> None:
    def fail(x: int) -> int:
        if x == 5:
            raise ValueError("five")
        return x

    calls = 0

    def interrupt(x: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return x

    share = distribute(ShardingPolicy.DYNAMIC, cluster.target)
    with iter(Dataset.range(20).map(fail).apply(share).map(interrupt)) as iterator:
        got, errors, interruptions = [], 0, 0
        while True:
            try:
                got.append(int(next(iterator)))
            except StopIteration:
                break
            except KeyboardInterrupt:
                interruptions += 1
            except Exception:
                errors += 1
    assert sorted(got) == [x for x in range(20) if x != 5]
    assert (errors, interruptions) == (1, 1)


def test_the_replay_buffer_is_bounded(cluster: LocalCluster) -> None:
    remote = (
        Dataset.range(40_000).batch(4).apply(distribute(ShardingPolicy.DYNAMIC, cluster.target))
    )
    kept = 0
    with iter(remote) as iterator:
        for _ in iterator:
            (reader,) = list(remote.plan.source.replay_buffers._readers.values())  # type: ignore[attr-defined]
            kept = max(kept, len(reader._replay_buffer._entries))
    assert kept <= 20


def test_get_state_is_rejected_after_an_interrupt_too(
    cluster: LocalCluster,
) -> None:
    remote = Dataset.range(100).apply(distribute(ShardingPolicy.OFF, cluster.target))
    interrupted: list[int] = []

    def interrupt_once(x: int) -> int:
        if x == 50 and not interrupted:
            interrupted.append(x)
            raise KeyboardInterrupt
        return x

    with iter(remote.map(interrupt_once)) as iterator:
        with pytest.raises(KeyboardInterrupt):
            list(iterator)
        next(iterator)
        with pytest.raises(FailedPreconditionError, match="can be restored within an epoch only"):
            iterator.get_state()
        next(iterator)


@pytest.mark.parametrize("batch", [1, 7])
def test_a_forked_child_must_create_its_own_iterator(cluster: LocalCluster, batch: int) -> None:
    remote = Dataset.range(100).apply(distribute(ShardingPolicy.DYNAMIC, cluster.target))
    reads, writes = os.pipe()
    with iter(remote.batch(batch)) as iterator:
        first = int(next(iterator)[0])
        child = os.fork()
        if not child:
            try:
                next(iterator)
            except BaseException as error:
                os.write(writes, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writes)
        with open(reads) as said:
            text = said.read()
        os.waitpid(child, 0)
        rest = [int(x) for elements in iterator for x in elements]
    assert text.startswith("FailedPreconditionError: an iterator over the data service cannot")
    assert "Create a new iterator in the child" in text
    assert first in range(100)
    assert len(rest) == len(set(rest)) == 100 - batch


SCRIPT = """
import json, signal, sys, time
import headrace as hr
from headrace.service import ShardingPolicy, distribute

inside = False

def interrupt(number, frame):
    # As Ctrl-C does; but one that comes while the last one is being counted is not another.
    global inside
    if inside:
        inside = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
dataset = hr.Dataset.range(200_000).batch(10).apply(distribute(ShardingPolicy.DYNAMIC, sys.argv[1]))
got, interruptions = [], 0
iterator = iter(dataset)
element = None
while True:
    try:
        inside = True
        # A loop, for Python handles signals after a call of `next`, too, and then drops its value.
        for element in iterator:
            got += element.tolist()
            if len(got) == 10:
                print("ready", flush=True)
            if not interruptions:
                time.sleep(0.001)  # it does not end before the first one comes
        inside = False
        break
    except KeyboardInterrupt:
        interruptions += 1
        if element is not None and got[-10:] != element.tolist():
            got += element.tolist()
        print("interrupted", flush=True)
print(json.dumps([len(got), len(set(got)), interruptions]), flush=True)
"""


def test_a_process_that_catches_ctrl_c_reads_each_element_once(cluster: LocalCluster) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, cluster.target], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        heard: list[str] = []
        for _ in range(3):
            time.sleep(0.05)
            client.send_signal(signal.SIGINT)  # which does nothing where it has ended
        heard = client.stdout.read().splitlines()
        wait_until(lambda: client.poll() is not None)
    count, different, interruptions = json.loads(heard[-1])
    assert different == 200_000
    assert count == different
    assert interruptions >= 1
