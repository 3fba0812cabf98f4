from __future__ import annotations

import logging
import pickle
import shutil
import socket
import stat
import time
from pathlib import Path

import cloudpickle
import pytest
import zmq

import headrace as hr
from headrace import process_metrics
from headrace.errors import UnauthenticatedError, UnavailableError
from headrace.plan.serialize import dump_plan
from headrace.service.client.options import make_read_options
from headrace.service.client.source import RemoteSource
from headrace.transport import inprocess, zeromq
from headrace.transport.security import AllowList, Security, new_keys
from tests.transport.messages import Echo, Echoed, TestReply, TestRequest
from tests.transport.peer import TestHandler


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return new_keys(tmp_path / "keys")


def unauthorized_client(server: Security) -> Security:
    """Return a client that has the server's key, but is not authorized."""
    public, secret = zmq.curve_keypair()
    return Security(
        role="client",
        public_key=public.decode(),
        secret_key=secret.decode(),
        server_key=server.public_key,
    )


@pytest.fixture
def open_server():
    servers = []

    def serve(security: Security | None):
        servers.append(zeromq.serve(TestHandler(), request_type=TestRequest, security=security))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def call(address: str, security: Security | None):
    channel = zeromq.connect(address, reply_type=TestReply, security=security)
    try:
        return channel.call(Echo(number=1), timeout=4)[0]
    finally:
        channel.close()


def test_new_keys_are_readable_by_their_owner_only(keys: Path):
    for name in ("server.key_secret", "client.key_secret"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    files = sorted(str(file.relative_to(keys)) for file in keys.rglob("*.key*"))
    assert files == [
        "authorized_clients/client.key",
        "client.key",
        "client.key_secret",
        "server.key",
        "server.key_secret",
    ]


def test_keys_are_never_overwritten(keys: Path):
    before = {file: file.read_bytes() for file in keys.rglob("*.key*")}
    with pytest.raises(FileExistsError, match="exists; choose another directory"):
        new_keys(keys)
    assert {file: file.read_bytes() for file in keys.rglob("*.key*")} == before


def test_secret_key_is_not_in_the_repr(keys: Path):
    security = Security.load(keys, "client")
    assert security.secret_key not in repr(security)


def test_missing_directory_is_an_error_that_names_the_command(tmp_path: Path):
    with pytest.raises(ValueError, match="headrace keys new"):
        Security.load(tmp_path, "client")


def test_file_without_a_key_is_refused(keys: Path):
    (keys / "server.key").write_text("short\n")
    with pytest.raises(ValueError, match="must contain a key of 40 characters, but has 5"):
        Security.load(keys, "client")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "guest"}, "role='guest'"),
        ({"public_key": "x"}, "public_key must have 40 characters, but has 1"),
        ({"server_key": ""}, "requires server_key"),
    ],
)
def test_invalid_security_is_refused(keys: Path, change, words):
    good = Security.load(keys, "client")
    fields = {
        "role": good.role,
        "public_key": good.public_key,
        "secret_key": good.secret_key,
        "server_key": good.server_key,
    }
    with pytest.raises(ValueError, match=words):
        Security(**{**fields, **change})


def test_keys_of_the_other_role_are_refused(keys: Path):
    with pytest.raises(ValueError, match="but a server needs them"):
        zeromq.serve(
            TestHandler(), request_type=TestRequest, security=Security.load(keys, "client")
        )
    with pytest.raises(ValueError, match="but a client needs them"):
        zeromq.connect("127.0.0.1:5", reply_type=TestReply, security=Security.load(keys, "server"))


def test_authorized_client_can_connect(keys: Path, open_server):
    server = open_server(Security.load(keys, "server"))
    assert call(server.address, Security.load(keys, "client")) == Echoed(number=1)


