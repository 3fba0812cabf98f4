"""What travels between two peers: one header frame, then the buffers as frames of their own.

The header carries the message still encoded, so that a header can be read, and its ticket answered,
even where the message inside it cannot. Errors cross as text: the class by its name, never pickled.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from headrace import errors
from headrace.errors import HeadraceError, UserFunctionError
from headrace.transport.channel import Buffer
from headrace.transport.shared_memory import MemoryReport, Offer, Placement

__all__ = [
    "ERROR",
    "GOODBYE",
    "NOTHING",
    "NOTICE",
    "REPLY",
    "REQUEST",
    "ErrorText",
    "ReplyHeader",
    "RequestHeader",
    "decode_error",
    "decode_reply_header",
    "decode_request_header",
    "encode",
    "encode_error",
    "flat_views",
    "receive_buffers",
]

REQUEST = 0
"""A request that is owed an answer."""
NOTICE = 1
"""News about shared memory without a request; not answered."""
GOODBYE = 2
"""The channel closes; not answered."""

REPLY = 0
ERROR = 1

_OWN_ALLOCATION_BYTES = 16 << 10

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Encode a header or a message."""

NOTHING = msgspec.Raw(encode(None))
"""The body of what has none."""


class RequestHeader(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of what a channel sends."""

    ticket: int
    kind: int
    body: msgspec.Raw
    report: MemoryReport | None = None


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of what a server sends."""

    ticket: int
    kind: int
    body: msgspec.Raw
    placement: Placement | None = None
    offer: Offer | None = None


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


#: Classes that arrive as they left. `errors` comes second so that its names win.
_KNOWN: dict[str, type[Exception]] = {
    name: kind
    for module, names in ((builtins, dir(builtins)), (errors, errors.__all__))
    for name in names
    if inspect.isclass(kind := getattr(module, name))
    and issubclass(kind, Exception)
    and _takes_a_message(kind)
}


def encode_error(error: Exception) -> bytes:
    """Write an error as the body of a reply."""
    message = error.args[0] if len(error.args) == 1 else None
    text = message if isinstance(message, str) else str(error)
    for kind in type(error).__mro__:
        # A subclass of one of ours that the other side may not know arrives as ours.
        if _KNOWN.get(kind.__name__) is kind and (
            kind is type(error) or issubclass(kind, HeadraceError)
        ):
            name = kind.__name__
            break
    else:
        name, text = HeadraceError.__name__, f"{type(error).__name__}: {text}"
    # Text that is not valid Unicode (file names with surrogates) must not stop an error.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(error, UserFunctionError):
        return encode(
            ErrorText(name, text, error.position, error.original_type, error.original_traceback)
        )
    return encode(ErrorText(name, text))


def decode_error(body: Any) -> Exception:
    """Rebuild the error that `encode_error` wrote."""
    text = _decode_error_text(body)
    kind = _KNOWN.get(text.name)
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
    """View each buffer as contiguous bytes.

    Raises:
        TypeError: It is no buffer.
        ValueError: Its memory has gaps.
    """
    return [_flat_view(buffer) for buffer in buffers]


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


def receive_buffers(socket: zmq.Socket[bytes]) -> list[memoryview]:
    """Read the rest of the multi-part message whose last part was just read from `socket`."""
    buffers: list[memoryview] = []
    more = socket.rcvmore
    while more:
        frame = socket.recv(copy=False)
        more = frame.more
        # Small frames share one allocation of ZeroMQ's and lie at odd addresses.
        small = len(frame) < _OWN_ALLOCATION_BYTES
        buffers.append(memoryview(bytearray(frame.buffer)) if small else frame.buffer)
    return buffers
