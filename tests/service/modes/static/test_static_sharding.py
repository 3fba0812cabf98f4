"""Static sharding with real servers: each slot of a fixed list of workers reads its own shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from headrace.service import (
    SHARD_HINT,
    DispatcherConfig,
    DispatchServer,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
)
from headrace.transport import inprocess

FILE, DATA = ShardingPolicy.FILE, ShardingPolicy.DATA
EITHER, HINT = ShardingPolicy.FILE_OR_DATA, ShardingPolicy.HINT
Dataset = hr.Dataset


@contextmanager
def service(
    workers: int = 5, addresses: list[str] | None = None, **config: Any
) -> Iterator[DispatchServer]:
    """Run a dispatcher with a list of workers, and as many workers in this process."""
    listed = ["localhost"] * workers if addresses is None else addresses
    with ExitStack() as stack:
        settings = DispatcherConfig(worker_addresses=listed, worker_timeout_ms=1000, **config)
        dispatcher = stack.enter_context(DispatchServer(settings))
        for _ in range(workers):
            stack.enter_context(worker_of(dispatcher))
        yield dispatcher


def worker_of(dispatcher: DispatchServer, **config: Any) -> WorkerServer:
    return WorkerServer(WorkerConfig(dispatcher.target.removeprefix("tcp://"), **config))


def read(dataset: Dataset, mode: ShardingPolicy, dispatcher: DispatchServer, **args: Any) -> Any:
    return dataset.apply(hr.service.distribute(mode, dispatcher.target, **args))


def read_all(dataset: Dataset) -> list[Any]:
    """Return all elements; close the reader in any case."""
    with iter(dataset) as reader:
        return list(reader)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a pattern of ten files of ten records."""
    folder: Path = tmp_path_factory.mktemp("static")
    for number in range(10):
        with hr.io.TFRecordWriter(folder / f"{number:02d}.tfrecord") as writer:
            for record in range(10):
                writer.write(f"{number}.{record}".encode())
    return f"{folder}/*.tfrecord"


@pytest.mark.catalogue("AS9", "AS16")
def test_all_shards_together_contain_the_dataset_once(files: str) -> None:
    records = Dataset.list_files(files, shuffle=True).flat_map(hr.TFRecordDataset)
    with service() as dispatcher:
        for mode in (FILE, DATA, EITHER):
            found = sorted(bytes(record) for record in read(records, mode, dispatcher))
            assert found == sorted(f"{n}.{m}".encode() for n in range(10) for m in range(10))
        for mode in (DATA, EITHER):
            assert sorted(read(Dataset.range(20), mode, dispatcher)) == list(range(20))
        hinted = Dataset.range(20).shard(SHARD_HINT, 0).map(lambda x: x + 1)
        assert sorted(read(hinted, HINT, dispatcher)) == list(range(1, 21))
        assert read_all(read(Dataset.range(0), EITHER, dispatcher)) == []


def test_an_epoch_has_one_shuffle_order_that_differs_from_the_previous() -> None:
    with service(workers=3) as dispatcher:
        shuffled = read(Dataset.range(100).shuffle(100), DATA, dispatcher)
        epochs = [[int(x) for x in shuffled] for _ in range(2)]
    for each in epochs:
        assert sorted(each) == list(range(100))
    assert epochs[0] != epochs[1]


def test_an_epoch_waits_for_workers_that_have_not_joined() -> None:
    with service(workers=0, addresses=["localhost"] * 2) as dispatcher, ExitStack() as stack:
        stack.enter_context(worker_of(dispatcher))
        reader = iter(read(Dataset.range(6), DATA, dispatcher, target_workers="ANY"))
        assert [int(next(reader)) for _ in range(3)] == [0, 2, 4]
        stack.enter_context(worker_of(dispatcher))
        assert [int(x) for x in reader] == [1, 3, 5]


def test_sources_without_files_and_too_few_files_are_rejected(files: str) -> None:
    few = Dataset.list_files(files, shuffle=False).take(4).flat_map(hr.TFRecordDataset)
    with service() as dispatcher:
        with pytest.raises(NotFoundError, match="Found an unshardable source dataset"):
            read_all(read(Dataset.range(20), FILE, dispatcher))
        for mode in (FILE, EITHER):
            with pytest.raises(InvalidArgumentError, match=r"4 files.*the required 5 shards"):
                read_all(read(few, mode, dispatcher))
        assert len(read_all(read(few, DATA, dispatcher))) == 40


