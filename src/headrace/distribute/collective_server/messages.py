"""Messages between workers and the collective server."""

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
from headrace.serving.rpc import Done, Message, TypedRequest
from headrace.transport.channel import Buffer

__all__ = [
    "ArrayHead",
    "AwaitSessionFailure",
    "CollectiveFailed",
    "CollectiveReply",
    "CollectiveRequest",
    "CollectiveResult",
    "Contribute",
    "Done",
    "GetMissingWorkers",
    "LeaveSession",
    "MissingWorkers",
    "RetryContribution",
    "decode_arrays",
    "decode_error",
    "encode_arrays",
    "encode_error",
]


class ArrayHead(msgspec.Struct, array_like=True, frozen=True):
    """Header of an array; small arrays include their data.

    Attributes:
        dtype: Dtype as written by `element.description`; "O" for bytes and str.
        shape: Length of each axis.
        raw: Data of the array; None if it is the next buffer.
    """

    dtype: Any
    shape: tuple[int, ...]
    raw: bytes | None = None


class CollectiveResult(Message, frozen=True):
    """Result of a collective.

    Attributes:
        session_id: Id of the session and of the first worker's process.
        flag: Resulting flag.
        arrays: Resulting arrays.
    """

    session_id: str
    flag: bool
    arrays: tuple[ArrayHead, ...]


class RetryContribution(Message, frozen=True):
    """Request to contribute again after a delay, because a worker's connection was lost."""

    seconds: float


class CollectiveFailed(Message, frozen=True):
    """Error of a collective.

    Attributes:
        error: Class name of the error.
        text: Message of the error.
        is_permanent: Whether the session has failed, so that no later collective can complete.
    """

    error: str
    text: str
    is_permanent: bool


class Contribute(TypedRequest[CollectiveResult], frozen=True):
    """Contribute to a collective; answered when it has a result. May be repeated.

    Attributes:
        session_id: Session id from the first result; "" before.
        rank: Rank of the worker.
        process_id: Identifies one strategy of one process of that worker.
        number: Number of the collective.
        acknowledged: Number below which all results have arrived.
        attempt: Counter that increases with each contribution that the strategy sends.
        description: Description of the collective; must be the same on all workers.
        kind: How contributions are combined.
        flag: Contributed flag.
        arrays: Contributed arrays.
    """

    session_id: str
    rank: int
    process_id: str
    number: int
    acknowledged: int
    attempt: int
    description: str
    kind: str
    flag: bool = False
    arrays: tuple[ArrayHead, ...] = ()


class MissingWorkers(Message, frozen=True):
    """Descriptions of the workers missing in a collective; empty if it is complete."""

    descriptions: tuple[str, ...]


class GetMissingWorkers(TypedRequest[MissingWorkers], frozen=True):
    """Request the missing workers of a collective.

    Attributes:
        session_id: As in `Contribute`.
        rank: Rank of the worker that asks.
        process_id: As in `Contribute`.
        number: Number of the collective.
        waited: Seconds waited so far.
        ends_session: Whether the worker gives up, which fails the session for all.
    """

    session_id: str
    rank: int
    process_id: str
    number: int
    waited: float
    ends_session: bool


class AwaitSessionFailure(TypedRequest[CollectiveFailed], frozen=True):
    """Wait for the failure of the session; unanswered unless it fails."""

    session_id: str
    rank: int
    process_id: str


class LeaveSession(TypedRequest[Done], frozen=True):
    """Leave the session: take part in no further collective."""

    session_id: str
    rank: int
    process_id: str


CollectiveRequest: TypeAlias = Contribute | GetMissingWorkers | LeaveSession | AwaitSessionFailure
CollectiveReply: TypeAlias = (
    CollectiveResult | RetryContribution | CollectiveFailed | MissingWorkers | Done
)


# --- Arrays as headers and buffers ----------------------------------------------------------------
#
# Rule 1. No pickling: arrays of bytes and str are sent as lists.
# Rule 2. Small arrays are sent in their headers, since a frame costs more than a copy. Others are
#         sent without a copy.

_SMALL_BYTES = 4 << 10
_OBJECTS = "O"


def encode_arrays(arrays: Sequence[NDArray[Any]]) -> tuple[tuple[ArrayHead, ...], list[Buffer]]:
    """Return headers of arrays, and buffers of the large ones, which share their memory.

    Raises:
        InvalidArgumentError: If an array holds objects other than bytes and str.
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


def decode_arrays(heads: Sequence[ArrayHead], buffers: Sequence[Buffer]) -> list[NDArray[Any]]:
    """Return the arrays that `encode_arrays` wrote; large ones are views of the buffers.

    Raises:
        ValueError: If headers and buffers do not match.
    """
    remaining = iter(buffers)
    return [_decode_array(head, remaining) for head in heads]


def _decode_array(head: ArrayHead, buffers: Iterator[Buffer]) -> NDArray[Any]:
    if head.dtype == _OBJECTS:
        items = msgspec.msgpack.decode(head.raw or b"", type=list[Any])
        if not all(isinstance(each, bytes | str) for each in items):
            raise ValueError("an object array must hold only bytes and str")
        array = np.empty(len(items), object)
        array[:] = items
        return array.reshape(head.shape)
    dtype = decode_dtype(head.dtype)
    if head.raw is not None:
        return np.frombuffer(bytearray(head.raw), np.uint8).view(dtype).reshape(head.shape)
    buffer = next(buffers, None)
    if buffer is None:
        raise ValueError(
            f"the message has no buffer for an array of dtype {dtype} and shape {head.shape}"
        )
    return np.frombuffer(buffer, np.uint8).view(dtype).reshape(head.shape)


def _encode_objects(array: NDArray[Any]) -> bytes:
    items = array.reshape(-1).tolist()
    invalid = next((each for each in items if not isinstance(each, bytes | str)), None)
    if invalid is not None:
        raise InvalidArgumentError(
            f"an object array with {invalid!r:.80} of type {type(invalid).__name__} cannot be "
            "sent to other workers; convert its items to numbers, bytes or str"
        )
    values = [bytes(each) if isinstance(each, bytes) else str(each) for each in items]
    return msgspec.msgpack.encode(values)


# --- Errors as messages: workers raise the error that occurred on the server ----------------------

_PERMANENT = (UnavailableError.__name__, FailedPreconditionError.__name__)
"""Errors after which no collective of the session can complete."""


def encode_error(error: HeadraceError) -> CollectiveFailed:
    """Return the message for an error."""
    name = type(error).__name__
    return CollectiveFailed(error=name, text=str(error), is_permanent=name in _PERMANENT)


def decode_error(message: CollectiveFailed) -> HeadraceError:
    """Return the error of a message."""
    error: HeadraceError = getattr(errors, message.error)(message.text)
    return error
