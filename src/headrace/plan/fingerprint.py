"""Fingerprints: equal for plans that say the same, wherever and whenever they are made.

Users' functions are compared by their code and by what they hold, not by name, file or line, so
that two trainers that run the same script ask for the same job.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

from headrace.plan.buffering import CacheKey
from headrace.plan.node import Node
from headrace.plan.traverse import fold
from headrace.plan.user_function import step_name

__all__ = ["fingerprint", "fingerprint_with_steps", "looked_up_names"]


_MOST_STEPS = 200


def fingerprint(plan: Node) -> str:
    """Return 32 hexadecimal digits that tell this plan from others."""
    return _Fingerprint().of(plan)


def fingerprint_with_steps(plan: Node) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the fingerprint, and the name of each step (the first 200) with digits of its own.

    With the digits of two plans it can be said which step differs, where nobody has both plans.
    """
    taken = _Fingerprint()
    whole = taken.of(plan)
    return whole, tuple((step_name(node), own.hex()[:16]) for node, own in taken.steps)


class _Fingerprint:
    """Takes one fingerprint.

    What functions look up in their modules is put on a list and added at the end, each name once:
    functions that call each other in all directions would never come to an end otherwise.
    """

    def __init__(self) -> None:
        self._globals: dict[tuple[int, str], dict[str, Any]] = {}
        #: Steps of the plan itself, each with its digest without those before it.
        self.steps: list[tuple[Node, bytes]] = []

    def of(self, plan: Node) -> str:
        digest = _new()
        digest.update(self._plan(plan, ()))
        found = []
        done = 0
        while done < len(self._globals):
            for (_, name), names in list(self._globals.items())[done:]:
                done += 1
                own = _new()
                _label(own, "global", f"{names.get('__name__')}.{name}")
                self._feed(own, names[name], ())
                found.append(own.digest())
        for one in sorted(found):
            digest.update(one)
        return str(digest.hexdigest())

    def _plan(self, plan: Node, open_: _Open) -> bytes:
        # A step's digest is made of its inputs' digests, so nothing here is as deep as the plan.
        return fold(plan, lambda node, inputs: self._step(node, inputs, open_), once=True)

    def _step(self, node: Node, inputs: list[bytes], open_: _Open) -> bytes:
        digest = _new()
        _label(digest, "step", type(node).__name__)
        for name, value in node.parameters().items():
            _label(digest, "parameter", name)
            self._feed(digest, value, open_)
        if not open_ and len(self.steps) < _MOST_STEPS:
            self.steps.append((node, digest.copy().digest()))
        for input_ in inputs:
            digest.update(input_)
        return bytes(digest.digest())

    def _feed(self, digest: Any, value: Any, open_: _Open) -> None:
        """Add a value to the digest; `open_` are the values that it is part of."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            _label(digest, type(value).__name__, repr(value))
            return
        for depth, other in enumerate(reversed(open_)):
            if value is other:  # a function may hold itself
                _label(digest, "loop", str(depth))
                return
        open_ = (*open_, value)
        match value:
            case Node():
                digest.update(self._plan(value, open_))
            case CacheKey():
                _label(digest, "cache key", "")
            case types.ModuleType():
                _label(digest, "module", value.__name__)
            case np.ndarray() if not value.dtype.hasobject:
                _label(digest, "array", f"{value.dtype.descr}{value.shape}")
                digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            case np.ndarray():
                _label(digest, "array", f"{value.dtype.descr}{value.shape}")
                self._feed(digest, value.tolist(), open_)
            case np.generic():
                _label(digest, "scalar", f"{value.dtype.descr}{value!r}")
            case list() | tuple():
                _label(digest, type(value).__name__, str(len(value)))
                for item in value:
                    self._feed(digest, item, open_)
            case Mapping():
                _label(digest, "mapping", str(len(value)))
                self._feed_unordered(digest, value.items(), open_)
            case set() | frozenset():
                _label(digest, "set", str(len(value)))
                self._feed_unordered(digest, value, open_)
            case types.CodeType():
                self._feed_code(digest, value, open_)
            case type():
                self._feed_class(digest, value, open_)
            case _ if isinstance(value, _CALLABLE):
                self._feed_callable(digest, value, open_)
            case _:
                self._feed_object(digest, value, open_)

    def _feed_unordered(self, digest: Any, items: Iterable[Any], open_: _Open) -> None:
        """Add items in an order that does not depend on the process: that of their digests."""
        parts = []
        for item in items:
            part = _new()
            self._feed(part, item, open_)
            parts.append(part.digest())
        for one in sorted(parts):
            digest.update(one)

    def _feed_callable(self, digest: Any, value: Any, open_: _Open) -> None:
        match value:
            case types.FunctionType():
                self._feed_function(digest, value, open_)
            case types.MethodType():
                _label(digest, "method", "")
                self._feed(digest, (value.__func__, value.__self__), open_)
            case types.BuiltinFunctionType():
                _label(digest, "builtin", value.__qualname__)
                self._feed(digest, value.__self__, open_)
            case functools.partial():
                _label(digest, "partial", "")
                self._feed(digest, (value.func, value.args, value.keywords), open_)
            case property():
                _label(digest, "property", "")
                self._feed(digest, (value.fget, value.fset), open_)
            case staticmethod() | classmethod():
                _label(digest, type(value).__name__, "")
                self._feed(digest, value.__func__, open_)
            case _:  # a ufunc, a slot of a class: known by name
                _label(digest, type(value).__name__, value.__name__)

    def _feed_function(self, digest: Any, fn: types.FunctionType, open_: _Open) -> None:
        _label(digest, "function", str(fn.__globals__.get("__name__")))
        self._feed_code(digest, fn.__code__, open_)
        self._feed(digest, (fn.__defaults__, fn.__kwdefaults__), open_)
        for cell in fn.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # a variable that is assigned later
                _label(digest, "empty", "")
            else:
                self._feed(digest, held, open_)
        for name in sorted(looked_up_names(fn.__code__)):
            held = fn.__globals__.get(name, fn)
            if held is fn:  # no global, or itself
                continue
            if isinstance(held, types.FunctionType) and held.__module__ != fn.__module__:
                # A function of an installed module is known by name; the user's own by its code.
                _label(digest, "name", f"{held.__module__}.{held.__qualname__}")
            else:
                self._globals[id(fn.__globals__), name] = fn.__globals__

    def _feed_code(self, digest: Any, code: types.CodeType, open_: _Open) -> None:
        _label(digest, "code", "")
        digest.update(code.co_code)
        for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_consts):
            self._feed(digest, part, open_)

    def _feed_class(self, digest: Any, cls: type, open_: _Open) -> None:
        _label(digest, "class", f"{cls.__module__}.{cls.__qualname__}")
        if cls.__module__ not in ("__main__", "__mp_main__"):
            return
        # The user's own script: another one may have a class of this name.
        self._feed(digest, cls.__bases__, open_)
        own = {name: value for name, value in vars(cls).items() if name not in _OF_EVERY_CLASS}
        self._feed(digest, own, open_)

    def _feed_object(self, digest: Any, value: Any, open_: _Open) -> None:
        cls = type(value)
        plan = getattr(value, "plan", None)
        if isinstance(plan, Node):
            # A dataset is its plan; how often it was iterated over says nothing of it.
            _label(digest, "dataset", "")
            digest.update(self._plan(plan, open_))
        elif dataclasses.is_dataclass(value):
            # What is not given but worked out says nothing new.
            held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            self._feed(digest, (cls, held), open_)
        elif _is_plain(cls) and hasattr(value, "__dict__"):
            self._feed(digest, (cls, vars(value)), open_)
        else:
            try:
                pickled = cloudpickle.dumps(value, protocol=5)
            except Exception:  # `serialize` says so in its own words
                self._feed(digest, cls, open_)
            else:
                digest.update(pickled)


def looked_up_names(code: types.CodeType) -> set[str]:
    """Return the names that a function, and those written in it, may look up in their module."""
    names: set[str] = set()
    pending = [code]
    while pending:
        one = pending.pop()
        names.update(one.co_names)
        pending.extend(const for const in one.co_consts if isinstance(const, types.CodeType))
    return names


def _is_plain(cls: type) -> bool:
    """Say whether objects of a class are pickled in no way of their own."""
    return all(
        getattr(cls, name, None) is getattr(object, name)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )


def _label(digest: Any, kind: str, text: str) -> None:
    digest.update(f"{kind}:{len(text)}:{text};".encode())


def _new() -> Any:
    return hashlib.blake2b(digest_size=16)


_Open: TypeAlias = tuple[object, ...]
"""The values that are being fed, outermost first."""

_CALLABLE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    functools.partial,
    property,
    staticmethod,
    classmethod,
    np.ufunc,
)

_OF_EVERY_CLASS = frozenset(
    [
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    ]
)
