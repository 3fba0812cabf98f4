"""Values on their way between coordinator and workers: pickled, with arrays' memory beside them.

What is packed is a copy: whoever gave it may go on writing into it. Values of other closures are
not packed again, but named by their place among the inputs; handles of what workers keep are noted,
so that it is kept for as long as anything that was packed may need it.

Functions are pickled once, sent once to each worker, and loaded once there. An error that one
raises is sent with the user's traceback (`blame`).
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np

from headrace.coordinator.closure import Payload, Result
from headrace.coordinator.messages import Function
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    UserFunctionError,
    describe_error,
    missing_module_hint,
)
from headrace.frameworks.keras_state import keras_state
from headrace.parameter_server.pickling import ReplyPickler, WorkerPickler
from headrace.plan.node import describe_function
from headrace.plan.serialize import held_by, is_pickled_by_name, references
from headrace.transport.channel import Buffer

__all__ = [
    "NOTHING",
    "Functions",
    "Loaded",
    "Loads",
    "Packing",
    "blame",
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


# --------------------------------------------------------------------------------------------------
# Functions on their way to workers

_MAX_LOADED_BYTES = 64 << 20
"""Of pickled functions, with the arrays that they hold. The buffers of a function that came through
shared memory hold the memory of the coordinator, too."""
_DIGEST_BYTES = 16


class Functions:
    """The functions that were scheduled and that somebody still holds.

    Args:
        strategy: Returns the strategy whose workers they are for.
    """

    def __init__(self, strategy: Callable[[], Any]) -> None:
        self._strategy = strategy
        #: By identity, since functions may compare as they like.
        self._known: dict[int, tuple[weakref.ref[Any], Function]] = {}

    def of(self, fn: Callable[..., Any]) -> Function:
        """Return a function, pickled when it was asked for first.

        Raises:
            TypeError: It is no function.
            FailedPreconditionError: It holds something that cannot be sent.
        """
        known = self._known.get(id(fn))
        if known is not None and known[0]() is fn:
            return known[1]
        if not callable(fn):
            raise TypeError(
                f"`fn` must be a function that is called on a worker, but got {fn!r:.80} of type "
                f"{type(fn).__name__}"
            )
        function = _packed(fn, self._strategy())
        key, known_functions = id(fn), self._known

        def forget(gone: weakref.ref[Any]) -> None:
            found = known_functions.get(key)
            if found is not None and found[0] is gone:
                del known_functions[key]

        try:
            self._known[key] = weakref.ref(fn, forget), function
        except TypeError:
            return function  # it cannot be watched, so it is pickled each time
        return function


def _packed(fn: Callable[..., Any], strategy: Any) -> Function:
    packing = Packing(takes_inputs=False, strategy=strategy)
    name = describe_function(fn)
    try:
        for value in references(fn).values() if is_pickled_by_name(fn) else ():
            if (found := keras_state(value)) is not None:
                raise FailedPreconditionError(
                    f"its module is imported on the worker, which makes {found} there again, "
                    "another one than here: pass it as an argument, or define the function in the "
                    "main program or inside a function"
                )
        payload = pack(fn, packing)
    except Exception as error:
        if isinstance(error, HeadraceError):  # it says by itself what is wrong, and what would do
            why = str(error)
        else:
            inside = held_by(fn) or describe_error(error)
            why = f"it holds {inside}. Make such things inside the function, or pass their values"
        raise FailedPreconditionError(
            f"the function {name} cannot be sent to a worker: {why}"
        ) from error
    digest = hashlib.blake2b(payload.data, digest_size=_DIGEST_BYTES)
    for buffer in payload.buffers:
        digest.update(buffer)
    return Function(digest.digest(), name, payload, tuple(packing.kept))


@dataclass
class Loaded:
    """A function at a worker; it is loaded by the first closure that needs it."""

    name: str
    payload: Payload
    nbytes: int
    _lock: Lock = field(default_factory=Lock)
    _function: Callable[..., Any] | None = None

    def get(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            FailedPreconditionError: It cannot be loaded here.
        """
        with self._lock:
            if self._function is None:
                try:
                    self._function = unpack(self.payload)
                except Exception as error:
                    raise FailedPreconditionError(
                        f"the function {self.name} cannot be loaded on this worker: "
                        f"{describe_error(error)}"
                        + (
                            missing_module_hint(type(error).__name__, _MISSING_MODULE)
                            or "; does it have the same packages as the coordinator?"
                        )
                    ) from error
                self.payload = Payload(b"")
            assert self._function is not None
            return self._function


class Loads:
    """The functions of one life of a worker; those that were used least recently are dropped.

    A function that was dropped is sent again when a closure needs it.

    Args:
        max_bytes: Bytes to keep; None: 64 MiB. One function is kept however large it is.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = _MAX_LOADED_BYTES if max_bytes is None else max_bytes
        self._nbytes = 0
        self._loaded: OrderedDict[bytes, Loaded] = OrderedDict()

    def put(self, digest: bytes, name: str, data: list[Buffer]) -> None:
        """Keep a function: its pickle, and the buffers beside it."""
        payload = Payload(bytes(data[0]), data[1:])
        before = self._loaded.pop(digest, None)
        if before is not None:
            self._nbytes -= before.nbytes
        self._loaded[digest] = Loaded(name, payload, payload.nbytes)
        self._nbytes += payload.nbytes
        while self._nbytes > self._max_bytes and len(self._loaded) > 1:
            _, dropped = self._loaded.popitem(last=False)
            self._nbytes -= dropped.nbytes

    def find(self, digest: bytes) -> Loaded | None:
        """Return a function; None: it is not here any more."""
        loaded = self._loaded.get(digest)
        if loaded is not None:
            self._loaded.move_to_end(digest)
        return loaded


# --------------------------------------------------------------------------------------------------
# Errors of functions on their way back

_MISSING_MODULE = (
    "install the package there, or make your module importable for it (PYTHONPATH, or "
    "`headrace server --preload FOLDER/NAME.py`)"
)
_OURS = ("headrace.coordinator", "headrace.parameter_server.write_context", "contextlib")


def blame(function: str, worker: int, error: BaseException) -> Exception:
    """Return the error to send for one that a function raised.

    Errors of Headrace's own (a dataset's end, a server that is gone) stay as they are. All others,
    SystemExit and the like included, are a UserFunctionError: on a thread of a worker nobody but
    the function raises them.
    """
    if isinstance(error, HeadraceError):
        return error
    kind = type(error).__name__
    text = "".join(traceback.format_exception(type(error), error, _users(error.__traceback__)))
    said = describe_error(error).removeprefix(kind).removeprefix(": ")
    said += missing_module_hint(kind, _MISSING_MODULE)
    return UserFunctionError(
        f"the function {function} raised {kind} on worker {worker}: {said}\n\n"
        f"Original traceback:\n{text}",
        original_type=kind,
        original_traceback=text,
    )


def _users(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that lead to the function."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    return frames
