"""The JAX coordinator process, which runs as long as one of its users does."""

from __future__ import annotations

import importlib.util
import socket
import time

import pytest

from headrace.frameworks import jax_coordinator

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="JAX is not installed"),
]


def is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_coordinator_ends_when_all_connections_are_closed():
    address, keep_alive_address = jax_coordinator.start_coordinator(2, "127.0.0.1")
    host, _, port = keep_alive_address.rpartition(":")
    users = [socket.create_connection((host, int(port))) for _ in range(2)]
    users.pop().close()
    assert is_reachable(address)
    users.pop().close()
    deadline = time.monotonic() + 30.0
    while is_reachable(address):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_start_reports_the_cause():
    with pytest.raises(RuntimeError, match=r"(?s)did not start: .*Cannot assign requested"):
        jax_coordinator.start_coordinator(2, "192.0.2.1")
