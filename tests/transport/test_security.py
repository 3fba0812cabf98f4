from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
import zmq

from headrace.errors import UnauthenticatedError, UnavailableError
from headrace.transport import zeromq
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
    with pytest.raises(ValueError, match="holds 5 characters where a key has 40"):
        Security.load(keys, "client")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "guest"}, "role='guest'"),
        ({"public_key": "x"}, "public_key has 1"),
        ({"server_key": ""}, "needs server_key"),
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
    with pytest.raises(ValueError, match="this end is a server"):
        zeromq.serve(
            TestHandler(), request_type=TestRequest, security=Security.load(keys, "client")
        )
    with pytest.raises(ValueError, match="this end is a client"):
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
    with pytest.raises(UnauthenticatedError, match="does not know the client's"):
        call(server.address, stranger(security))


def test_a_client_that_is_not_on_the_list_is_told_so(keys: Path, open_server):
    security = Security.load(keys, "server")
    server = open_server(security)
    with pytest.raises(UnauthenticatedError, match="does not know the client's"):
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
    with pytest.raises((UnauthenticatedError, UnavailableError), match="key"):
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
