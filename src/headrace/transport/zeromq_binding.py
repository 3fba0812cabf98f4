"""Binding of a ROUTER socket to its port."""

from __future__ import annotations

import errno
import time

import zmq

from headrace.open_files import explain_open_error
from headrace.transport import address as addresses

__all__ = ["bind"]

_REBIND_SECONDS = 1.0
_FOREIGN_ADDRESS_ERRORS = (errno.EADDRNOTAVAIL, errno.ENODEV)


def bind(router: zmq.Socket[bytes], host: str, port: int) -> str:
    """Listen on `host` and `port` (0 chooses a free one); return the address.

    Raises:
        OSError: If the port is in use, or the host is not one of this machine.
    """
    ip_address = "127.0.0.1" if host == "localhost" else host
    endpoint = (
        f"tcp://{addresses.join(ip_address, port)}"
        if port
        else f"tcp://{_wildcard_for(ip_address)}"
    )
    try:
        _bind_with_retry(router, endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                errno.EADDRINUSE,
                f"port {port} on {host} is in use by another server; choose another port, "
                "or 0 for a free one",
            ) from error
        message = f"cannot listen at {addresses.join(host, port)}: {explain_open_error(error)}"
        if error.errno in _FOREIGN_ADDRESS_ERRORS:
            message += (
                f". {host} is not an address or host name of this machine: use 127.0.0.1, "
                "another address of this machine, or 0.0.0.0 for all of them"
            )
        raise OSError(error.errno, message) from error
    bound = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return addresses.join(host, int(bound.rpartition(":")[2]))


def _bind_with_retry(router: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind; retry for up to 1 s if the port is in use.

    ZeroMQ closes sockets with a delay, on its own thread, so a former owner may still hold the
    port.
    """
    deadline = time.monotonic() + _REBIND_SECONDS
    while True:
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(0.02)


def _wildcard_for(host: str) -> str:
    return addresses.join(host, 0).removesuffix("0") + "*"
