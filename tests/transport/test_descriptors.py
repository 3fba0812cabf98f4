from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from headrace.transport import descriptors
from headrace.transport.descriptors import (
    Descriptor,
    closed_by_peer,
    limit_receive_buffer,
    warn_near_file_limit,
)


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def connected_from(host: str) -> Iterator[socket.socket]:
    """Accept a connection from an address of this machine, at 127.0.0.1."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=(host, 0)),
    ):
        accepted, _ = server.accept()
        with accepted:
            yield accepted


def room_to_send(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def room_in_a_cache() -> int:
    # Twice 512 KiB, since the kernel counts its bookkeeping; less if its limit is lower.
    with socket.socket() as fresh:
        fresh.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 << 10)
        return room_to_send(fresh)


def test_receive_buffer_of_a_local_connection_fits_into_a_cache():
    for connection in connected_from("127.0.0.1"):
        limit_receive_buffer(connection)
        assert room_to_send(connection) == room_in_a_cache()


def test_receive_buffer_of_a_remote_connection_is_unchanged():
    for connection in connected_from("127.0.0.2"):
        before = room_to_send(connection)
        limit_receive_buffer(connection)
        assert room_to_send(connection) == before


def test_ended_connection_is_left_unchanged(ends):
    one, _ = ends
    one.close()
    limit_receive_buffer(one)


def test_reused_descriptor_number_is_not_touched(ends):
    one, other = ends
    found = Descriptor.of(one.fileno())
    number = one.detach()
    os.close(number)
    replaced = os.dup(other.fileno())
    try:
        assert replaced == number
        assert found.duplicate() is None
        found.shut_down()
        found.close()
        other.send(b"still open")
    except BrokenPipeError:
        pass  # The end that was closed above; the other end must still be open.
    finally:
        os.fstat(replaced)
        os.close(replaced)


def test_closed_descriptor_number_gives_none():
    number = os.open("/dev/null", os.O_RDONLY)
    os.close(number)
    assert Descriptor.of(number) is None


def test_shutdown_closes_a_connection_for_both_ends(ends):
    one, other = ends
    assert not closed_by_peer(other)
    Descriptor.of(one.fileno()).shut_down()
    assert closed_by_peer(other)
    assert other.recv(1) == b""


def test_connection_is_shut_down_without_a_free_descriptor(ends, monkeypatch: pytest.MonkeyPatch):
    def refuse(number: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    one, other = ends
    monkeypatch.setattr(os, "dup", refuse)
    Descriptor.of(one.fileno()).shut_down()
    monkeypatch.undo()
    other.settimeout(5)
    assert other.recv(1) == b""
    os.fstat(one.fileno())


def test_closed_connection_with_unread_bytes_is_detected(ends):
    one, other = ends
    one.send(b"unread")
    assert not closed_by_peer(other)
    one.close()
    assert closed_by_peer(other)


def test_high_descriptor_number_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(descriptors, "_warned", False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    with caplog.at_level(logging.WARNING):
        warn_near_file_limit(899)
        assert not caplog.records
        for _ in range(3):
            warn_near_file_limit(900)
    (record,) = caplog.records
    assert "900 of at most 1000 files" in record.getMessage()


def test_unlimited_descriptors_do_not_warn(monkeypatch, caplog):
    monkeypatch.setattr(descriptors, "_warned", False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with caplog.at_level(logging.WARNING):
        warn_near_file_limit(10**6)
    assert not caplog.records
