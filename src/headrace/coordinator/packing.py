"""Serialization of values between coordinator and workers: pickle with out-of-band array buffers.

Packing copies: the caller may go on writing into the value. Values of other closures are not packed
again, but named by their index among the inputs. Handles of worker resources are recorded, so that
a resource is kept as long as any packed value may need it.

Functions are pickled once, and sent to and loaded on each worker once. Errors of functions are sent
with the user's traceback (`translate_error`).
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

from headrace.coordinator.closure import ClosureResult, Payload
from headrace.coordinator.messages import PackedFunction
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
from headrace.plan.serialize import describe_unpicklable, find_references, is_pickled_by_name
from headrace.transport.channel import Buffer

__all__ = [
    "PACKED_NONE",
    "FunctionCache",
    "LoadedFunction",
    "LoadedFunctions",
    "Packing",
    "add_input",
    "get_input",
    "pack",
    "packing_strategy",
    "record_handle",
    "translate_error",
    "unpack",
]


_OUT_OF_BAND_BYTES = 16 << 10
"""Minimum size of arrays whose memory is sent outside the pickle."""
_MAX_PLAIN_ITEMS = 64
PACKED_NONE = Payload(pickle.dumps(None, protocol=5))
"""None, packed."""


class Packing:
    """References found while a value is packed.

    Attributes:
        strategy: Strategy whose workers receive the value; None if unknown.
        inputs: Results of other closures that the value refers to.
        handles: Handles in the value.
    """

    def __init__(self, *, takes_inputs: bool, strategy: Any = None) -> None:
        self.takes_inputs = takes_inputs
        self.strategy = strategy
        self.inputs: list[ClosureResult] = []
        self.handles: list[object] = []


class _PackingContext(threading.local):
    packing: Packing | None = None
    inputs: Sequence[Any] = ()


_context = _PackingContext()


def pack(
    value: Any,
    packing: Packing | None = None,
    pickler: type[WorkerPickler | ReplyPickler] = WorkerPickler,
) -> Payload:
    """Serialize a value.

    Args:
        value: Any value.
        packing: Collects the references found in it.
        pickler: `ReplyPickler` for values that a worker returns.

    Raises:
        Exception: Any error of pickling.
    """
    if value is None:
        return PACKED_NONE
    buffers: list[bytes] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw.tobytes())
        return False

    if _is_plain(value):
        return Payload(pickle.dumps(value, protocol=5, buffer_callback=keep_in_band), buffers)
    outer_packing, _context.packing = _context.packing, packing
    try:
        with io.BytesIO() as file:
            pickler(file, protocol=5, buffer_callback=keep_in_band).dump(value)
            return Payload(file.getvalue(), buffers)
    finally:
        _context.packing = outer_packing


def unpack(payload: Payload, inputs: Sequence[Any] = ()) -> Any:
    """Deserialize a value. Runs code: only for trusted bytes.

    Args:
        payload: Result of `pack`.
        inputs: Values of other closures, by index.
    """
    if payload.data == PACKED_NONE.data:
        return None
    outer_inputs, _context.inputs = _context.inputs, inputs
    try:
        return pickle.loads(
            payload.data, buffers=[_make_writable(each) for each in payload.buffers]
        )
    finally:
        _context.inputs = outer_inputs


def add_input(result: ClosureResult) -> int:
    """Return the index of a result among the inputs of the value being packed.

    Raises:
        FailedPreconditionError: If the value is not packed as an argument.
    """
    packing = _context.packing
    if packing is None or not packing.takes_inputs:
        raise FailedPreconditionError(
            "a RemoteValue can be sent to a worker only as an argument: pass it in `args` or "
            "`kwargs` of schedule, or fetch() it first"
        )
    for index, each in enumerate(packing.inputs):
        if each is result:
            return index
    packing.inputs.append(result)
    return len(packing.inputs) - 1


def packing_strategy() -> Any:
    """Return the strategy whose workers receive the value being packed; None if unknown."""
    packing = _context.packing
    return None if packing is None else packing.strategy


def get_input(index: int) -> Any:
    """Return the value of another closure while a value is unpacked."""
    return _context.inputs[index]


def record_handle(handle: object) -> None:
    """Record that the value being packed contains a handle.

    Raises:
        FailedPreconditionError: If the value is not packed for a worker.
    """
    packing = _context.packing
    if packing is None:
        raise FailedPreconditionError(
            f"a {type(handle).__name__} can be used only in scheduled functions, and cannot be "
            "pickled otherwise"
        )
    packing.handles.append(handle)


def _make_writable(buffer: Any) -> Any:
    # Buffers passed by reference within this process are shared with the sender.
    return bytearray(buffer) if memoryview(buffer).readonly else buffer


def _is_plain(value: Any) -> bool:
    """Return whether a value needs no custom pickling, so that the fast pickler suffices."""
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if kind is tuple or kind is list:
        return len(value) <= _MAX_PLAIN_ITEMS and all(map(_is_plain, value))
    if kind is dict:
        return (
            len(value) <= _MAX_PLAIN_ITEMS
            and all(map(_is_plain, value.values()))
            and all(type(key) in _PLAIN for key in value)
        )
    return kind in _PLAIN


_PLAIN = frozenset(
    [type(None), bool, int, float, complex, str, bytes]
    + [np.dtype(code).type for code in "?bhilqBHILQefdFD"]
)


# --------------------------------------------------------------------------------------------------
# Functions sent to workers

_MAX_LOADED_BYTES = 64 << 20
"""Limit for pickled functions and their arrays. Buffers that came through shared memory also hold
the coordinator's memory."""
_DIGEST_BYTES = 16


