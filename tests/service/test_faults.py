"""Processes that die, restart, come late; functions that raise."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    distribute,
)
from headrace.service import WorkerServer as Worker
from tests.service.reading import numbers, slowly, wait_until

pytestmark = pytest.mark.system

MODES = ("parallel_epochs", "distributed_epoch")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """One worker, and a dispatcher that survives restarts, in this process."""
    with LocalCluster(num_workers=1, processes=False, work_dir=tmp_path) as cluster:
        yield cluster


def read_by(service: LocalCluster, dataset: hr.Dataset, **options: Any) -> hr.Dataset:
    mode = options.pop("mode", "parallel_epochs")
    return dataset.apply(distribute(mode, service.target, **options))


# --- the dispatcher goes, and comes back --------------------------------------------------------


@pytest.mark.catalogue("FT1")
def test_elements_are_delivered_while_the_dispatcher_is_down(cluster: LocalCluster) -> None:
    with iter(read_by(cluster, hr.Dataset.range(100))) as reader:
        assert int(next(reader)) == 0
        cluster.dispatcher.stop()
        assert [int(next(reader)) for _ in range(99)] == list(range(1, 100))


@pytest.mark.catalogue("FT2")
def test_a_dispatcher_restarted_before_reading_is_not_noticed(cluster: LocalCluster) -> None:
    dataset = read_by(cluster, hr.Dataset.range(100))
    cluster.restart_dispatcher()
    assert numbers(dataset) == list(range(100))


@pytest.mark.catalogue("FT3", "FT4")
@pytest.mark.parametrize("mode", MODES)
def test_a_dispatcher_restarted_during_reading_is_not_noticed(
    cluster: LocalCluster, mode: str
) -> None:
    reader = iter(read_by(cluster, hr.Dataset.range(100), mode=mode))
    got = [int(next(reader)) for _ in range(50)]
    cluster.restart_dispatcher()
    assert got + numbers(reader) == list(range(100))


@pytest.mark.catalogue("FT5")
def test_restarts_between_epochs_lose_and_duplicate_nothing(
    cluster: LocalCluster,
) -> None:
    reader = iter(read_by(cluster, hr.Dataset.range(100).repeat(5), mode="distributed_epoch"))
    got: list[int] = []
    for stop in (50, 250, 450, 500):
        got += [int(next(reader)) for _ in range(stop - len(got))]
        cluster.restart_dispatcher()
    got += numbers(reader)
    assert Counter(got) == dict.fromkeys(range(100), 5)


@pytest.mark.catalogue("FT6")
def test_a_dispatcher_restarted_between_iterations_is_not_noticed(cluster: LocalCluster) -> None:
    dataset = read_by(cluster, hr.Dataset.range(100))
    assert numbers(dataset) == list(range(100))
    cluster.restart_dispatcher()
    assert numbers(dataset) == list(range(100))


@pytest.mark.catalogue("FT7", "FT8")
def test_datasets_survive_restarts_between_their_registrations(cluster: LocalCluster) -> None:
    datasets = []
    for size in range(10, 20):
        datasets.append(read_by(cluster, hr.Dataset.range(size)))
        cluster.restart_dispatcher()
    for size, dataset in enumerate(datasets, start=10):
        assert numbers(dataset) == list(range(size))


@pytest.mark.catalogue("FT9", "FT10", "LW20")
def test_dispatcher_and_worker_restart_between_epochs(cluster: LocalCluster) -> None:
    dataset = read_by(cluster, hr.Dataset.range(100))
    for index in range(2):
        cluster.restart_dispatcher()
        cluster.stop_worker(index)
        cluster.add_worker()
        assert numbers(dataset) == list(range(100))


def test_a_restarted_dispatcher_without_journal_is_named(tmp_path: Path) -> None:
    port = free_port()
    config = DispatcherConfig(port=port)
    dispatcher = DispatchServer(config)
    worker = Worker(WorkerConfig(f"127.0.0.1:{port}"))
    reader = iter(hr.Dataset.range(10).repeat().apply(distribute("parallel_epochs", port_of(port))))
    try:
        assert int(next(reader)) == 0
        dispatcher.stop()
        dispatcher = DispatchServer(config)
        with pytest.raises(
            hr.errors.FailedPreconditionError, match="restarted without `fault_tolerant_mode`"
        ):
            exhaust(reader)
    finally:
        reader.close()
        worker.stop()
        dispatcher.stop()


@pytest.mark.catalogue("FT11", "FT16")
def test_servers_may_start_after_the_client(tmp_path: Path) -> None:
    port = free_port()
    servers: list[Any] = []

    def start() -> None:
        time.sleep(0.5)
        servers.append(DispatchServer(DispatcherConfig(port=port)))
        servers.append(Worker(WorkerConfig(f"127.0.0.1:{port}")))

    starter = threading.Thread(target=start)
    starter.start()
    try:
        dataset = hr.Dataset.range(10).apply(distribute("parallel_epochs", port_of(port)))
        assert numbers(dataset) == list(range(10))
    finally:
        starter.join()
        for server in reversed(servers):
            server.stop()


@pytest.mark.catalogue("FT12")
def test_a_worker_added_during_reading_delivers_a_copy(cluster: LocalCluster) -> None:
    count = 104
    reader = iter(read_by(cluster, hr.Dataset.range(count)))
    got = [int(next(reader)) for _ in range(count // 2)]
    cluster.add_worker()
    got += numbers(reader)
    assert sorted(got) == sorted(list(range(count)) * 2)


def test_a_killed_and_restarted_dispatcher_loses_no_element(tmp_path: Path) -> None:
    port = free_port()
    with (
        dispatcher_process(port, tmp_path) as dispatcher,
        Worker(WorkerConfig(f"127.0.0.1:{port}")),
    ):
        dataset = hr.Dataset.range(3_000).map(slowly)
        reader = iter(dataset.apply(distribute("distributed_epoch", port_of(port))))
        got = [int(next(reader)) for _ in range(1_000)]
        dispatcher.send_signal(signal.SIGKILL)
        dispatcher.wait()
        with dispatcher_process(port, tmp_path):
            got += numbers(reader)
        assert got == list(range(3_000))


FULL_DISK = """
import resource, sys
from pathlib import Path
from headrace.service import DispatcherConfig, DispatchServer
config = DispatcherConfig(port={port}, work_dir={work_dir!r}, fault_tolerant_mode=True)
server = DispatchServer(config)
print("ready", flush=True)
sys.stdin.readline()
# Files that are larger than they are now cannot be written: the kernel refuses, as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
print("full", flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sys.stdin.read()
"""


def test_a_client_names_the_full_disk_that_it_waits_for(tmp_path: Path) -> None:
    port = free_port()
    with (
        announced(FULL_DISK.format(port=port, work_dir=str(tmp_path))) as dispatcher,
        Worker(WorkerConfig(f"127.0.0.1:{port}")),
    ):
        assert dispatcher.stdin is not None
        assert dispatcher.stdout is not None
        dataset = hr.Dataset.range(10_000).map(slowly)
        share = distribute(ShardingPolicy.DYNAMIC, port_of(port), wait_timeout=2)
        with iter(dataset.apply(share)) as reader:
            got = [int(next(reader)) for _ in range(100)]
            dispatcher.stdin.write("\n")
            dispatcher.stdin.flush()
            assert dispatcher.stdout.readline() == "full\n"
            with pytest.raises(hr.errors.UnavailableError, match=r"cannot write journal .*"):
                got += numbers(reader)
            assert sorted(got) == list(range(len(got)))


# --- workers die --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_ends_without_a_killed_worker(mode: str) -> None:
    count = 2_000
    with LocalCluster(num_workers=2, worker_timeout_ms=8000) as cluster:
        dataset = read_by(cluster, hr.Dataset.range(count).map(slowly), mode=mode)
        reader = iter(dataset)
        got = [int(next(reader)) for _ in range(200)]
        cluster.kill_worker(0)
        got += numbers(reader)
        seen = Counter(got)
        if mode == "parallel_epochs":
            assert set(seen) == set(range(count))
            assert max(seen.values()) <= 2
        else:
            assert max(seen.values()) == 1
            assert len(seen) > count // 4
        assert set(seen) <= set(range(count))
        # The next epoch is whole: who is left does all of it.
        assert sorted(numbers(dataset)) == list(range(count))


@pytest.mark.catalogue("FT14")
def test_an_epoch_without_workers_continues_with_a_new_one() -> None:
    with LocalCluster(num_workers=1, worker_timeout_ms=8000) as cluster:
        reader = iter(read_by(cluster, hr.Dataset.range(500).map(slowly)))
        for _ in range(10):
            next(reader)
        cluster.kill_worker(0)
        cluster.add_worker()
        assert set(numbers(reader)) == set(range(500))


def by_whom(x: Any) -> Any:
    return x, os.getpid()


def test_workers_added_after_a_kill_each_deliver_a_copy() -> None:
    with LocalCluster(num_workers=2) as cluster:
        killed = cluster.workers[0]
        assert killed.pid is not None
        endless = hr.Dataset.range(1 << 40).map(by_whom)
        with iter(read_by(cluster, endless, max_outstanding_requests=4)) as reader:
            next(reader)
            cluster.kill_worker(0)
            for _ in range(3):
                cluster.add_worker()
            added = {each.pid for each in cluster.workers} - {killed.pid}
            came: set[int] = set()
            deadline = time.monotonic() + 60
            while not added <= came:
                assert time.monotonic() < deadline, (added, came)
                _, pid = next(reader)  # type: ignore[misc]
                came.add(int(pid))
            assert len(added) == 4


@pytest.mark.catalogue("FT13", "MP2")
def test_an_unresponsive_worker_does_not_delay_others() -> None:
    with LocalCluster(num_workers=2) as cluster:
        stuck, other = (worker.pid for worker in cluster.workers)
        # Each reads a copy; what the stuck one sent before may come yet.
        came: dict[int, list[int]] = {stuck: [], other: []}
        endless = hr.Dataset.range(1 << 40).map(by_whom)
        with iter(read_by(cluster, endless, max_outstanding_requests=1)) as reader:

            def take() -> None:
                number, pid = next(reader)  # type: ignore[misc]
                came[int(pid)].append(int(number))

            for _ in range(10):
                take()
            os.kill(stuck, signal.SIGSTOP)
            try:
                while len(came[other]) < 10_000:
                    take()
            finally:
                os.kill(stuck, signal.SIGCONT)
    for numbers_of_copy in came.values():
        assert numbers_of_copy == list(range(len(numbers_of_copy)))


@pytest.mark.catalogue("OP64", "OP65")
def test_a_remote_worker_cannot_be_read_in_process() -> None:
    with LocalCluster(num_workers=1) as cluster:
        dataset = read_by(cluster, hr.Dataset.range(3), data_transfer_protocol="local")
        with pytest.raises(hr.errors.FailedPreconditionError, match="is in another"):
            list(dataset)


def test_a_remote_worker_that_replaced_a_local_one_is_not_read_in_process() -> None:
    with DispatchServer() as dispatcher:
        target = dispatcher.target
        with Worker(WorkerConfig(target.partition("://")[2])) as worker:
            address = worker.address
        with worker_process(target, address):
            dataset = hr.Dataset.range(3).apply(
                distribute(ShardingPolicy.OFF, target, data_transfer_protocol="local")
            )
            with pytest.raises(hr.errors.FailedPreconditionError, match=f"{address} is in another"):
                list(dataset)


# --- functions ----------------------------------------------------------------------------------


class Add:
    """A callable that carries a value."""

    def __init__(self, term: int) -> None:
        self.term = term

    def __call__(self, x: Any) -> Any:
        return x + self.term


def double(x: Any) -> Any:
    return x * 2


def test_functions_of_every_kind_run_in_worker_processes() -> None:
    offset = 100
    table = {i: i * i for i in range(10)}

    def looked_up(x: Any) -> Any:
        return np.int64(table[int(x)])

    def counting() -> Iterator[int]:
        yield from range(offset, offset + 10)

    with LocalCluster(num_workers=1) as cluster:
        for function, expected in (
            (lambda x: x + offset, [i + 100 for i in range(10)]),
            (looked_up, [i * i for i in range(10)]),
            (Add(7), [i + 7 for i in range(10)]),
            (double, [i * 2 for i in range(10)]),
        ):
            assert numbers(read_by(cluster, hr.Dataset.range(10).map(function))) == expected
        generated = hr.Dataset.from_generator(counting)
        assert numbers(read_by(cluster, generated)) == list(range(100, 110))
        # And indeed in another process.
        pids = hr.Dataset.range(1).map(lambda x: np.int64(os.getpid()))
        assert numbers(read_by(cluster, pids)) == [cluster.workers[0].pid]


def test_a_user_error_has_traceback_and_position_and_reading_continues() -> None:
    def picky(x: Any) -> Any:
        if x == 5:
            raise KeyError(f"no place for {int(x)}")
        return x

    with LocalCluster(num_workers=1) as cluster:
        reader = iter(read_by(cluster, hr.Dataset.range(10).map(picky)))
        got: list[int] = []
        with pytest.raises(hr.errors.UserFunctionError) as caught:
            got.extend(map(int, reader))
        assert got == [0, 1, 2, 3, 4]
        assert caught.value.position == 5
        assert caught.value.original_type == "KeyError"
        assert "no place for 5" in str(caught.value)
        assert "in picky" in caught.value.original_traceback
        assert numbers(reader) == [6, 7, 8, 9]


def test_a_plan_that_a_worker_cannot_load_ends_with_the_reason(tmp_path: Path) -> None:
    class Unloadable:
        def __call__(self, x: Any) -> Any:
            return x

        def __reduce__(self) -> Any:
            return exec, ("raise ImportError('no such module here')",)

    with LocalCluster(num_workers=1) as cluster:
        reader = iter(read_by(cluster, hr.Dataset.range(3).map(Unloadable())))
        with pytest.raises(hr.errors.HeadraceError, match="no such module here"):
            next(reader)
        assert numbers(reader) == []


def test_a_cluster_whose_workers_cannot_start_shows_their_output() -> None:
    with pytest.raises(hr.errors.UnavailableError, match="No module named 'no_such_module_xyz'"):
        LocalCluster(num_workers=1, preload=("no_such_module_xyz",))


# --- the consumer leaves ------------------------------------------------------------------------


def test_a_consumer_that_raises_or_breaks_leaves_nothing() -> None:
    with LocalCluster(num_workers=2) as cluster:
        dataset = read_by(cluster, hr.Dataset.range(1_000_000).map(slowly))
        for _ in range(2):
            for value in dataset:
                if value > 3:
                    break

        def consume() -> None:
            for value in dataset:
                raise RuntimeError(f"no use for {value}")

        with pytest.raises(RuntimeError, match="no use for 0"):
            consume()


SCRIPT = """
import json, sys, threading, time
import headrace as hr
from headrace.service import LocalCluster, distribute

with LocalCluster(num_workers=2) as cluster:
    dataset = hr.Dataset.range(1 << 40).apply(distribute("parallel_epochs", cluster.target))
    iterator = iter(dataset)
    next(iterator)
    try:
        # The signal comes after that, and so in here.
        print(json.dumps([worker.pid for worker in cluster.workers]), flush=True)
        for value in iterator:
            {work}
    finally:
        iterator.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith("headrace-read")]
        print(json.dumps(left), flush=True)
