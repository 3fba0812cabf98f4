from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.errors import UnavailableError
from headrace.transport import address as addresses


@pytest.mark.parametrize(
    ("address", "parts"),
    [("host:1", ("host", 1)), ("127.0.0.1:65535", ("127.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_address_is_split_into_host_and_port(address, parts):
    assert addresses.split(address) == parts
    assert addresses.join(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", ":5050", "host:", "host:0", "host:65536", "host:-1", "tcp://host:1"),
        *("host:5050:1", "::1:80", "[]:80", "[::1:80", "::1]:80"),
    ],
)
def test_invalid_address_is_an_error_that_names_it(address):
    with pytest.raises(ValueError, match="address="):
        addresses.split(address)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_addresses_are_recognized(host, loopback):
    assert addresses.is_loopback(host) is loopback


def test_ip_address_resolves_to_itself():
    assert addresses.resolve("127.0.0.1", 5) == "127.0.0.1:5"
    assert addresses.resolve("::1", 5) == "[::1]:5"


def test_localhost_resolves_to_ipv4():
    assert addresses.resolve("localhost", 5) == "127.0.0.1:5"


def test_unknown_host_name_is_unavailable():
    with pytest.raises(UnavailableError, match="cannot resolve the host name"):
        addresses.resolve("no-such-host.invalid", 5)


def test_only_addresses_of_this_machine_are_local() -> None:
    assert addresses.is_local_host("127.0.0.1")
    assert addresses.is_local_host("localhost")
    # Reserved for documentation: no machine has this address.
    assert not addresses.is_local_host("192.0.2.1")
    assert not addresses.is_local_host("no-such-host.invalid")


def test_stable_port_is_free_and_outside_the_ephemeral_range():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        port = addresses.find_stable_port(host)
        assert 1024 < port < low
        with socket.socket(family) as server:
            server.bind((host, port))