@pytest.mark.parametrize("mode", [ShardingPolicy.OFF, ShardingPolicy.DYNAMIC, EITHER])
def test_a_hint_requires_the_hint_policy(mode: ShardingPolicy) -> None:
    hinted = Dataset.range(20).shard(SHARD_HINT, 0)
    with service(workers=1) as dispatcher, pytest.raises(FailedPreconditionError):
        read_all(read(hinted, mode, dispatcher))


@pytest.mark.catalogue("AS27", "AS29")
def test_workers_that_are_not_listed_are_rejected() -> None:
    for listed in (["localhost:worker"], ["elsewhere:%port%"]):
        with (
            service(workers=0, addresses=listed) as dispatcher,
            pytest.raises(HeadraceError, match="worker's address is not configured"),
        ):
            worker_of(dispatcher)


@pytest.mark.catalogue("AS30")
def test_a_surplus_worker_waits_for_a_lease_and_is_rejected() -> None:
    with (
        service(workers=1, addresses=["localhost:%port%"]) as dispatcher,
        pytest.raises(HeadraceError, match="other workers are already running at the config"),
    ):
        worker_of(dispatcher)


@pytest.mark.catalogue("AS28")
def test_static_policies_without_a_list_are_rejected() -> None:
    with (
        service(workers=1, addresses=[]) as dispatcher,
        pytest.raises(NotFoundError, match=r"Worker .*is not in the workers list"),
    ):
        read_all(read(Dataset.range(3), DATA, dispatcher))


def test_named_ports_match_any_port() -> None:
    with service(workers=2, addresses=["localhost:%port_worker%"] * 2) as dispatcher:
        assert sorted(read(Dataset.range(6), DATA, dispatcher)) == list(range(6))


def test_unsupported_visitation_values_are_rejected() -> None:
    with service(workers=1) as dispatcher:
        second = read(Dataset.range(3), DATA, dispatcher, visitation="at_least_once")
        assert list(second) == [0, 1, 2]
        with pytest.raises(ValueError, match="visitation"):
            read(Dataset.range(3), DATA, dispatcher, visitation="exactly_once")


def test_a_shard_whose_worker_was_lost_is_read_again_by_the_next_one() -> None:
    config = DispatcherConfig(worker_addresses=["localhost"], worker_timeout_ms=500)
    with DispatchServer(config) as dispatcher, ExitStack() as stack:
        first = worker_of(dispatcher)
        endless = read(Dataset.range(1 << 40), DATA, dispatcher, max_outstanding_requests=1)
        reader = iter(endless)
        assert [int(next(reader)) for _ in range(3)] == [0, 1, 2]
        first.stop()
        stack.enter_context(worker_of(dispatcher))
        assert 0 in (int(value) for value in reader)
        reader.close()


def test_a_repeated_shard_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = DispatcherConfig(worker_addresses=["localhost", "localhost"])
    with DispatchServer(config) as dispatcher, ExitStack() as stack:
        stack.enter_context(worker_of(dispatcher))
        stopped = worker_of(dispatcher)
        with iter(read(Dataset.range(1 << 20).map(int), DATA, dispatcher)) as reader:
            next(reader)
            stopped.drain(timeout=0.1)
            stopped.stop()
            stack.enter_context(worker_of(dispatcher))
            elements = {int(value) for value in reader}
    assert elements | {0, 1} == set(range(1 << 20))
    assert "the worker of shard 1 was lost (loss 1)" in caplog.text


# --- workers in this process and others ---------------------------------------------------------


@contextmanager
def mixed_cluster(**config: Any) -> Iterator[DispatchServer]:
    """Run a dispatcher with five slots; only the worker of slot 1 is in this process."""
    with ExitStack() as stack:
        listed = DispatcherConfig(worker_addresses=["localhost"] * 5, **config)
        dispatcher = stack.enter_context(DispatchServer(listed))
        address = dispatcher.target.removeprefix("tcp://")
        for slot in range(5):
            if slot == 1:
                stack.enter_context(worker_of(dispatcher))
            else:
                stack.enter_context(remote_worker(address))
        yield dispatcher


@contextmanager
def remote_worker(address: str) -> Iterator[None]:
    """Run a worker that counts as one of another process."""
    worker = WorkerServer(WorkerConfig(address))
    known = inprocess._servers.pop(worker.address)
    try:
        yield
    finally:
        inprocess._servers[worker.address] = known
        worker.stop()


