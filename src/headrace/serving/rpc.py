"""Typed requests: each names the type of its reply, so that one `call` serves all of them.

    class GetSplit(TypedRequest[GetSplitReply], frozen=True):
        ...
    reply = stub.call(GetSplit(...))         # returns a GetSplitReply, or raises the reason

Messages are sent as tagged `msgspec` structs; the type of the reply is not sent.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, Self, TypeVar, get_args, get_origin

import msgspec

from headrace.transport.channel import Channel

__all__ = ["Done", "Message", "Ping", "Stub", "TypedRequest", "reply_type"]

A_co = TypeVar("A_co", covariant=True)
A = TypeVar("A")

_DEFAULT_TIMEOUT = 5.0


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message; its class name is sent as its tag."""


class TypedRequest(Message, Generic[A_co], frozen=True):
    """Request that is answered with a message of one type, or an error."""


class Done(Message, frozen=True):
    """Empty reply to a request that was executed."""


class Ping(TypedRequest[Done], frozen=True):
    """Request without effect, to check that a server answers."""


@cache
def reply_type(request_type: type[TypedRequest[A]]) -> type[A]:
    """Return the type of the reply to a request type.

    Raises:
        TypeError: If the class does not name one.
    """
    bases: tuple[Any, ...] = getattr(request_type, "__orig_bases__", ())
    for base in bases:
        if get_origin(base) is TypedRequest:
            (found,) = get_args(base)
            if isinstance(found, type):
                return found
    raise TypeError(
        f"{request_type.__name__} declares no reply type: derive it from TypedRequest[...]"
    )


class Stub:
    """Connection to a server, for one thread.

    A call waits at most `timeout` seconds and is not repeated: the caller knows whether it may
    be repeated, and how long to wait.

    Args:
        channel: Channel to the server; closed by `close`.
        peer: Kind of server, for errors: "dispatcher".
    """

    def __init__(self, channel: Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer
        self._is_released = False

    def call(self, request: TypedRequest[A], *, timeout: float = _DEFAULT_TIMEOUT) -> A:
        """Send a request and return the reply.

        Raises:
            DeadlineExceededError: If there is no reply within `timeout` seconds.
            UnavailableError: If the server is unreachable or lost.
            HeadraceError: The error with which the server replied.
            TypeError: If the reply has another type.
        """
        expected: type[A] = reply_type(type(request))
        reply, _ = self._channel.call(request, timeout=timeout)
        if not isinstance(reply, expected):
            raise TypeError(
                f"the {self._peer} at {self._channel.address} replied to "
                f"{type(request).__name__} with {type(reply).__name__}, expected "
                f"{expected.__name__}; is it another version of Headrace?"
            )
        return reply

    def release(self) -> Channel:
        """Return the channel and transfer its ownership to the caller."""
        self._is_released = True
        return self._channel

    def close(self) -> None:
        """Close the connection, unless it was released. Idempotent."""
        if not self._is_released:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