def test_authorized_clients_may_be_a_set_of_keys(keys: Path, open_server):
    loaded, client = Security.load(keys, "server"), Security.load(keys, "client")
    security = Security(
        role="server",
        public_key=loaded.public_key,
        secret_key=loaded.secret_key,
        authorized_clients=frozenset([client.public_key]),
    )
    server = open_server(security)
    assert call(server.address, client) == Echoed(number=1)
    with pytest.raises(UnauthenticatedError, match=r"client\.key is not authorized"):
        call(server.address, unauthorized_client(security))


def test_unauthorized_client_is_refused(keys: Path, open_server):
    security = Security.load(keys, "server")
    server = open_server(security)
    with pytest.raises(UnauthenticatedError, match=r"client\.key is not authorized"):
        call(server.address, unauthorized_client(security))
    assert call(server.address, Security.load(keys, "client")) == Echoed(number=1)


def test_client_without_keys_is_refused(keys: Path, open_server):
    server = open_server(Security.load(keys, "server"))
    with pytest.raises((UnauthenticatedError, UnavailableError), match="keys"):
        call(server.address, None)


def test_client_with_another_servers_key_is_refused(keys: Path, tmp_path: Path, open_server):
    server = open_server(Security.load(keys, "server"))
    other = new_keys(tmp_path / "other")
    shutil.copy(keys / "client.key", other / "client.key")
    shutil.copy(keys / "client.key_secret", other / "client.key_secret")
    with pytest.raises((UnauthenticatedError, UnavailableError), match="key"):
        call(server.address, Security.load(other, "client"))


def test_client_with_keys_is_refused_by_a_server_without(keys: Path, open_server):
    server = open_server(None)
    with pytest.raises(
        (UnauthenticatedError, UnavailableError),
        match=r"If the server has no keys, connect without keys \(.*--keys\)",
    ):
        call(server.address, Security.load(keys, "client"))


def test_added_or_removed_key_takes_effect_at_once(keys: Path, open_server):
    security = Security.load(keys, "server")
    server = open_server(security)
    client = unauthorized_client(security)
    file = keys / "authorized_clients" / "second.key"
    file.write_text(client.public_key + "\n")
    assert call(server.address, client) == Echoed(number=1)
    file.unlink()
    with pytest.raises(UnauthenticatedError):
        call(server.address, client)


def test_files_without_a_key_authorize_no_client(keys: Path):
    folder = keys / "authorized_clients"
    (folder / "broken.key").write_bytes(b"\xff\xfe")
    (folder / "empty.key").write_text("")
    allowed = AllowList(folder)
    assert not allowed.callback("headrace", b"")
    assert not allowed.callback("headrace", b"\xff\xfe")
    assert allowed.callback("headrace", Security.load(keys, "client").public_key.encode())


# --- roles -----------------------------------------------------------------------------------


def pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def role_seen_by(server_keys: Security | None, client_keys: Security | None) -> str | None:
    seen = []

    def note(requests):
        for request in requests:
            seen.append(request.role)
            request.reply(Echoed(number=1))

    server = zeromq.serve(note, request_type=TestRequest, security=server_keys)
    try:
        call(server.address, client_keys)
    finally:
        server.close()
    return seen[0]


def test_authorized_client_and_worker_have_different_roles(keys: Path):
    security = Security.load(keys, "server")
    worker = unauthorized_client(security)
    (keys / "authorized_workers" / "first.key").write_text(worker.public_key + "\n")
    assert role_seen_by(security, worker) == "worker"
    assert role_seen_by(security, Security.load(keys, "client")) == "client"


def test_peer_with_the_servers_keys_is_a_worker(keys: Path):
    security = Security.load(keys, "server")
    assert role_seen_by(security, security.as_client()) == "worker"


def test_peer_without_keys_has_no_role():
    assert role_seen_by(None, None) is None


def test_in_process_peer_has_no_role():
    seen = []

    def note(requests):
        for request in requests:
            seen.append(request.role)
            request.reply(Echoed())

    server = inprocess.serve(note, request_type=TestRequest)
    channel = inprocess.connect(server.address)
    channel.call(Echo(), timeout=10)
    assert seen == [None]
    channel.close()
    server.close()


