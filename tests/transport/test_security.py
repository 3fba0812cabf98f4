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
from tests.transport.peer import TestHandler
from tests.transport.words import Echo, Echoed, TestReply, TestRequest


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return new_keys(tmp_path / "keys")


def stranger(server: Security) -> Security:
    """A client that knows the server, but that the server does not know."""
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


def test_new_keys_are_readable_by_their_owner_alone(keys: Path):
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


def test_a_secret_is_not_in_the_repr(keys: Path):
    security = Security.load(keys, "client")
    assert security.secret_key not in repr(security)


def test_loading_from_nowhere_says_how_to_make_keys(tmp_path: Path):
    with pytest.raises(ValueError, match="headrace keys new"):
        Security.load(tmp_path, "client")


def test_a_file_that_holds_no_key_is_refused(keys: Path):
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
def test_a_record_that_makes_no_sense_is_refused(keys: Path, change, words):
    good = Security.load(keys, "client")
    fields = {
        "role": good.role,
        "public_key": good.public_key,
        "secret_key": good.secret_key,
        "server_key": good.server_key,
    }
    with pytest.raises(ValueError, match=words):
        Security(**{**fields, **change})


def test_the_keys_of_the_other_role_are_refused(keys: Path):
    with pytest.raises(ValueError, match="but a server needs them"):
        zeromq.serve(
            TestHandler(), request_type=TestRequest, security=Security.load(keys, "client")
        )
    with pytest.raises(ValueError, match="but a client needs them"):
        zeromq.connect("127.0.0.1:5", reply_type=TestReply, security=Security.load(keys, "server"))


def test_a_client_that_is_on_the_list_is_let_in(keys: Path, open_server):
    server = open_server(Security.load(keys, "server"))
    assert call(server.address, Security.load(keys, "client")) == Echoed(number=1)


def test_the_list_may_be_a_set_of_keys(keys: Path, open_server):
    loaded, client = Security.load(keys, "server"), Security.load(keys, "client")
    security = Security(
        role="server",
        public_key=loaded.public_key,
        secret_key=loaded.secret_key,
        authorized_clients=frozenset([client.public_key]),
    )
    server = open_server(security)
    assert call(server.address, client) == Echoed(number=1)
    with pytest.raises(UnauthenticatedError, match="client.key is not authorized"):
        call(server.address, stranger(security))


def test_a_client_that_is_not_on_the_list_is_told_so(keys: Path, open_server):
    security = Security.load(keys, "server")
    server = open_server(security)
    with pytest.raises(UnauthenticatedError, match="client.key is not authorized"):
        call(server.address, stranger(security))
    assert call(server.address, Security.load(keys, "client")) == Echoed(number=1)


def test_a_client_without_keys_is_told_so(keys: Path, open_server):
    server = open_server(Security.load(keys, "server"))
    with pytest.raises((UnauthenticatedError, UnavailableError), match="keys"):
        call(server.address, None)


def test_a_client_with_another_server_s_key_is_told_so(keys: Path, tmp_path: Path, open_server):
    server = open_server(Security.load(keys, "server"))
    other = new_keys(tmp_path / "other")
    shutil.copy(keys / "client.key", other / "client.key")
    shutil.copy(keys / "client.key_secret", other / "client.key_secret")
    with pytest.raises((UnauthenticatedError, UnavailableError), match="key"):
        call(server.address, Security.load(other, "client"))


def test_a_client_with_keys_is_told_that_the_server_has_none(keys: Path, open_server):
    server = open_server(None)
    with pytest.raises(
        (UnauthenticatedError, UnavailableError),
        match=r"If the server has no keys, connect without keys \(.*--keys\)",
    ):
        call(server.address, Security.load(keys, "client"))


def test_a_key_that_is_added_or_removed_counts_at_once(keys: Path, open_server):
    security = Security.load(keys, "server")
    server = open_server(security)
    client = stranger(security)
    file = keys / "authorized_clients" / "second.key"
    file.write_text(client.public_key + "\n")
    assert call(server.address, client) == Echoed(number=1)
    file.unlink()
    with pytest.raises(UnauthenticatedError):
        call(server.address, client)


def test_files_that_hold_no_key_let_nobody_in(keys: Path):
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


