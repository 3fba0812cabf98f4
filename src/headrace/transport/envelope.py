"""Wire format: one header frame, then the buffers as separate frames.

The header contains the message in encoded form, so that the header can be read, and the request
answered, even if the message cannot be decoded. Errors are sent as text: the class by name, never
pickled.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import zmq

from headrace import errors
from headrace.errors import HeadraceError, UserFunctionError
from headrace.malloc_tuning import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, keep_freed_memory
from headrace.transport.channel import Buffer
from headrace.transport.shared_memory import BufferLocation, MemoryReport, SegmentOffer
from headrace.versions import WIRE_FORMAT

__all__ = [
    "CLOSING",
    "EMPTY_BODY",
    "ERROR",
    "MAX_FRAME_BYTES",
    "NOTICE",
    "REPLY",
    "REQUEST",
    "ErrorText",
    "ReplyHeader",
    "RequestHeader",
    "copy_views",
    "decode_error",
    "decode_reply_header",
    "decode_request_header",
    "encode",
    "encode_error",
    "flat_views",
    "join_frames",
    "receive_buffers",
    "split_frames",
]

REQUEST = 0
"""A request that must be answered."""
NOTICE = 1
"""A report about shared memory without a request; not answered."""
CLOSING = 2
"""The channel closes; not answered."""

REPLY = 0
ERROR = 1

MAX_FRAME_BYTES = 32 << 20
"""Largest part of a buffer in one frame, in bytes."""

_OWN_ALLOCATION_BYTES = 16 << 10

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Encode a header or a message."""

EMPTY_BODY = msgspec.Raw(encode(None))
"""Body of headers without a message."""


class RequestHeader(msgspec.Struct, array_like=True, frozen=True):
    """First frame of a message from a channel.

    `frame_counts` is the number of frames of each buffer, so that a truncated message is not
    mistaken for a complete one. Buffers in the channel's own memory have a `location` and no
    frames; `offer` and `retired_segments` are as in a reply, with the two ends exchanged.
    `wire_format` is the format of the body (`versions.WIRE_FORMAT`); it has this position in all
    formats.
    """

    request_id: int
    kind: int
    body: msgspec.Raw
    report: MemoryReport | None = None
    frame_counts: tuple[int, ...] = ()
    location: BufferLocation | None = None
    offer: SegmentOffer | None = None
    retired_segments: tuple[int, ...] = ()
    wire_format: int = WIRE_FORMAT


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """First frame of a message from a server; `frame_counts` as in a request.

    `retired_segments` names segments that the server has dropped; `report` is about the channel's
    memory. A header with request id 0 is not a reply.
    """

    request_id: int
    kind: int
    body: msgspec.Raw
    location: BufferLocation | None = None
    offer: SegmentOffer | None = None
    frame_counts: tuple[int, ...] = ()
    retired_segments: tuple[int, ...] = ()
    report: MemoryReport | None = None


class ErrorText(msgspec.Struct, array_like=True, frozen=True):
    """An error as text."""

    name: str
    message: str
    position: int = -1
    original_type: str = ""
    original_traceback: str = ""


decode_request_header = msgspec.msgpack.Decoder(RequestHeader).decode
decode_reply_header = msgspec.msgpack.Decoder(ReplyHeader).decode
_decode_error_text = msgspec.msgpack.Decoder(ErrorText).decode


def _takes_a_message(kind: type[Exception]) -> bool:
    try:
        return str(kind("it")) in ("it", "'it'")
    except TypeError:
        return False


#: Classes that arrive unchanged. `errors` comes second so that its names take precedence.
_ERROR_CLASSES: dict[str, type[Exception]] = {
    name: kind
    for module, names in ((builtins, dir(builtins)), (errors, errors.__all__))
    for name in names
    if inspect.isclass(kind := getattr(module, name))
    and issubclass(kind, Exception)
    and _takes_a_message(kind)
}


