"""Tests of `Server`: its task, its address and refused arguments."""

from __future__ import annotations

import gc
import socket
import threading
import time

import pytest

from headrace.deploy.server import _listening
from headrace.distribute import ClusterSpec, Server
from headrace.errors import InvalidArgumentError
from headrace.transport import address as addresses
from headrace.transport.security import Security, new_keys

TWO = ClusterSpec({"worker": ["127.0.0.1:0", "localhost:0"], "ps": ["[::1]:0"]})


def listens(address: str) -> bool:
    host, port = addresses.split(address)
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def wait_until(condition, seconds=45.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def goes_quiet(address):
    """Return whether the port is closed, which may take the system a moment."""
    wait_until(lambda: not listens(address))
    return True


@pytest.mark.catalogue("1.10.8", "2.14.2")
@pytest.mark.parametrize(
    ("task", "host"),
    [(("worker", 0), "127.0.0.1"), (("worker", 1), "localhost"), (("ps", 0), "::1")],
)
def test_task_listens_at_its_address(task, host):
    with Server(TWO, *task) as server:
        assert (server.job_name, server.task_index) == task
        assert server.target == f"tcp://{server.address}"
        assert addresses.split(server.address)[0] == host
        assert listens(address := server.address)
    assert goes_quiet(address)


def test_port_is_read_from_addresses_with_any_rpc_layer():
    port = addresses.find_stable_port()
    with Server({"ps": [f"grpc://127.0.0.1:{port}"]}, protocol="grpc") as server:
        assert (server.job_name, server.task_index) == ("ps", 0)
        assert server.target == f"tcp://127.0.0.1:{port}"
        assert repr(server) == f"<Server of 'ps' task 0 at tcp://127.0.0.1:{port}>"
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use by another server"):
            Server({"worker": [f"127.0.0.1:{port}"]})


def test_host_argument_replaces_the_host_of_the_address():
    spec = {"ps": ["ps-0.training.svc:0"]}
    with Server(spec, host="127.0.0.1") as server:
        assert server.address.startswith("127.0.0.1:")


def test_server_does_not_listen_before_start():
    server = Server(TWO, "ps", 0, start=False)
    assert (server.address, server.target) == ("", "")
    server.start()
    assert listens(server.address)
    server.stop()
    server.stop()
    assert server.is_stopped
    with pytest.raises(RuntimeError, match="cannot be started after it has been stopped"):
        server.start()


def test_unreferenced_server_runs_until_it_is_stopped():
    address = Server(TWO, "worker", 0).address
    gc.collect()
    assert listens(address)
    [server] = _listening
    server.stop()
    assert goes_quiet(address)


@pytest.mark.catalogue("1.10.8", "2.14.2")
def test_join_waits_for_the_stop():
    server = Server(TWO, "worker", 0)
    server.join(0.01)
    assert not server.is_stopped
    thread = threading.Thread(target=server.join)
    thread.start()
    server.stop()
    thread.join(30.0)
    assert not thread.is_alive()


@pytest.mark.catalogue("2.14.5")
@pytest.mark.parametrize(
    ("spec", "task", "words"),
    [
        (TWO, (), "Must specify an explicit `job_name`: the cluster has 'ps', 'worker'"),
        ({}, (), "Must specify an explicit `job_name`: the cluster has no tasks"),
        (TWO, ("worker",), "Must specify an explicit `task_index`: tasks of 'worker' are 0, 1"),
        (TWO, ("worker", 2), "the cluster has no 'worker' task 2"),
        (TWO, ("worker", -1), "`task_index` must be at least 0"),
        (TWO, ("chief", 0), "Unexpected task_type to start a server: chief"),
        (TWO, ("evaluator", 0), "Unexpected task_type to start a server: evaluator"),
        (TWO, ("trainer", 0), "unknown task type 'trainer'"),
        ({"local": ["a:1"]}, (), "the cluster has tasks of type 'local'"),
        ({"chief": ["a:1", "b:1"], "ps": ["c:1"]}, ("ps", 0), "at most one chief, but has 2"),
        ({"ps": ["127.0.0.1"]}, (), 'must have the form "host:port"'),
        ({"ps": ["10.9.9.9:1"]}, (), "requires security="),
    ],
)
def test_invalid_task_is_refused(spec, task, words):
    with pytest.raises(ValueError, match=words):
        Server(spec, *task)


def test_cluster_errors_are_headrace_errors():
    with pytest.raises(InvalidArgumentError):
        Server(TWO, "worker", 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster_spec": ["a:1"]}, "`cluster` must be a dict"),
        ({"job_name": 1}, "`job_name` must be a string"),
        ({"task_index": "0"}, "`task_index` must be an integer"),
        ({"protocol": 7}, "`protocol` must be a string"),
        ({"security": "keys"}, "`security` must be a Security"),
        ({"host": 1}, "`host` must be a string"),
    ],
)
def test_invalid_types_are_named(arguments, words):
    with pytest.raises(TypeError, match=words):
        Server(**{"cluster_spec": TWO, "job_name": "ps", "task_index": 0, **arguments})


@pytest.mark.catalogue("2.14.4")
def test_server_listens_on_other_addresses_with_keys(tmp_path):
    keys = Security.load(new_keys(tmp_path / "keys"), "server")
    with Server(TWO, "worker", 0, security=keys, host="0.0.0.0") as server:
        assert listens(f"127.0.0.1:{addresses.split(server.address)[1]}")
