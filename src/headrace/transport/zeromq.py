"""Transport between processes, on one or several hosts: ZeroMQ sockets.

    Channel (DEALER)  --- request ---->  Server (ROUTER, one thread)  -> handler
            <-------- reply -----------  <- Request.reply, from any thread

Between processes on one host, large buffers are sent through `shared_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.transport import address as addresses
from headrace.transport.channel import Channel, Handler, TransportServer
from headrace.transport.limits import MAX_REQUEST_BYTES, ServerLimits
from headrace.transport.security import Security
from headrace.transport.shared_memory import SharedMemoryOptions
from headrace.transport.zeromq_channel import ZeroMQChannel
from headrace.transport.zeromq_server import ZeroMQServer

__all__ = ["check_server", "connect", "serve"]


def serve(
    handler: Handler,
    *,
    request_type: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    security: Security | None = None,
    shared_memory: SharedMemoryOptions | None = None,
    limits: ServerLimits | None = None,
    on_disconnect: Callable[[str], None] | None = None,
) -> TransportServer:
    """Listen on `host` and `port`, and answer requests with `handler`.

    Args:
        handler: See `channel.Handler`.
        request_type: Message types that it accepts: a tagged `msgspec.Struct` class or a union.
        host: Host name or address of this machine; "0.0.0.0" for all of its interfaces.
        port: Port; 0 chooses a free one.
        security: Keys of this server, and its authorized clients; required if `host` can be reached
            from another machine.
        shared_memory: Limits of shared memory; None for the defaults.
        limits: Limits of what is accepted from peers and buffered for them; None for the defaults.
        on_disconnect: Called with a `Request.peer` whose connection has ended. Runs on the server's
            thread and must not block. A channel that reconnects is the same peer.

    Raises:
        ValueError: If the host is not loopback and `security` is None, or the keys are a client's.
        OSError: If the port is in use, or the host is not one of this machine.
    """
    check_server(host, port, security)
    return ZeroMQServer(
        handler,
        request_type=request_type,
        host=host,
        port=port,
        security=security,
        shared_memory=shared_memory or SharedMemoryOptions(),
        limits=limits or ServerLimits(),
        on_disconnect=on_disconnect,
    )


def check_server(host: str, port: int, security: Security | None) -> None:
    """Raise the ValueError that `serve` raises for these arguments, if any."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port} must be between 0 and 65535")
    if security is None and not addresses.is_loopback(host):
        raise ValueError(
            f"host={host!r} requires security=..., since any client that can connect "
            "can run code in this process; create keys with `headrace keys new DIR`"
        )
    if security is not None:
        security.check_role("server")


def connect(
    address: str,
    *,
    reply_type: Any,
    security: Security | None = None,
    shared_memory: bool | None = None,
    keepalive_timeout: float = 12.0,
    request_bytes: int = MAX_REQUEST_BYTES,
) -> Channel:
    """Open a channel to the server at `address`, which need not be running yet.

    Args:
        address: "host:port".
        reply_type: Message types of replies: a tagged struct class or a union.
        security: Keys of this client, and the server's public key, if the server requires them.
        shared_memory: False sends everything over the socket; True and None use shared memory if
            both ends are processes on one host that may open each other's memory.
        keepalive_timeout: Seconds for which the peer may be silent (stopped or unreachable) before
            the connection is dropped; this may take a third longer, but at most 4 s. Requests sent
            before a shorter silence are answered after it. The end of the peer's process is
            detected at once.
        request_bytes: Size limit of requests in `send`. The server's own limit is in its
            `ServerLimits`; a larger request ends the connection.

    Raises:
        ValueError: If the address is not "host:port", or the keys are a server's.
    """
    addresses.split(address)
    if not keepalive_timeout > 0:
        raise ValueError(f"keepalive_timeout={keepalive_timeout} must be greater than 0 seconds")
    if request_bytes < 1:
        raise ValueError(f"request_bytes={request_bytes} must be at least 1")
    if security is not None:
        security.check_role("client")
    return ZeroMQChannel(
        address,
        reply_type=reply_type,
        security=security,
        shared_memory=shared_memory is not False,
        keepalive_timeout=keepalive_timeout,
        request_bytes=request_bytes,
    )
