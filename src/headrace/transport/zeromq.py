"""The carrier for peers in two processes, on one host or on two: ZeroMQ sockets.

    Channel (DEALER)  --- request ---->  Server (ROUTER, one thread)  -> handler
            <-------- answer ----------  <- Request.reply, from any thread

Between two processes of one host, large buffers of answers take the way through `shared_memory`.
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

__all__ = ["connect", "serve"]


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
    """Listen at `host` and `port` and answer requests with `handler`.

    Args:
        handler: See `channel.Handler`.
        request_type: The messages it understands: a tagged `msgspec.Struct` class or a union.
        host: A name or number of this machine; "0.0.0.0" for all of its interfaces.
        port: 0 takes one that is free.
        security: This server's keys and the clients that it lets in; required where `host` can be
            reached from another machine.
        shared_memory: How much memory channels on this host may be given; None for the defaults.
        limits: How much is taken from peers and kept for them; None for the defaults.
        on_disconnect: Called on the server's thread, which it must not block, with a `Request.peer`
            whose connection has ended. A channel that connects again is the same peer.

    Raises:
        ValueError: The host is not loopback and `security` is None, or the keys are a client's.
        OSError: The port is in use, or the host is not one of this machine.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port} must be between 0 and 65535")
    if security is None and not addresses.is_loopback(host):
        raise ValueError(
            f"host={host!r} needs security=...: anyone who reaches this port can run code here; "
            "create keys with `headrace keys new DIR`"
        )
    if security is not None:
        security.check_role("server")
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


def connect(
    address: str,
    *,
    reply_type: Any,
    security: Security | None = None,
    shared_memory: bool | None = None,
    keepalive_timeout: float = 12.0,
    request_bytes: int = MAX_REQUEST_BYTES,
) -> Channel:
    """Open a channel to the server at `address`, which need not be there yet.

    Args:
        address: "host:port".
        reply_type: The messages that answers consist of: a tagged struct class or a union.
        security: This client's keys and the server's public key, if the server wants them.
        shared_memory: False keeps everything on the socket; True and None use shared memory where
            both ends are processes of one host that may open each other's memory.
        keepalive_timeout: Seconds for which the peer may be silent (stopped, unreachable) before
            the connection is given up; it may take a third longer, four seconds at most. What was
            asked before a shorter silence is answered after it. A peer whose process has ended is
            noticed at once.
        request_bytes: The largest request that `send` accepts. What the server takes is for its
            `ServerLimits` to say; beyond that it ends the connection.

    Raises:
        ValueError: The address is not "host:port", or the keys are a server's.
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
