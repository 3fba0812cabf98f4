"""A service with keys: clients with keys can read, others get an error at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import NotFoundError, UnauthenticatedError, UnavailableError
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    Security,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
    from_dataset_id,
    messages,
    register_dataset,
)
from headrace.service.stub import DispatcherStub
from headrace.transport.security import new_keys

pytestmark = pytest.mark.system


def test_a_dataset_is_read_through_a_service_with_keys(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    servers = Security.load(tmp_path / "keys", "server")
    client = Security.load(tmp_path / "keys", "client")
    with DispatchServer(DispatcherConfig(security=servers)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address, security=servers)):
            read = distribute(
                ShardingPolicy.DYNAMIC,
                dispatcher.target,
                security=client,
                data_transfer_protocol="tcp",
            )
            dataset = hr.Dataset.range(20).map(lambda x: x + 1).apply(read)
            assert sorted(int(x) for x in dataset) == list(range(1, 21))


def test_clients_without_a_valid_key_are_rejected(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    new_keys(tmp_path / "others")
    servers = Security.load(tmp_path / "keys", "server")
    stranger = Security.load(tmp_path / "others", "client")
    with DispatchServer(DispatcherConfig(security=servers)) as dispatcher:
        for keys in (None, stranger):
            read = distribute(ShardingPolicy.OFF, dispatcher.target, security=keys)
            with pytest.raises((UnauthenticatedError, UnavailableError)):
                hr.Dataset.range(3).apply(read)


def test_worker_requests_are_rejected_for_client_keys(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    servers = Security.load(tmp_path / "keys", "server")
    client = Security.load(tmp_path / "keys", "client")
    with DispatchServer(DispatcherConfig(security=servers)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with (
            WorkerServer(WorkerConfig(address, security=servers)) as worker,
            DispatcherStub(address, security=client) as stub,
        ):
            register = messages.RegisterWorker(worker_id="thief", address=worker.address)
            with pytest.raises(
                UnauthenticatedError, match="RegisterWorker is reserved for workers"
            ):
                stub.call(register)
            ask = messages.GetTask(worker_id=known_worker(stub), task_id=4000)
            with pytest.raises(UnauthenticatedError, match="authorized_workers"):
                stub.call(ask)
            (known,) = stub.call(messages.GetStatus()).workers
            assert known.worker_id != "thief"


def known_worker(stub: DispatcherStub) -> str:
    (known,) = stub.call(messages.GetStatus()).workers
    return known.worker_id


def test_ordered_reading_by_id_fetches_the_plan(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    servers = Security.load(tmp_path / "keys", "server")
    client = Security.load(tmp_path / "keys", "client")
    data = hr.Dataset.range(20).filter(lambda x: x % 3 != 1).shuffle(5, seed=3).batch(4)
    with DispatchServer(DispatcherConfig(security=servers)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with (
            WorkerServer(WorkerConfig(address, security=servers)),
            DispatcherStub(address, security=client) as stub,
        ):
            with pytest.raises(NotFoundError, match="no plan is stored"):
                stub.call(messages.GetPlan(digest=bytes(32)))
            name = register_dataset(address, data, security=client)
            read = from_dataset_id(
                ShardingPolicy.DYNAMIC, address, name, ordered=True, security=client
            )
            assert [batch.tolist() for batch in read] == [batch.tolist() for batch in data]


def test_listed_worker_keys_may_send_worker_requests(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    new_keys(tmp_path / "worker")
    listed = (tmp_path / "worker" / "client.key").read_text()
    (tmp_path / "keys" / "authorized_workers" / "one.key").write_text(listed)
    servers = Security.load(tmp_path / "keys", "server")
    own = Security.load(tmp_path / "worker", "client")
    keys = dataclasses.replace(own, server_key=servers.public_key)
    with (
        DispatchServer(DispatcherConfig(security=servers)) as dispatcher,
        DispatcherStub(dispatcher.target.removeprefix("tcp://"), security=keys) as stub,
    ):
        stub.call(messages.RegisterWorker(worker_id="w", address="127.0.0.1:1"))
        assert [each.worker_id for each in stub.call(messages.GetStatus()).workers] == ["w"]


def test_a_public_address_needs_keys(tmp_path: Path) -> None:
    config = DispatcherConfig(
        host="0.0.0.0", fault_tolerant_mode=True, work_dir=str(tmp_path / "journal")
    )
    with pytest.raises(ValueError, match="headrace keys new"):
        DispatchServer(config)
    assert not list(tmp_path.iterdir())
