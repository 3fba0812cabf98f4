"""Messages of the transport tests, shared by `peer.py` and the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec


class Word(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Echo(Word):
    """-> Echoed, with the same buffers."""

    number: int = 0


class Make(Word):
    """-> Echoed, with one buffer of `size` bytes that hold `number` modulo 256."""

    number: int
    size: int


class Fail(Word):
    """-> the error of this name."""

    name: str


class Hold(Word):
    """Not answered before a `Release`."""

    number: int = 0


class Release(Word):
    """Answer all held requests, latest first, then this one. -> Echoed."""


class Explode(Word):
    """The handler itself raises."""


class Count(Word):
    """-> Echoed with the number of arenas the server keeps."""


class Echoed(Word):
    number: int = 0


class Stranger(Word):
    """A message that servers do not support."""


TestRequest: TypeAlias = Echo | Make | Fail | Hold | Release | Explode | Count
TestReply: TypeAlias = Echoed


def eventually(seconds: float, condition: Callable[[], bool]) -> bool:
    """Poll until a condition holds; return whether it did in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