class FunctionCache:
    """Pickled functions, kept while the function object is alive.

    Args:
        strategy: Returns the strategy whose workers receive the functions.
    """

    def __init__(self, strategy: Callable[[], Any]) -> None:
        self._strategy = strategy
        #: By identity, since functions may define their own comparison.
        self._known: dict[int, tuple[weakref.ref[Any], PackedFunction]] = {}

    def get(self, fn: Callable[..., Any]) -> PackedFunction:
        """Return a function as pickled on its first use.

        Raises:
            TypeError: If it is not callable.
            FailedPreconditionError: If it references an object that cannot be sent.
        """
        known = self._known.get(id(fn))
        if known is not None and known[0]() is fn:
            return known[1]
        if not callable(fn):
            raise TypeError(
                f"`fn` must be callable, but got {fn!r:.80} of type {type(fn).__name__}"
            )
        function = _pack_function(fn, self._strategy())
        key, known_functions = id(fn), self._known

        def forget(dead_reference: weakref.ref[Any]) -> None:
            found = known_functions.get(key)
            if found is not None and found[0] is dead_reference:
                del known_functions[key]

        try:
            self._known[key] = weakref.ref(fn, forget), function
        except TypeError:
            return function  # no weak reference is possible, so it is pickled each time
        return function


def _pack_function(fn: Callable[..., Any], strategy: Any) -> PackedFunction:
    packing = Packing(takes_inputs=False, strategy=strategy)
    name = describe_function(fn)
    try:
        for value in find_references(fn).values() if is_pickled_by_name(fn) else ():
            if (found := keras_state(value)) is not None:
                raise FailedPreconditionError(
                    f"the worker imports its module, which creates {found} again there: pass "
                    "it as an argument, or define the function in the main program or inside a "
                    "function"
                )
        payload = pack(fn, packing)
    except Exception as error:
        if isinstance(error, HeadraceError):  # its message already names the cause and the fix
            cause = str(error)
        else:
            description = describe_unpicklable(fn) or describe_error(error)
            cause = (
                f"it references {description}. Create such objects inside the function, or pass "
                "their values"
            )
        raise FailedPreconditionError(
            f"the function {name} cannot be sent to a worker: {cause}"
        ) from error
    digest = hashlib.blake2b(payload.data, digest_size=_DIGEST_BYTES)
    for buffer in payload.buffers:
        digest.update(buffer)
    return PackedFunction(digest.digest(), name, payload, tuple(packing.handles))


@dataclass
class LoadedFunction:
    """Function at a worker, loaded by the first closure that needs it."""

    name: str
    payload: Payload
    nbytes: int
    _lock: Lock = field(default_factory=Lock)
    _function: Callable[..., Any] | None = None

    def get(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            FailedPreconditionError: If it cannot be loaded in this process.
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
                            or "; does the worker have the same packages as the coordinator?"
                        )
                    ) from error
                self.payload = Payload(b"")
            assert self._function is not None
            return self._function


class LoadedFunctions:
    """Least-recently-used cache of the functions of one worker session.

    An evicted function is sent again when a closure needs it.

    Args:
        max_bytes: Size limit in bytes; None: 64 MiB. A single function may exceed it.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = _MAX_LOADED_BYTES if max_bytes is None else max_bytes
        self._nbytes = 0
        self._loaded: OrderedDict[bytes, LoadedFunction] = OrderedDict()

    def put(self, digest: bytes, name: str, data: list[Buffer]) -> None:
        """Store a function: its pickle, followed by its buffers."""
        payload = Payload(bytes(data[0]), data[1:])
        previous = self._loaded.pop(digest, None)
        if previous is not None:
            self._nbytes -= previous.nbytes
        self._loaded[digest] = LoadedFunction(name, payload, payload.nbytes)
        self._nbytes += payload.nbytes
        while self._nbytes > self._max_bytes and len(self._loaded) > 1:
            _, dropped = self._loaded.popitem(last=False)
            self._nbytes -= dropped.nbytes

    def find(self, digest: bytes) -> LoadedFunction | None:
        """Return a function, or None if it is not cached."""
        loaded = self._loaded.get(digest)
        if loaded is not None:
            self._loaded.move_to_end(digest)
        return loaded


# --------------------------------------------------------------------------------------------------
# Errors of functions, sent to the coordinator

_MISSING_MODULE = (
    "install the package there, or make your module importable for it (PYTHONPATH, or "
    "`headrace server --preload FOLDER/NAME.py`)"
)
_INTERNAL_MODULES = (
    "headrace.coordinator",
    "headrace.parameter_server.write_context",
    "contextlib",
)


def translate_error(function: str, worker: int, error: BaseException) -> Exception:
    """Return the error to send for an error that a function raised.

    Headrace errors, such as the end of a dataset or a lost server, are sent unchanged. All others,
    including SystemExit, become a UserFunctionError: on a worker's thread only the function can
    raise them.
    """
    if isinstance(error, HeadraceError):
        return error
    kind = type(error).__name__
    text = "".join(
        traceback.format_exception(type(error), error, _user_traceback(error.__traceback__))
    )
    message = describe_error(error).removeprefix(kind).removeprefix(": ")
    message += missing_module_hint(kind, _MISSING_MODULE)
    return UserFunctionError(
        f"the function {function} raised {kind} on worker {worker}: {message}\n\n"
        f"Original traceback:\n{text}",
        original_type=kind,
        original_traceback=text,
    )


def _user_traceback(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of Headrace above the function."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        _INTERNAL_MODULES
    ):
        frames = frames.tb_next
    return frames