@pytest.mark.catalogue("WT5")
def test_auto_reads_the_worker_of_this_process_if_there_is_one() -> None:
    for mode in (None, "COLOCATED"):
        with mixed_cluster(deployment_mode=mode) as dispatcher:
            found = [int(x) for x in read(Dataset.range(20), DATA, dispatcher)]
            assert found == [1, 6, 11, 16]
            copy = read(Dataset.range(20), EITHER, dispatcher, target_workers="ANY")
            assert sorted(int(x) for x in copy) == list(range(20))


@pytest.mark.catalogue("AS9", "AS16")
def test_auto_reads_all_workers_of_a_remote_deployment() -> None:
    with mixed_cluster(deployment_mode="REMOTE") as dispatcher:
        found = sorted(int(x) for x in read(Dataset.range(20), DATA, dispatcher))
        assert found == list(range(20))
        local = read(Dataset.range(20), DATA, dispatcher, target_workers="LOCAL")
        assert [int(x) for x in local] == [1, 6, 11, 16]


@pytest.mark.catalogue("AS31")
def test_a_colocated_deployment_without_a_local_worker_raises() -> None:
    with (
        service(workers=0, addresses=["localhost"], deployment_mode="COLOCATED") as dispatcher,
        remote_worker(dispatcher.target.removeprefix("tcp://")),
    ):
        text = "Static sharding policy <FILE_OR_DATA> requires local workers"
        with pytest.raises(InvalidArgumentError, match=text):
            read_all(read(Dataset.range(20), EITHER, dispatcher))
        # Policies without fixed shards are not affected.
        assert read_all(read(Dataset.range(3), ShardingPolicy.OFF, dispatcher)) == [0, 1, 2]


def test_readers_wait_for_a_local_worker_that_restarts() -> None:
    settings = DispatcherConfig(worker_addresses=["localhost"] * 2)
    with DispatchServer(settings) as dispatcher, ExitStack() as stack:
        stopped = stack.enter_context(worker_of(dispatcher))
        stack.enter_context(remote_worker(dispatcher.target.removeprefix("tcp://")))
        data = read(Dataset.range(1 << 12).map(int), DATA, dispatcher, max_outstanding_requests=1)
        with iter(data) as reader:
            assert int(next(reader)) == 0
            stopped.stop()
            starting = threading.Timer(1.0, lambda: stack.enter_context(worker_of(dispatcher)))
            starting.start()
            elements = {int(x) for x in reader}
            starting.join()
    assert elements | {0} == set(range(0, 1 << 12, 2))


def test_a_local_worker_that_does_not_restart_raises() -> None:
    settings = DispatcherConfig(worker_addresses=["localhost"] * 2)
    with DispatchServer(settings) as dispatcher, ExitStack() as stack:
        stopped = stack.enter_context(worker_of(dispatcher))
        stack.enter_context(remote_worker(dispatcher.target.removeprefix("tcp://")))
        data = read(
            Dataset.range(1 << 20).map(int),
            DATA,
            dispatcher,
            max_outstanding_requests=1,
            wait_timeout=1.0,
        )
        with iter(data) as reader:
            assert int(next(reader)) == 0
            stopped.stop()
            with pytest.raises(UnavailableError, match="no worker can deliver one"):
                for _ in reader:
                    pass


def test_a_local_copy_ends_with_its_worker_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with DispatchServer() as dispatcher, ExitStack() as stack:
        stopped = stack.enter_context(worker_of(dispatcher))
        stack.enter_context(remote_worker(dispatcher.target.removeprefix("tcp://")))
        data = read(
            Dataset.range(1 << 40),
            ShardingPolicy.OFF,
            dispatcher,
            target_workers="LOCAL",
            max_outstanding_requests=1,
        )
        with iter(data) as reader:
            next(reader)
            stopped.stop()
            for _ in reader:
                pass
    assert "The rest of its copy is missing" in caplog.text


def test_a_local_cluster_has_slots() -> None:
    with hr.service.LocalCluster(3, processes=False, worker_addresses=["localhost"] * 3) as cluster:
        data = Dataset.range(9).apply(hr.service.distribute(DATA, cluster.target))
        assert sorted(int(x) for x in data) == list(range(9))