def encode_error(error: Exception) -> bytes:
    """Encode an error as the body of a reply."""
    text = _error_text(error)
    for kind in type(error).__mro__:
        # A subclass of a Headrace error that the other side may not know arrives as that error.
        if _ERROR_CLASSES.get(kind.__name__) is kind and (
            kind is type(error) or issubclass(kind, HeadraceError)
        ):
            name = kind.__name__
            break
    else:
        name, text = HeadraceError.__name__, f"{type(error).__name__}: {text}"
    # Text that is not valid Unicode (file names with surrogates) must not prevent the reply.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(error, UserFunctionError):
        return encode(
            ErrorText(name, text, error.position, error.original_type, error.original_traceback)
        )
    return encode(ErrorText(name, text))


def _error_text(error: Exception) -> str:
    message = error.args[0] if len(error.args) == 1 else None
    if isinstance(message, str):
        return message
    try:
        return str(error)
    except Exception as failure:
        # An error whose text cannot be computed must still be sent.
        return f"(no message: __str__ raised {type(failure).__name__})"


def decode_error(body: Any) -> Exception:
    """Return the error that `encode_error` encoded."""
    text = _decode_error_text(body)
    kind = _ERROR_CLASSES.get(text.name)
    if kind is None:
        return HeadraceError(f"{text.name}: {text.message}")
    if issubclass(kind, UserFunctionError):
        return kind(
            text.message,
            position=text.position,
            original_type=text.original_type,
            original_traceback=text.original_traceback,
        )
    return kind(text.message)


def flat_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Return a view of each buffer as contiguous bytes.

    Raises:
        TypeError: If it is not a buffer.
        ValueError: If its memory has gaps.
    """
    return list(map(_flat_view, buffers))


def _flat_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError(
            f"a buffer of shape {view.shape} and strides {view.strides} has gaps; "
            "send a contiguous copy"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


def copy_views(views: Iterable[memoryview]) -> list[memoryview]:
    """Copy buffers, so that their memory may be changed."""
    return [np.frombuffer(view, np.uint8).copy().data for view in views]


def split_frames(views: list[memoryview]) -> tuple[list[memoryview], tuple[int, ...]]:
    """Split buffers into frames; return the frames, and the number of frames of each buffer.

    Only complete frames show that a peer is alive, so a frame must not take longer on a slow
    network than the peer's keepalive timeout. Most buffers stay whole.
    """
    if not views or max([view.nbytes for view in views]) <= MAX_FRAME_BYTES:
        return views, (1,) * len(views)
    frames: list[memoryview] = []
    counts: list[int] = []
    for view in views:
        starts = range(0, max(1, view.nbytes), MAX_FRAME_BYTES)
        frames += [view[start : start + MAX_FRAME_BYTES] for start in starts]
        counts.append(len(starts))
    return frames, tuple(counts)


def join_frames(frames: list[memoryview], frame_counts: tuple[int, ...]) -> list[memoryview]:
    """Join the frames of each buffer; the inverse of `split_frames`.

    Raises:
        ValueError: If the number of frames does not match `frame_counts`.
    """
    if len(frame_counts) == len(frames) and frame_counts.count(1) == len(frames):
        return frames
    if min(frame_counts, default=0) < 1 or sum(frame_counts) != len(frames):
        raise ValueError(f"received {len(frames)} frames, but {frame_counts} were announced")
    rest = iter(frames)
    return [_join_one([next(rest) for _ in range(count)]) for count in frame_counts]


def _join_one(frames: list[memoryview]) -> memoryview:
    if len(frames) == 1:
        return frames[0]
    whole = memoryview(bytearray(sum(frame.nbytes for frame in frames)))
    at = 0
    for frame in frames:
        whole[at : at + frame.nbytes] = frame
        at += frame.nbytes
    return whole


def receive_buffers(socket: zmq.Socket[bytes], first: zmq.Frame) -> list[memoryview]:
    """Receive the remaining parts of a multi-part message whose first part has been read."""
    buffers: list[memoryview] = []
    more = first.more
    while more:
        frame = socket.recv(copy=False)
        more = frame.more
        # Small frames share one allocation of ZeroMQ and are not aligned.
        small = len(frame) < _OWN_ALLOCATION_BYTES
        if len(frame) >= MIN_BLOCK_BYTES:
            keep_freed_memory(MAX_BLOCK_BYTES)
        buffers.append(memoryview(bytearray(frame.buffer)) if small else frame.buffer)
    return buffers
