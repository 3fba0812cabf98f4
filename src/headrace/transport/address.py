"""Addresses in the form "host:port" (with brackets around an IPv6 host)."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Callable

from headrace.errors import UnavailableError

__all__ = [
    "find_stable_port",
    "is_local_host",
    "is_loopback",
    "is_wildcard",
    "join",
    "local_address_for",
    "register_lookup",
    "resolve",
    "split",
]


_lookups: dict[str, Callable[[str], str]] = {}


def register_lookup(suffix: str, look_up: Callable[[str], str]) -> None:
    """Register the lookup of hosts whose names end in a suffix.

    Args:
        suffix: Suffix such as ".example".
        look_up: Returns the address "host:port" of a host, at which the port that was given does
            not matter. It is called for each new connection, and may raise an UnavailableError.
    """
    _lookups[suffix] = look_up


def split(address: str) -> tuple[str, int]:
    """Split "host:port" into host and port.

    Raises:
        ValueError: If it is not in that form, or the port is not between 1 and 65535.
    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or "/" in host or (":" in host and host != f"[{bare}]"):
        raise ValueError(
            f'address={address!r} must have the form "host:port", as in '
            '"127.0.0.1:5050"; an IPv6 host is written in brackets, as in "[::1]:5050"'
        )
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"address={address!r}: {port!r} is not a port between 1 and 65535")
    return bare, int(port)


def join(host: str, port: int) -> str:
    """Return an address; the inverse of `split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Return whether `host` is the wildcard address: valid to listen on, not to connect to."""
    try:
        return host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def local_address_for(address: str) -> str:
    """Return the local address of connections to the host of "host:port".

    Nothing is sent: the routing table of the operating system is queried.

    Raises:
        UnavailableError: If the host name cannot be resolved now, or there is no route.
    """
    host, port = split(resolve(*split(address)))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as destination:
            destination.connect((host, port))
            return str(destination.getsockname()[0])
    except OSError as error:
        raise UnavailableError(f"no route to {address}: {error}") from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_host(host: str) -> bool:
    """Return whether a host is this machine: only then can a process here listen on its address."""
    if is_loopback(host):
        return True
    try:
        number = split(resolve(host, 1))[0]
    except UnavailableError:
        return False
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True


def find_stable_port(host: str = "127.0.0.1") -> int:
    """Return a free port of this machine that will be free again after its server has ended.

    It is not in the range from which the system chooses the ports of outgoing connections: a client
    that tries to reach an absent server could get that very port, and be connected to itself.
    Returns 0 if none was found.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Independent of the random state of the program, which may have set a seed.
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    return 0


def resolve(host: str, port: int) -> str:
    """Resolve the host; return the address with a numeric host.

    Raises:
        UnavailableError: If the name cannot be resolved now.
    """
    for suffix, look_up in _lookups.items():
        if host.endswith(suffix):
            host, port = split(look_up(host))
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return join(host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnavailableError(
            f"cannot resolve the host name {host!r} in {join(host, port)}: {error}"
        ) from error
    # IPv4 first: a server that listens on "localhost" listens on 127.0.0.1.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return join(str(found[0][4][0]), port)
