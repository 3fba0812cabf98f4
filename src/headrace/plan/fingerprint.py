"""Fingerprints of plans: equal for plans with the same meaning, in any process and at any time.

Users' functions are compared by their code and the values they hold, not by name, file or line, so
that two trainers that run the same script request the same job.
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

__all__ = ["fingerprint", "fingerprint_with_steps", "global_names"]


_MAX_NAMED_STEPS = 200


def fingerprint(plan: Node) -> str:
    """Return the fingerprint of a plan: 32 hexadecimal digits."""
    return _Fingerprint().add_plan(plan)


def fingerprint_with_steps(plan: Node) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the fingerprint, and the name and digest of each of the first 200 steps.

    The digests of two plans show which step differs when only one of the plans is available.
    """
    computation = _Fingerprint()
    digest = computation.add_plan(plan)
    return digest, tuple(
        (step_name(node), step_digest.hex()[:16]) for node, step_digest in computation.steps
    )


class _Fingerprint:
    """Computes one fingerprint.

    Globals that functions refer to are collected and added at the end, each once; recursion into
    functions that refer to each other would not terminate.
    """

    def __init__(self) -> None:
        self._globals: dict[tuple[int, str], dict[str, Any]] = {}
        #: Steps of the plan itself, each with a digest that excludes its inputs.
        self.steps: list[tuple[Node, bytes]] = []

    def add_plan(self, plan: Node) -> str:
        digest = _new_digest()
        digest.update(self._digest_plan(plan, ()))
        global_digests = []
        num_done = 0
        while num_done < len(self._globals):
            for (_, name), names in list(self._globals.items())[num_done:]:
                num_done += 1
                global_digest = _new_digest()
                _add_label(global_digest, "global", f"{names.get('__name__')}.{name}")
                self._feed(global_digest, names[name], ())
                global_digests.append(global_digest.digest())
        for added_digest in sorted(global_digests):
            digest.update(added_digest)
        return str(digest.hexdigest())

    def _digest_plan(self, plan: Node, ancestors: _Ancestors) -> bytes:
        # A step's digest includes its inputs' digests, so no recursion is as deep as the plan.
        return fold(
            plan, lambda node, inputs: self._digest_step(node, inputs, ancestors), once=True
        )

    def _digest_step(self, node: Node, inputs: list[bytes], ancestors: _Ancestors) -> bytes:
        digest = _new_digest()
        _add_label(digest, "step", type(node).__name__)
        for name, value in node.parameters().items():
            _add_label(digest, "parameter", name)
            self._feed(digest, value, ancestors)
        if not ancestors and len(self.steps) < _MAX_NAMED_STEPS:
            self.steps.append((node, digest.copy().digest()))
        for input_ in inputs:
            digest.update(input_)
        return bytes(digest.digest())

    def _feed(self, digest: Any, value: Any, ancestors: _Ancestors) -> None:
        """Add a value to the digest; `ancestors` contain it, outermost first."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            _add_label(digest, type(value).__name__, repr(value))
            return
        for depth, ancestor in enumerate(reversed(ancestors)):
            if value is ancestor:  # a function may refer to itself
                _add_label(digest, "loop", str(depth))
                return
        ancestors = (*ancestors, value)
        match value:
            case Node():
                digest.update(self._digest_plan(value, ancestors))
            case CacheKey():
                _add_label(digest, "cache key", "")
            case types.ModuleType():
                _add_label(digest, "module", value.__name__)
            case np.ndarray() if not value.dtype.hasobject:
                _add_label(digest, "array", f"{value.dtype.descr}{value.shape}")
                digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            case np.ndarray():
                _add_label(digest, "array", f"{value.dtype.descr}{value.shape}")
                self._feed(digest, value.tolist(), ancestors)
            case np.generic():
                _add_label(digest, "scalar", f"{value.dtype.descr}{value!r}")
            case list() | tuple():
                _add_label(digest, type(value).__name__, str(len(value)))
                for item in value:
                    self._feed(digest, item, ancestors)
            case Mapping():
                _add_label(digest, "mapping", str(len(value)))
                self._feed_unordered(digest, value.items(), ancestors)
            case set() | frozenset():
                _add_label(digest, "set", str(len(value)))
                self._feed_unordered(digest, value, ancestors)
            case types.CodeType():
                self._feed_code(digest, value, ancestors)
            case type():
                self._feed_class(digest, value, ancestors)
            case _ if isinstance(value, _CALLABLE):
                self._feed_callable(digest, value, ancestors)
            case _:
                self._feed_object(digest, value, ancestors)

    def _feed_unordered(self, digest: Any, items: Iterable[Any], ancestors: _Ancestors) -> None:
        """Add items in an order independent of the process: sorted by digest."""
        parts = []
        for item in items:
            part = _new_digest()
            self._feed(part, item, ancestors)
            parts.append(part.digest())
        for part_digest in sorted(parts):
            digest.update(part_digest)

    def _feed_callable(self, digest: Any, value: Any, ancestors: _Ancestors) -> None:
        match value:
            case types.FunctionType():
                self._feed_function(digest, value, ancestors)
            case types.MethodType():
                _add_label(digest, "method", "")
                self._feed(digest, (value.__func__, value.__self__), ancestors)
            case types.BuiltinFunctionType():
                _add_label(digest, "builtin", value.__qualname__)
                self._feed(digest, value.__self__, ancestors)
            case functools.partial():
                _add_label(digest, "partial", "")
                self._feed(digest, (value.func, value.args, value.keywords), ancestors)
            case property():
                _add_label(digest, "property", "")
                self._feed(digest, (value.fget, value.fset), ancestors)
            case staticmethod() | classmethod():
                _add_label(digest, type(value).__name__, "")
                self._feed(digest, value.__func__, ancestors)
            case _:  # a ufunc or a slot of a class: identified by name
                _add_label(digest, type(value).__name__, value.__name__)

    def _feed_function(self, digest: Any, fn: types.FunctionType, ancestors: _Ancestors) -> None:
        _add_label(digest, "function", str(fn.__globals__.get("__name__")))
        self._feed_code(digest, fn.__code__, ancestors)
        self._feed(digest, (fn.__defaults__, fn.__kwdefaults__), ancestors)
        for cell in fn.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that is assigned later
                _add_label(digest, "empty", "")
            else:
                self._feed(digest, value, ancestors)
        for name in sorted(global_names(fn.__code__)):
            value = fn.__globals__.get(name, fn)
            if value is fn:  # not a global, or the function itself
                continue
            if isinstance(value, types.FunctionType) and value.__module__ != fn.__module__:
                # Functions of other modules are identified by name; the user's own by their code.
                _add_label(digest, "name", f"{value.__module__}.{value.__qualname__}")
            else:
                self._globals[id(fn.__globals__), name] = fn.__globals__

    def _feed_code(self, digest: Any, code: types.CodeType, ancestors: _Ancestors) -> None:
        _add_label(digest, "code", "")
        digest.update(code.co_code)
        for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_consts):
            self._feed(digest, part, ancestors)

    def _feed_class(self, digest: Any, cls: type, ancestors: _Ancestors) -> None:
        _add_label(digest, "class", f"{cls.__module__}.{cls.__qualname__}")
        if cls.__module__ not in ("__main__", "__mp_main__"):
            return
        # A class in the user's script: another script may have a class with this name.
        self._feed(digest, cls.__bases__, ancestors)
        attributes = {
            name: value
            for name, value in vars(cls).items()
            if name not in _IMPLICIT_CLASS_ATTRIBUTES
        }
        self._feed(digest, attributes, ancestors)

    def _feed_object(self, digest: Any, value: Any, ancestors: _Ancestors) -> None:
        cls = type(value)
        plan = getattr(value, "plan", None)
        if isinstance(plan, Node):
            # A dataset is its plan; the number of iterations so far is irrelevant.
            _add_label(digest, "dataset", "")
            digest.update(self._digest_plan(plan, ancestors))
        elif dataclasses.is_dataclass(value):
            # Computed fields follow from the others.
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            self._feed(digest, (cls, fields), ancestors)
        elif _is_plain(cls) and hasattr(value, "__dict__"):
            self._feed(digest, (cls, vars(value)), ancestors)
        else:
            try:
                pickled = cloudpickle.dumps(value, protocol=5)
            except Exception:  # `serialize` reports it with a better message
                self._feed(digest, cls, ancestors)
            else:
                digest.update(pickled)


def global_names(code: types.CodeType) -> set[str]:
    """Return the names that a function and its inner functions may look up in their module."""
    names: set[str] = set()
    pending = [code]
    while pending:
        current = pending.pop()
        names.update(current.co_names)
        pending.extend(const for const in current.co_consts if isinstance(const, types.CodeType))
    return names


def _is_plain(cls: type) -> bool:
    """Return whether a class uses the default pickling methods."""
    return all(
        getattr(cls, name, None) is getattr(object, name)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )


def _add_label(digest: Any, kind: str, text: str) -> None:
    digest.update(f"{kind}:{len(text)}:{text};".encode())


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


_Ancestors: TypeAlias = tuple[object, ...]
"""The values being added, outermost first."""

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

_IMPLICIT_CLASS_ATTRIBUTES = frozenset(
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