def test_a_listed_client_and_a_listed_worker_are_told_apart(keys: Path):
    security = Security.load(keys, "server")
    worker = stranger(security)
    (keys / "authorized_workers" / "first.key").write_text(worker.public_key + "\n")
    assert role_seen_by(security, worker) == "worker"
    assert role_seen_by(security, Security.load(keys, "client")) == "client"


def test_a_server_with_the_same_keys_is_a_worker(keys: Path):
    security = Security.load(keys, "server")
    assert role_seen_by(security, security.as_client()) == "worker"


def test_without_keys_nobody_has_a_role():
    assert role_seen_by(None, None) is None


def test_in_one_process_nobody_has_a_role():
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


def test_lists_of_workers_may_be_sets_of_keys_and_a_worker_s_key_wins():
    (server, _), (both, _), (worker, _), (client, _) = (pair() for _ in range(4))
    allowed = AllowList(frozenset([client, both]), server, frozenset([worker, both]))
    found = {key: allowed.role_of(key) for key in (server, both, worker, client, pair()[0], "")}
    assert list(found.values()) == ["worker", "worker", "worker", "client", None, None]


def test_a_directory_of_keys_without_a_list_of_workers_still_serves(keys: Path):
    (keys / "authorized_workers").rmdir()
    security = Security.load(keys, "server")
    assert role_seen_by(security, Security.load(keys, "client")) == "client"


# --- who was refused -------------------------------------------------------------------------


def refusals(*reasons: str) -> float:
    name = "headrace_handshakes_refused_total"
    return sum(
        process_metrics.REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0
        for reason in reasons
    )


@pytest.mark.parametrize("kind", ["unlisted", "without keys", "with another key"])
def test_a_refused_handshake_is_counted_each_time_and_logged_once(
    keys: Path, tmp_path: Path, open_server, caplog, kind: str
):
    security = Security.load(keys, "server")
    server = open_server(security)
    other = Security.load(new_keys(tmp_path / "other"), "server")
    client = {
        "unlisted": stranger(security),
        "without keys": None,
        "with another key": stranger(other),
    }[kind]
    # Who has no keys may be the first to end it, when both ends see that they differ.
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
    # The address is not known of a connection that is over before the server looks.
    assert len(set(texts)) == len(texts) <= 2
    assert all("refused a connection from" in text for text in texts)


def test_who_only_looks_whether_the_port_is_open_is_counted_and_not_logged(
    keys: Path, open_server, caplog
):
    host, port = open_server(Security.load(keys, "server")).address.split(":")
    before = refusals("ended")
    with caplog.at_level(logging.WARNING, "headrace.transport"):
        socket.create_connection((host, int(port)), timeout=5).close()
        until = time.monotonic() + 10
        while refusals("ended") < before + 1 and time.monotonic() < until:
            time.sleep(0.01)
    assert refusals("ended") == before + 1
    assert not caplog.records


def test_keys_that_were_loaded_travel_as_the_place_where_they_lie(tmp_path: Path) -> None:
    keys = Security.load(new_keys(tmp_path / "keys"), "client")
    data = cloudpickle.dumps(keys)
    assert keys.secret_key.encode() not in data
    assert pickle.loads(data) == keys


def test_keys_that_were_not_loaded_do_not_travel(tmp_path: Path) -> None:
    loaded = Security.load(new_keys(tmp_path / "keys"), "client")
    keys = Security(
        role="client",
        public_key=loaded.public_key,
        secret_key=loaded.secret_key,
        server_key=loaded.server_key,
    )
    with pytest.raises(TypeError, match=r"Security\.load\(directory, 'client'\)"):
        cloudpickle.dumps(keys)


def test_no_secret_key_is_in_the_plan_of_a_dataset_that_reads_a_service(tmp_path: Path) -> None:
    keys = Security.load(new_keys(tmp_path / "keys"), "client")
    options = make_read_options(processing_mode="parallel_epochs", service="h:1", security=keys)
    source = RemoteSource(options=options, dataset_id="1", cardinality=5)
    plan = dump_plan(hr.Dataset.from_source(source).map(lambda x: x + 1).plan)
    assert keys.secret_key.encode() not in plan
