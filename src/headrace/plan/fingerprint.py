"""Fingerprints: equal for plans that say the same, wherever and whenever they are made.

Users' functions are compared by their code and by what they hold, not by name, file or line, so
that two trainers that run the same script ask for the same job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from headrace.plan.buffering import CacheKey
from headrace.plan.node import Node

__all__ = ["fingerprint"]


def fingerprint(plan: Node) -> str:
    """Return 32 hexadecimal digits that tell this plan from others."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, plan, seen=[])
    return digest.hexdigest()


def _feed(digest: Any, value: object, seen: list[object]) -> None:
    """Add `value` to the digest; `seen` holds what is being fed, to stop at a function's loop."""
    if any(value is other for other in seen):
        digest.update(b"loop")
        return
    seen = [*seen, value]
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            digest.update(f"{type(value).__name__}:{value!r};".encode())
        case CacheKey() | types.ModuleType():
            digest.update(f"{getattr(value, '__name__', 'key')};".encode())
        case Node():
            digest.update(type(value).__name__.encode())
            for name, parameter in value.parameters().items():
                digest.update(name.encode())
                _feed(digest, parameter, seen)
            for node in value.inputs:
                _feed(digest, node, seen)
        case np.ndarray() if value.dtype != object:
            digest.update(f"array:{value.dtype.str}:{value.shape};".encode())
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        case types.FunctionType():
            _feed_function(digest, value, seen)
        case types.CodeType():
            for part in (value.co_code, value.co_names, value.co_consts, value.co_varnames):
                _feed(digest, part, seen)
        case list() | tuple():
            digest.update(f"{type(value).__name__}:{len(value)};".encode())
            for item in value:
                _feed(digest, item, seen)
        case Mapping():
            digest.update(f"map:{len(value)};".encode())
            for key in sorted(value, key=repr):
                _feed(digest, key, seen)
                _feed(digest, value[key], seen)
        case set() | frozenset():
            _feed(digest, sorted(value, key=repr), seen)
        case type() if value.__module__ != "__main__":
            digest.update(f"{value.__module__}.{value.__qualname__};".encode())
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            digest.update(type(value).__qualname__.encode())
            for field in dataclasses.fields(value):
                _feed(digest, getattr(value, field.name), seen)
        case _:
            digest.update(cloudpickle.dumps(value, protocol=5))


def _feed_function(digest: Any, fn: types.FunctionType, seen: list[object]) -> None:
    code = fn.__code__
    _feed(digest, code, seen)
    _feed(digest, fn.__defaults__, seen)
    _feed(digest, fn.__kwdefaults__, seen)
    for cell in fn.__closure__ or ():
        _feed(digest, cell.cell_contents, seen)
    for name in code.co_names:
        if name in fn.__globals__:
            held = fn.__globals__[name]
            # A function of an installed module is known by name; the user's own by its code.
            if isinstance(held, types.FunctionType) and held.__module__ != fn.__module__:
                digest.update(f"{held.__module__}.{held.__qualname__};".encode())
            else:
                _feed(digest, held, seen)
