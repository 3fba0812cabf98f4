"""Arrays as heads and buffers: what travels between workers.

Rule 1. Nothing is pickled or unpickled. Arrays of bytes and str travel as a list of them.
Rule 2. Small arrays travel in their heads, since a frame costs more than a copy of them. Others are
        sent from where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.distribute.meeting.messages import ArrayHead
from headrace.element.description import decode_dtype, encode_dtype
from headrace.errors import InvalidArgumentError
from headrace.transport.channel import Buffer

__all__ = ["decode", "encode"]

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
