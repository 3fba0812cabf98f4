"""Calls: a request names the type of its reply, so that one `call` is enough for all of them.

    class GetSplit(Question[GetSplitReply], frozen=True):
        ...
    granted = stub.call(GetSplit(...))       # a GetSplitReply, or an error that says why not

Messages travel as tagged `msgspec` structs; what a question expects does not travel.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, Self, TypeVar, get_args, get_origin

import msgspec

from headrace.transport.channel import Channel

__all__ = ["Done", "Message", "Ping", "Question", "Stub", "reply_type"]

A_co = TypeVar("A_co", covariant=True)
A = TypeVar("A")

_SECONDS = 5.0


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is sent; its class name travels as its tag."""


class Question(Message, Generic[A_co], frozen=True):
    """A request that is answered with a message of one type, or an error."""


class Done(Message, frozen=True):
    """The request was carried out; there is nothing else to say."""


class Ping(Question[Done], frozen=True):
    """Are you there?"""


@cache
def reply_type(question: type[Question[A]]) -> type[A]:
    """Return the type of what answers a kind of question.

    Raises:
        TypeError: The class names none.
    """
    bases: tuple[Any, ...] = getattr(question, "__orig_bases__", ())
    for base in bases:
        if get_origin(base) is Question:
            (found,) = get_args(base)
            if isinstance(found, type):
                return found
    raise TypeError(f"{question.__name__} names no reply: derive it from Question[...]")


class Stub:
    """One connection to a server, for one thread.

    A call waits at most `timeout` seconds and is not repeated: whoever calls knows whether it may
    be, and how patient to be.

    Args:
        channel: Leads to the server; closed by `close`.
        whom: Who that is, for errors: "dispatcher".
    """

    def __init__(self, channel: Channel, whom: str) -> None:
        self._channel = channel
        self._whom = whom
        self._is_released = False

    def call(self, question: Question[A], *, timeout: float = _SECONDS) -> A:
        """Ask, and return the answer.

        Raises:
            DeadlineExceededError: No answer in `timeout` seconds.
            UnavailableError: The server cannot be reached, or is gone.
            HeadraceError: What the server answered with.
            TypeError: It answered with a message of another type.
        """
        expected: type[A] = reply_type(type(question))
        reply, _ = self._channel.call(question, timeout=timeout)
        if not isinstance(reply, expected):
            raise TypeError(
                f"the {self._whom} at {self._channel.address} answered "
                f"{type(question).__name__} with {type(reply).__name__} where "
                f"{expected.__name__} is due; is it of another version of Headrace?"
            )
        return reply

    def release(self) -> Channel:
        """Return the channel, which belongs to the caller from now on."""
        self._is_released = True
        return self._channel

    def close(self) -> None:
        """Close the connection, unless it was released. May be called twice."""
        if not self._is_released:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
