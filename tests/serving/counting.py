"""A server core that only counts, with its journal format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.errors import NotFoundError
from headrace.serving.blobs import BlobPart, BlobPosition
from headrace.serving.journal import JournalFormat
from headrace.transport.channel import Request


class Added(msgspec.Struct, frozen=True, tag=True):
    by: int


class Count(msgspec.Struct):
    total: int = 0
    added: int = 0


def apply(state: Count, event: Added) -> None:
    state.added += 1
    state.total += event.by
    if event.by == 666:
        raise KeyError("no such number")


FORMAT = JournalFormat(
    number=7,
    file_name="count.sqlite",
    owner="counter",
    fresh_start="begin to count again",
    decode_events=msgspec.msgpack.Decoder(list[Added]).decode,
    decode_state=msgspec.msgpack.Decoder(Count).decode,
    initial_state=Count,
    apply=apply,
)


class Add(msgspec.Struct, frozen=True, tag=True):
    by: int


class Put(msgspec.Struct, frozen=True, tag=True):
    key: bytes
    part: bytes


class Get(msgspec.Struct, frozen=True, tag=True):
    key: bytes


class Total(msgspec.Struct, frozen=True, tag=True):
    total: int
    part: bytes = b""


NOTHING = Total(0)


@dataclass(frozen=True)
class Decision:
    events: tuple[Added, ...] = ()
    reply: Total = NOTHING
    blobs: tuple[BlobPart, ...] = ()
    place: BlobPosition | None = None

    def make_reply(self, read_blob: Callable[[BlobPosition], bytes]) -> Total:
        if self.place is None:
            return self.reply
        return msgspec.structs.replace(self.reply, part=read_blob(self.place))


@dataclass
class Counter:
    """Adds requested numbers, and 1000 at each tick at least 10 s after the previous one."""

    state: Count
    since: float
    blobs: set[bytes] = field(default_factory=set)

    def decide(self, request: Any, now: float) -> Decision:
        match request:
            case Add(by=0):
                raise NotFoundError("nothing to add")
            case Add(by=-1):
                raise KeyError("a bug")
            case Add(by=by):
                return Decision((Added(by),), Total(self.state.total + by))
            case Put(key=key, part=part):
                self.blobs.add(key)
                return Decision(blobs=(BlobPart(key, 0, part),))
            case Get(key=key):
                return Decision(place=BlobPosition(key, 0))
        raise AssertionError(request)

    def apply(self, decision: Decision, now: float) -> Sequence[Added]:
        for event in decision.events:
            apply(self.state, event)
        return decision.events

    def tick(self, now: float) -> Sequence[Added]:
        if now - self.since < 10:
            return []
        self.since = now
        self.blobs.clear()
        return self.apply(Decision((Added(1000),)), now)


def begin(state: Count, now: float) -> tuple[Counter, Sequence[Added]]:
    """Begin at 100."""
    events: Collection[Added] = [Added(100)] if not state.added else []
    for event in events:
        apply(state, event)
    return Counter(state, now), list(events)


class RecordedRequest(Request):
    """A request that records its reply."""

    def __init__(self, message: msgspec.Struct) -> None:
        self.message, self.buffers, self.peer = message, (), "test"
        self.answer: Any = None

    def reply(self, message: msgspec.Struct, buffers: object = ()) -> None:
        assert self.answer is None
        self.answer = message

    def fail(self, error: Exception) -> None:
        assert self.answer is None
        self.answer = error
