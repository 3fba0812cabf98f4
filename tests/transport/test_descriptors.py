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
    # Twice 512 KiB, for the kernel's own notes are counted; less where it gives nobody so much.
    with socket.socket() as fresh:
        fresh.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 << 10)
        return room_to_send(fresh)


def test_what_waits_in_a_connection_within_this_host_fits_into_a_cache():
    for connection in connected_from("127.0.0.1"):
        limit_receive_buffer(connection)
        assert room_to_send(connection) == room_in_a_cache()


def test_the_kernel_decides_how_much_waits_on_the_way_to_another_address():
    for connection in connected_from("127.0.0.2"):
        before = room_to_send(connection)
        limit_receive_buffer(connection)
        assert room_to_send(connection) == before


def test_a_connection_that_has_ended_is_left_as_it_is(ends):
    one, _ = ends
    one.close()
    limit_receive_buffer(one)


def test_a_number_that_was_given_to_another_file_is_not_touched(ends):
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
        pass  # The end that was closed above; what matters is that ours is still there.
    finally:
        os.fstat(replaced)
        os.close(replaced)


def test_a_closed_number_is_nothing():
    number = os.open("/dev/null", os.O_RDONLY)
    os.close(number)
    assert Descriptor.of(number) is None


def test_a_connection_that_is_shut_down_is_closed_for_both(ends):
    one, other = ends
    assert not closed_by_peer(other)
    Descriptor.of(one.fileno()).shut_down()
    assert closed_by_peer(other)
    assert other.recv(1) == b""


def test_a_connection_is_shut_down_where_no_number_is_left_for_a_second_handle(
    ends, monkeypatch: pytest.MonkeyPatch
):
    def refuse(number: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    one, other = ends
    monkeypatch.setattr(os, "dup", refuse)
    Descriptor.of(one.fileno()).shut_down()
    monkeypatch.undo()
    other.settimeout(5)
    assert other.recv(1) == b""
    os.fstat(one.fileno())


def test_a_connection_with_unread_bytes_is_seen_to_be_closed(ends):
    one, other = ends
    one.send(b"unread")
    assert not closed_by_peer(other)
    one.close()
    assert closed_by_peer(other)


def test_a_high_number_is_a_warning_once(monkeypatch, caplog):
    monkeypatch.setattr(descriptors, "_warned", False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    with caplog.at_level(logging.WARNING):
        warn_near_file_limit(899)
        assert not caplog.records
        for _ in range(3):
            warn_near_file_limit(900)
    (record,) = caplog.records
    assert "900 of at most 1000 files" in record.getMessage()


def test_no_limit_is_no_reason_to_warn(monkeypatch, caplog):
    monkeypatch.setattr(descriptors, "_warned", False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with caplog.at_level(logging.WARNING):
        warn_near_file_limit(10**6)
    assert not caplog.records