"""


@pytest.mark.catalogue("OP50")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("work", ["pass", "time.sleep(60)"])
def test_a_client_that_is_interrupted_or_killed_leaves_no_process(
    sent: signal.Signals, work: str
) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(work=work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    try:
        pids = json.loads(client.stdout.readline())
        time.sleep(0.2)
        client.send_signal(sent)
        out, err = client.communicate(timeout=120)
    finally:
        client.kill()
        client.communicate()
    if sent is signal.SIGINT:
        assert json.loads(out) == []
        assert "KeyboardInterrupt" in err
    assert client.returncode == -sent
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    owners = tuple(f"headrace-{pid}-" for pid in (client.pid, *pids))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(owners)]


def exhaust(reader: Iterator[Any]) -> None:
    for _ in reader:
        pass


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def free_port() -> int:
    """Return a port that outgoing connections do not use, so that it can be bound repeatedly."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def port_of(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


@contextmanager
def dispatcher_process(port: int, work_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A dispatcher in a separate process, until the end of the block at the latest."""
    program = (
        "import sys\n"
        "from headrace.service import DispatcherConfig, DispatchServer\n"
        f"server = DispatchServer(DispatcherConfig(port={port}, work_dir={str(work_dir)!r}, "
        "fault_tolerant_mode=True))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with announced(program) as process:
        yield process


@contextmanager
def worker_process(target: str, address: str) -> Iterator[subprocess.Popen[str]]:
    """A worker in a separate process, until the end of the block."""
    program = (
        "import sys\n"
        "from headrace.service import WorkerConfig, WorkerServer\n"
        f"with WorkerServer(WorkerConfig({target!r}.partition('://')[2], "
        f"port={int(address.rpartition(':')[2])})):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with announced(program) as process:
        yield process


@contextmanager
def announced(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says when it is ready, until the end of the block at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def ends_a_process(x: Any) -> int:
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    os.close(begun)
    os.close(begins)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_processes_that_a_function_forks_on_a_worker_heed_sigterm() -> None:
    with LocalCluster(num_workers=1) as cluster:
        dataset = hr.Dataset.range(3).map(ends_a_process)
        assert numbers(read_by(cluster, dataset)) == [-15, -15, -15]
