"""A connection to a Headrace server without ZeroMQ: frames on a socket, and no thread.

In benchmarks of a server's capacity the load generator must use as little processor time as
possible. This implements ZMTP 3.0 as a DEALER without keys: https://rfc.zeromq.org/spec/23.
"""

from __future__ import annotations

import secrets
import socket
import struct

__all__ = ["RawConnection"]

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_COMMAND, _LONG, _MORE = 4, 2, 1
_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 16


class RawConnection:
    """Client connection for messages of one frame.

    Args:
        address: "host:port" of the server.
        timeout: Seconds to wait for a reply.
    """

    def __init__(self, address: str, timeout: float) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._socket.sendall(_GREETING)
        while len(self._received) < len(_GREETING):
            self._receive()
        self._received = self._received[len(_GREETING) :]
        identity = b"H" + secrets.token_bytes(16) + bytes(4)
        ready = (
            b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
        )
        self._socket.sendall(_frame(_COMMAND, ready))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._socket.sendall(_frame(0, message))

    def messages(self) -> list[bytes]:
        """Wait for data; return the messages received."""
        self._receive()
        found = []
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _MORE:
                raise RuntimeError("unexpected reply with buffers from the server")
            if not flags & _COMMAND:
                found.append(body)
            elif body.startswith(
                b"\x04PING"
            ):  # the PONG returns the context of the PING, after two bytes
                self._socket.sendall(_frame(_COMMAND, b"\x04PONG" + body[7:]))
        return found

    def _receive(self) -> None:
        piece = self._socket.recv(_CHUNK)
        if not piece:
            raise RuntimeError("the server closed the connection")
        self._received += piece

    def _next_frame(self) -> tuple[int, bytes] | None:
        data = self._received
        if len(data) < 2:
            return None
        start = 9 if data[0] & _LONG else 2
        if len(data) < start:
            return None
        size = _LENGTH.unpack_from(data, 1)[0] if data[0] & _LONG else data[1]
        if len(data) < start + size:
            return None
        self._received = data[start + size :]
        return data[0], data[start : start + size]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + _LENGTH.pack(len(body)) + body
