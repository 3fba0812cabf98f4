"""Addresses, written "host:port" (an IPv6 host in brackets)."""

from __future__ import annotations

import ipaddress
import random
import socket

from headrace.errors import UnavailableError

__all__ = [
    "find_stable_port",
    "is_local_host",
    "is_loopback",
    "is_wildcard",
    "join",
    "local_address_for",
    "resolve",
    "split",
]


def split(address: str) -> tuple[str, int]:
    """Take "host:port" apart.

    Raises:
        ValueError: It is not written so, or the port is not between 1 and 65535.
    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or "/" in host or (":" in host and host != f"[{bare}]"):
        raise ValueError(
            f'address={address!r} is not written "host:port", as in "127.0.0.1:5050"; an IPv6 host '
            'stands in brackets, as in "[::1]:5050"'
        )
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"address={address!r}: {port!r} is not a port between 1 and 65535")
    return bare, int(port)


def join(host: str, port: int) -> str:
    """Write an address; the opposite of `split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every address of its machine: one may listen there, not call it."""
    try:
        return host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def local_address_for(address: str) -> str:
    """Return the number of this machine by which the host of "host:port" is reached.

    Nothing is sent: the system's routes are asked.

    Raises:
        UnavailableError: The host's name is not known now, or no way leads there.
    """
    host, port = split(resolve(*split(address)))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((host, port))
            return str(asked.getsockname()[0])
    except OSError as error:
        raise UnavailableError(f"no way leads to {address}: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_host(host: str) -> bool:
    """Whether a host is this machine: only then can anybody listen at its address here."""
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
    """Return a port of this machine that is free, and will be again after a server has left it.

    Not one of those that the system gives to whoever connects: a client that tries to reach a
    server while it is away may be given the very port, and be connected with itself. 0 if none was
    found.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not from the random state of the program, which may have set a seed.
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
    """Look the host up; return the address with the host's number.

    Raises:
        UnavailableError: The name is not known now.
    """
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
            f"the host name {host!r} of {join(host, port)} cannot be resolved: {error}"
        ) from error
    # IPv4 first: a server that listens at "localhost" listens at 127.0.0.1.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return join(str(found[0][4][0]), port)
