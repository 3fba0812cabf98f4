"""What workers and the place where they meet say to each other."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from headrace.serving.call import Done, Message, Question

__all__ = [
    "Again",
    "ArrayHead",
    "Contribute",
    "Done",
    "Failed",
    "Lack",
    "Lacking",
    "Leave",
    "Listen",
    "MemberReply",
    "MemberRequest",
    "Result",
]


class ArrayHead(msgspec.Struct, array_like=True, frozen=True):
    """An array without its memory, or with it where that is small.

    Attributes:
        dtype: As `element.description` writes it; "O" for bytes and str.
        shape: Length of each axis.
        raw: The memory; None: it is the next of the buffers.
    """

    dtype: Any
    shape: tuple[int, ...]
    raw: bytes | None = None


class Result(Message, frozen=True):
    """What came of a meeting.

    Attributes:
        hall: Which one it was: of which process of the first worker, and of which session.
        flag: What all take away.
        arrays: What all take away, too.
    """

    hall: str
    flag: bool
    arrays: tuple[ArrayHead, ...]


class Again(Message, frozen=True):
    """Somebody's connection was lost; the same contribution is to be sent again after a while."""

    seconds: float


class Failed(Message, frozen=True):
    """There is no result.

    Attributes:
        error: Name of the error's class.
        text: Its words.
        is_for_good: Whether no later meeting can take place, either.
    """

    error: str
    text: str
    is_for_good: bool


class Contribute(Question[Result], frozen=True):
    """Come to a meeting; answered when it has a result. It may be repeated.

    Attributes:
        hall: What the first result said; "" before.
        rank: Who comes.
        incarnation: Tells a strategy of that worker from its next one, and from another process's.
        number: Of the meeting.
        done: All results below this number have arrived.
        attempt: Larger each time that this strategy sends one.
        what: What the meeting is about, in words; all must say the same.
        kind: How contributions are combined.
        flag: What is brought.
        arrays: What is brought, too.
    """

    hall: str
    rank: int
    incarnation: str
    number: int
    done: int
    attempt: int
    what: str
    kind: str
    flag: bool = False
    arrays: tuple[ArrayHead, ...] = ()


class Lacking(Message, frozen=True):
    """Who is missing at a meeting, in words; nobody: it is over."""

    words: tuple[str, ...]


class Lack(Question[Lacking], frozen=True):
    """Ask who is missing.

    Attributes:
        hall: As above.
        rank: Who asks.
        incarnation: As above.
        number: Of the meeting.
        waited: For so many seconds.
        gives_up: Whether it waits no longer, so that the session is over for all.
    """

    hall: str
    rank: int
    incarnation: str
    number: int
    waited: float
    gives_up: bool


class Listen(Question[Failed], frozen=True):
    """Wait for the end of the session; not answered unless it fails."""

    hall: str
    rank: int
    incarnation: str


class Leave(Question[Done], frozen=True):
    """Come to no further meeting."""

    hall: str
    rank: int
    incarnation: str


MemberRequest: TypeAlias = Contribute | Lack | Leave | Listen
MemberReply: TypeAlias = Result | Again | Failed | Lacking | Done
