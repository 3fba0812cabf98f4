"""Addresses that others can reach: what a worker advertises, and names whose meaning changes."""

from __future__ import annotations

import logging
import math
import socket
import time

import pytest

import headrace as hr
from headrace.errors import UnavailableError
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    Security,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from headrace.transport import address as addresses
from headrace.transport.security import new_keys


@pytest.fixture
def keys(tmp_path):
    new_keys(tmp_path)
    return tmp_path


class Names:
    """A resolver that knows what a test tells it, beside numbers."""

    def __init__(self, monkeypatch):
        self.known = {}
        self.asked = 0
        self.known_after = math.inf
        self._real = socket.getaddrinfo
        monkeypatch.setattr(addresses.socket, "getaddrinfo", self.resolve)

    def resolve(self, host, port, *args, **kwargs):
        if host not in self.known and not str(host).endswith(".example"):
            return self._real(host, port, *args, **kwargs)
        self.asked += 1
        if self.asked >= self.known_after:
            self.known[host] = "127.0.0.1"
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.known[host], port))]


@pytest.fixture
def names(monkeypatch):
    return Names(monkeypatch)


def test_a_worker_on_the_wildcard_address_advertises_its_route_address(keys, caplog):
    server = Security.load(keys, "server")
    with DispatchServer(DispatcherConfig(security=server)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        config = WorkerConfig(address, host="0.0.0.0", security=server)
        with caplog.at_level(logging.WARNING), WorkerServer(config) as worker:
            host, port = addresses.split(worker.address)
            assert host == "127.0.0.1"
            assert port > 0
            share = distribute(
                ShardingPolicy.DYNAMIC, dispatcher.target, security=Security.load(keys, "client")
            )
            assert len(list(hr.Dataset.range(100).apply(share))) == 100
    said = [each.message for each in caplog.records if "advertising worker address" in each.message]
    assert len(said) == 1
    assert "127.0.0.1" in said[0]
    assert "--worker-address" in said[0]


def test_the_route_to_another_machine_starts_at_a_local_address(monkeypatch):
    class Routes:
        def __init__(self, family, kind):
            assert kind == socket.SOCK_DGRAM

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, target):
            assert target == ("192.0.2.9", 5050)

        def getsockname(self):
            return ("192.0.2.4", 40000)

    monkeypatch.setattr(addresses.socket, "socket", Routes)
    assert addresses.local_address_for("192.0.2.9:5050") == "192.0.2.4"


def test_a_worker_without_a_route_is_rejected_with_the_fix(keys, names):
    server = Security.load(keys, "server")
    config = WorkerConfig("dispatcher.example:5050", host="0.0.0.0", security=server)
    with pytest.raises(UnavailableError, match=r"--worker-address.*%port%"):
        WorkerServer(config)


@pytest.mark.parametrize(
    ("host", "answer"),
    [("0.0.0.0", True), ("::", True), ("*", True), ("127.0.0.1", False), ("trainer", False)],
)
def test_wildcard_addresses_are_recognized(host, answer):
    assert addresses.is_wildcard(host) is answer


def test_a_dispatcher_that_moved_is_found_under_its_name(names, tmp_path):
    """Given readers and workers that know a name, when what it means moves, they follow."""
    names.known["dispatcher.example"] = "127.0.0.1"
    config = DispatcherConfig(host="127.0.0.1", work_dir=tmp_path, fault_tolerant_mode=True)
    dispatcher = DispatchServer(config)
    port = int(dispatcher.target.rpartition(":")[2])
    service = f"dispatcher.example:{port}"
    worker = WorkerServer(WorkerConfig(service, heartbeat_interval_ms=50))
    try:
        share = distribute(ShardingPolicy.DYNAMIC, service, job_name="training")
        with iter(hr.Dataset.range(50_000).batch(10).apply(share)) as batches:
            seen = [*next(batches)]
            dispatcher.stop()
            names.known["dispatcher.example"] = "127.0.0.2"
            dispatcher = DispatchServer(
                DispatcherConfig(
                    host="127.0.0.2", port=port, work_dir=tmp_path, fault_tolerant_mode=True
                )
            )
            for batch in batches:
                seen += [*batch]
        assert sorted(int(each) for each in seen) == list(range(50_000))
        until = time.monotonic() + 20
        while not any(each.seconds_since_heartbeat < 1 for each in dispatcher.stats().workers):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        worker.stop()
        dispatcher.stop()


def test_an_unresolved_host_name_is_looked_up_again(names):
    with DispatchServer() as dispatcher:
        port = int(dispatcher.target.rpartition(":")[2])
        names.known_after = names.asked + 3
        with WorkerServer(WorkerConfig(f"dispatcher.example:{port}")):
            assert dispatcher.num_workers() == 1
