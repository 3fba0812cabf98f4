"""What workers and the place where they meet say to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace import errors
from headrace.element.description import decode_dtype, encode_dtype
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
    UnavailableError,
)
from headrace.serving.call import Done, Message, Question
from headrace.transport.channel import Buffer

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
    "decode",
    "encode",
    "error_of",
    "failed",
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


# --- Arrays as heads and buffers: what travels between workers ------------------------------------
#
# Rule 1. Nothing is pickled or unpickled. Arrays of bytes and str travel as a list of them.
# Rule 2. Small arrays travel in their heads, since a frame costs more than a copy of them. Others
#         are sent from where they lie.

_SMALL_BYTES = 4 << 10
_OBJECTS = "O"


def encode(arrays: Sequence[NDArray[Any]]) -> tuple[tuple[ArrayHead, ...], list[Buffer]]:
    """Return arrays as heads, and the buffers of those that are large: they stay the giver's.

    Raises:
        InvalidArgumentError: An array holds objects other than bytes and str.
    """
    heads: list[ArrayHead] = []
    buffers: list[Buffer] = []
    for array in arrays:
        dtype, shape = array.dtype, array.shape
        if dtype.hasobject:
            heads.append(ArrayHead(_OBJECTS, shape, _encode_objects(array)))
        elif array.nbytes <= _SMALL_BYTES:
            heads.append(ArrayHead(encode_dtype(dtype), shape, array.tobytes()))
        else:
            heads.append(ArrayHead(encode_dtype(dtype), shape))
            buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly())
    return tuple(heads), buffers


def decode(heads: Sequence[ArrayHead], buffers: Sequence[Buffer]) -> list[NDArray[Any]]:
    """Return the arrays that `encode` wrote, views of the buffers where there are some.

    Raises:
        ValueError: Heads and buffers do not fit together.
    """
    rest = iter(buffers)
    return [_array(head, rest) for head in heads]


def _array(head: ArrayHead, rest: Iterator[Buffer]) -> NDArray[Any]:
    if head.dtype == _OBJECTS:
        items = msgspec.msgpack.decode(head.raw or b"", type=list[Any])
        if not all(isinstance(each, bytes | str) for each in items):
            raise ValueError("an array of objects holds others than bytes and str")
        array = np.empty(len(items), object)
        array[:] = items
        return array.reshape(head.shape)
    dtype = decode_dtype(head.dtype)
    if head.raw is not None:
        return np.frombuffer(bytearray(head.raw), np.uint8).view(dtype).reshape(head.shape)
    buffer = next(rest, None)
    if buffer is None:
        raise ValueError("an array was announced whose memory did not come")
    return np.frombuffer(buffer, np.uint8).view(dtype).reshape(head.shape)


def _encode_objects(array: NDArray[Any]) -> bytes:
    items = array.reshape(-1).tolist()
    strange = next((each for each in items if not isinstance(each, bytes | str)), None)
    if strange is not None:
        raise InvalidArgumentError(
            f"an array of objects such as {strange!r:.80} cannot be sent to other workers; make "
            "numbers, bytes or str of them"
        )
    plain = [bytes(each) if isinstance(each, bytes) else str(each) for each in items]
    return msgspec.msgpack.encode(plain)


# --- Errors as messages: what a worker raises is what came about at the place ---------------------

_FOR_GOOD = (UnavailableError.__name__, FailedPreconditionError.__name__)
"""After these no meeting of the session takes place."""


def failed(error: HeadraceError) -> Failed:
    """Return the message that says an error."""
    name = type(error).__name__
    return Failed(error=name, text=str(error), is_for_good=name in _FOR_GOOD)


def error_of(message: Failed) -> HeadraceError:
    """Return the error that a message says."""
    error: HeadraceError = getattr(errors, message.error)(message.text)
    return error
