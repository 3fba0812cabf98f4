"""Functions on their way to workers: pickled once, sent once to each worker, loaded once there."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from headrace.coordinator.blame import MISSING_MODULE
from headrace.coordinator.closure import Payload
from headrace.coordinator.packing import Packing, pack, unpack
from headrace.coordinator.work import Function
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    describe_error,
    missing_module_hint,
)
from headrace.frameworks.keras_state import keras_state
from headrace.plan.node import describe_function
from headrace.plan.serialize import held_by, is_pickled_by_name, references
from headrace.transport.channel import Buffer

__all__ = ["Functions", "Loaded", "Loads"]

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
                            missing_module_hint(type(error).__name__, MISSING_MODULE)
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
