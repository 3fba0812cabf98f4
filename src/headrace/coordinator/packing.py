"""Values on their way between coordinator and workers: pickled, with arrays' memory beside them.

What is packed is a copy: whoever gave it may go on writing into it. Values of other closures are
not packed again, but named by their place among the inputs; handles of what workers keep are noted,
so that it is kept for as long as anything that was packed may need it.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.coordinator.closure import Payload, Result
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.pickling import ReplyPickler, WorkerPickler

__all__ = [
    "NOTHING",
    "Packing",
    "input_value",
    "keep",
    "name_input",
    "pack",
    "strategy_of_packing",
    "unpack",
]

_ALONE_BYTES = 16 << 10
"""From so many bytes on, the memory of an array travels beside the pickle."""
_MOST_PLAIN = 64

NOTHING = Payload(pickle.dumps(None, protocol=5))
"""None, packed."""


class Packing:
    """What is found while something is packed.

    Attributes:
        strategy: Whose workers it is for; None: that is not known.
        inputs: Results of other closures that it names.
        kept: Handles in it.
    """

    def __init__(self, *, takes_inputs: bool, strategy: Any = None) -> None:
        self.takes_inputs = takes_inputs
        self.strategy = strategy
        self.inputs: list[Result] = []
        self.kept: list[object] = []


class _Here(threading.local):
    packing: Packing | None = None
    inputs: Sequence[Any] = ()


_here = _Here()


def pack(
    value: Any,
    packing: Packing | None = None,
    pickler: type[WorkerPickler | ReplyPickler] = WorkerPickler,
) -> Payload:
    """Return a value as bytes.

    Args:
        value: Any.
        packing: Receives what is found in it.
        pickler: `ReplyPickler` for what a worker returns.

    Raises:
        Exception: What cannot be pickled raises, be it what it may.
    """
    if value is None:
        return NOTHING
    buffers: list[bytes] = []

    def keep_in(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _ALONE_BYTES:
            return True
        buffers.append(raw.tobytes())
        return False

    if _is_plain(value):
        return Payload(pickle.dumps(value, protocol=5, buffer_callback=keep_in), buffers)
    before, _here.packing = _here.packing, packing
    try:
        with io.BytesIO() as file:
            pickler(file, protocol=5, buffer_callback=keep_in).dump(value)
            return Payload(file.getvalue(), buffers)
    finally:
        _here.packing = before


def unpack(payload: Payload, inputs: Sequence[Any] = ()) -> Any:
    """Return the value. Runs code: only for bytes that are trusted.

    Args:
        payload: What `pack` made.
        inputs: Values of other closures, by their place.
    """
    if payload.data == NOTHING.data:
        return None
    before, _here.inputs = _here.inputs, inputs
    try:
        return pickle.loads(payload.data, buffers=[_writable(each) for each in payload.buffers])
    finally:
        _here.inputs = before


def name_input(result: Result) -> int:
    """Return the place of a result among the inputs of what is being packed.

    Raises:
        FailedPreconditionError: It is not packed as an argument.
    """
    packing = _here.packing
    if packing is None or not packing.takes_inputs:
        raise FailedPreconditionError(
            "a RemoteValue travels only as an argument: pass it in `args` or `kwargs` of schedule, "
            "or fetch() it first"
        )
    for place, each in enumerate(packing.inputs):
        if each is result:
            return place
    packing.inputs.append(result)
    return len(packing.inputs) - 1


def strategy_of_packing() -> Any:
    """Return the strategy whose workers get what is being packed; None: nobody said."""
    packing = _here.packing
    return None if packing is None else packing.strategy


def input_value(place: int) -> Any:
    """Return the value of another closure, while something is unpacked."""
    return _here.inputs[place]


def keep(handle: object) -> None:
    """Take note that what is being packed names a handle.

    Raises:
        FailedPreconditionError: It is not packed for a worker.
    """
    packing = _here.packing
    if packing is None:
        raise FailedPreconditionError(
            f"a {type(handle).__name__} can be used in functions that are scheduled, and travels "
            "nowhere else"
        )
    packing.kept.append(handle)


def _writable(buffer: Any) -> Any:
    # What came in this process by reference is shared with whoever packed it.
    return bytearray(buffer) if memoryview(buffer).readonly else buffer


def _is_plain(value: Any) -> bool:
    """Whether a value is alike for every process, so that the fast pickle does."""
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is tuple or kind is list:
        return len(value) <= _MOST_PLAIN and all(map(_is_plain, value))
    if kind is dict:
        return (
            len(value) <= _MOST_PLAIN
            and all(map(_is_plain, value.values()))
            and all(type(key) in _PLAIN for key in value)
        )
    return kind in _PLAIN


_PLAIN = frozenset(
    [type(None), bool, int, float, complex, str, bytes]
    + [np.dtype(code).type for code in "?bhilqBHILQefdFD"]
)