def test_worker_lists_may_be_sets_and_the_worker_role_wins():
    (server, _), (both, _), (worker, _), (client, _) = (pair() for _ in range(4))
    allowed = AllowList(frozenset([client, both]), server, frozenset([worker, both]))
    found = {key: allowed.role_of(key) for key in (server, both, worker, client, pair()[0], "")}
    assert list(found.values()) == ["worker", "worker", "worker", "client", None, None]


def test_key_directory_without_authorized_workers_still_works(keys: Path):
    (keys / "authorized_workers").rmdir()
    security = Security.load(keys, "server")
    assert role_seen_by(security, Security.load(keys, "client")) == "client"


# --- refused connections -----------------------------------------------------------------------


def refusals(*reasons: str) -> float:
    name = "headrace_handshakes_refused_total"
    return sum(
        process_metrics.REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0
        for reason in reasons
    )


@pytest.mark.parametrize("kind", ["unlisted", "without keys", "with another key"])
def test_refused_handshakes_are_counted_each_time_and_logged_once(
    keys: Path, tmp_path: Path, open_server, caplog, kind: str
):
    security = Security.load(keys, "server")
    server = open_server(security)
    other = Security.load(new_keys(tmp_path / "other"), "server")
    client = {
        "unlisted": unauthorized_client(security),
        "without keys": None,
        "with another key": unauthorized_client(other),
    }[kind]
    # A client without keys may close the connection first, since both ends detect the mismatch.
    reasons = ("keys",) if kind == "unlisted" else ("protocol", "ended")
    before = refusals(*reasons)
    with caplog.at_level(logging.WARNING, "headrace.transport"):
        for _ in range(3):
            with pytest.raises((UnauthenticatedError, UnavailableError)):
                call(server.address, client)
        until = time.monotonic() + 10
        while refusals(*reasons) < before + 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert refusals(*reasons) == before + 3
    texts = [record.getMessage() for record in caplog.records]
    if kind == "unlisted":
        assert texts == ["refused a connection from 127.0.0.1: its key is not authorized"]
    # The address is unknown if the connection ends before the server reads it.
    assert len(set(texts)) == len(texts) <= 2
    assert all("refused a connection from" in text for text in texts)


def test_port_scan_is_counted_but_not_logged(keys: Path, open_server, caplog):
    host, port = open_server(Security.load(keys, "server")).address.split(":")
    before = refusals("ended")
    with caplog.at_level(logging.WARNING, "headrace.transport"):
        socket.create_connection((host, int(port)), timeout=5).close()
        until = time.monotonic() + 10
        while refusals("ended") < before + 1 and time.monotonic() < until:
            time.sleep(0.01)
    assert refusals("ended") == before + 1
    assert not caplog.records


def test_loaded_keys_are_pickled_as_their_directory(tmp_path: Path) -> None:
    keys = Security.load(new_keys(tmp_path / "keys"), "client")
    data = cloudpickle.dumps(keys)
    assert keys.secret_key.encode() not in data
    assert pickle.loads(data) == keys


def test_keys_without_a_directory_are_not_pickled(tmp_path: Path) -> None:
    loaded = Security.load(new_keys(tmp_path / "keys"), "client")
    keys = Security(
        role="client",
        public_key=loaded.public_key,
        secret_key=loaded.secret_key,
        server_key=loaded.server_key,
    )
    with pytest.raises(TypeError, match=r"Security\.load\(directory, 'client'\)"):
        cloudpickle.dumps(keys)


def test_plan_of_a_service_dataset_contains_no_secret_key(tmp_path: Path) -> None:
    keys = Security.load(new_keys(tmp_path / "keys"), "client")
    options = make_read_options(processing_mode="parallel_epochs", service="h:1", security=keys)
    source = RemoteSource(options=options, dataset_id="1", cardinality=5)
    plan = dump_plan(hr.Dataset.from_source(source).map(lambda x: x + 1).plan)
    assert keys.secret_key.encode() not in plan
