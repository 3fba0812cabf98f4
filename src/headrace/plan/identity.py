"""Identity of a plan in saved states: a short JSON entry for each step as written.

The entries are a format: old states remain readable forever.

Rule 1. Steps and arguments that affect only performance are left out, and so are the user's file
        and line and the seeds of `Options`, since a state has its own.
Rule 2. Data in memory counts by shape and dtype, a function by its qualified name. Changed code is
        not a difference, but causes a warning (`describe_changed_functions`).
Rule 3. A source that runs a plan remotely counts as that plan.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

from headrace.element.spec import ArraySpec
from headrace.element.structure import Structure
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.traverse import merged_options, walk
from headrace.plan.user_function import step_name

__all__ = [
    "Entry",
    "describe_changed_functions",
    "describe_first_difference",
    "identity",
    "identity_digest",
]

Entry: TypeAlias = list[Any]
"""JSON for one step: [kind, digest, readable arguments], plus a digest of its functions' code if
it has any. Only the kind and the digest decide whether two steps are the same."""


def identity(plan: Node) -> list[Entry]:
    """Return an entry for each step of a plan as written, inputs first.

    Takes about 20 µs per step, so keep the result.
    """
    deterministic = merged_options(plan).deterministic
    return [_entry(node, deterministic) for node in _steps(plan)]


def identity_digest(plan: Node) -> str:
    """Return 16 hexadecimal digits for all of `identity`, as used for nested plans in states."""
    return _digest([entry[:2] for entry in identity(plan)])


def describe_first_difference(saved: Sequence[Sequence[Any]], plan: Node) -> str | None:
    """Return a description of the first step in which a plan differs from a saved identity.

    Args:
        saved: Result of `identity` for the plan of the state.
        plan: The plan as written that will resume from the state.
    """
    for number, (old, new, node) in enumerate(_pair_steps(saved, plan), 1):
        if new is None:
            assert old is not None
            return f"step {number}, {old[0]}, is missing"
        step = _format_step_name(number, new, node)
        if old is None:
            return f"{step}, was added"
        if old[0] != new[0]:
            return f"{step}, was {old[0]} before"
        if old[1] != new[1]:
            return f"{step}: {_describe_difference(old, new)}"
    return None


def describe_changed_functions(saved: Sequence[Sequence[Any]], plan: Node) -> list[str]:
    """Return a message for each step whose functions had different code when `saved` was made.

    Code is compared only if both were made by the same version of Python.
    """
    version = _python()
    return [
        f"{_format_step_name(number, new, node)}: the code of its function has changed"
        for number, (old, new, node) in enumerate(_pair_steps(saved, plan), 1)
        if old is not None and new is not None and len(old) > 3 and len(new) > 3
        if old[3] != new[3] and str(old[3]).startswith(version)
    ]


def _pair_steps(
    saved: Sequence[Sequence[Any]], plan: Node
) -> Iterator[tuple[Sequence[Any] | None, Entry | None, Node | None]]:
    deterministic = merged_options(plan).deterministic
    for old, node in zip_longest(saved, _steps(plan)):
        yield old, None if node is None else _entry(node, deterministic), node


def _steps(plan: Node) -> Iterator[Node]:
    for node in walk(plan):
        remote_plan = node.source.remote_plan if isinstance(node, FromSource) else None
        if remote_plan is not None:
            yield from _steps(remote_plan)
        elif not node.is_transparent:
            yield node


def _format_step_name(number: int, entry: Entry, node: Node | None) -> str:
    name = entry[0] if node is None else step_name(node, entry[0])
    return f"step {number}, {name}"


def _describe_difference(old: Sequence[Any], new: Entry) -> str:
    before = old[2] if len(old) > 2 and isinstance(old[2], dict) else {}
    for name, value in new[2].items():
        if name in before and before[name] != value:
            return f"{name} was {before[name]}, is {value}"
        if name not in before:
            return f"{name} is {value}"
    for name, value in before.items():
        if name not in new[2]:
            return f"{name} was {value}"
    return "its arguments have changed"


# --- Entry of a step ------------------------------------------------------------------------------


def _entry(node: Node, deterministic: bool | None) -> Entry:
    kind, arguments = _arguments(node, deterministic)
    codes = [code for value in arguments.values() for code in _codes(value)]
    plain = {name: _to_json(value) for name, value in arguments.items()}
    entry: Entry = [kind, _digest([kind, plain]), _summarize_arguments(arguments)]
    if codes:
        entry.append(f"{_python()}:{_digest_of_code(codes)}")
    return entry


def _arguments(node: Node, deterministic: bool | None) -> tuple[str, dict[str, Any]]:
    if isinstance(node, FromSource):
        return _source_arguments(node.source)
    arguments = {
        name: value
        for name, value in node.parameters().items()
        if name not in node.performance_fields
    }
    if "deterministic" in arguments:
        del arguments["deterministic"]
        # Only a request that frees the order changes the stream.
        if node.allows_unordered(deterministic):
            arguments["deterministic"] = False
    return node.kind, arguments


def _source_arguments(source: Any) -> tuple[str, dict[str, Any]]:
    """Return a source's kind and arguments."""
    kind: str = source.saved_as or type(source).__qualname__
    speed_only: tuple[str, ...] = source.performance_fields
    if not dataclasses.is_dataclass(source):
        return kind, {"size": source.size, "element_spec": source.element_spec}
    return kind, {
        field.name: getattr(source, field.name)
        for field in dataclasses.fields(source)
        if field.init and not field.name.startswith("_") and field.name not in speed_only
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _to_json(value: Any) -> Any:
    """Return the relevant part of a value as JSON that is the same on every machine, forever."""
    match value:
        case None | bool() | str():
            return value
        case int() | np.integer():
            return int(value)
        case float() | np.floating():
            return {"float": float(value).hex()}
        case bytes():
            return {"bytes": value.hex()}
        case np.ndarray() | np.generic():
            return {
                "array": [
                    _dtype_name(value.dtype) + _describe_object_array(value),
                    list(value.shape),
                ]
            }
        case np.dtype():
            return {"dtype": _dtype_name(value)}
        case ArraySpec():
            return {"spec": [_dtype_name(value.dtype), list(value.shape)]}
        case Structure():
            return {"structure": value.paths}
        case Node():
            return {"plan": identity_digest(value)}
        case Mapping():
            return {"map": sorted(([_to_json(k), _to_json(v)] for k, v in value.items()), key=str)}
        case tuple() if hasattr(value, "_fields"):
            pairs = zip(value._fields, value, strict=True)
            return {type(value).__qualname__: {name: _to_json(item) for name, item in pairs}}
        case list() | tuple():
            return [_to_json(item) for item in value]
        case set() | frozenset():
            return {"set": sorted((_to_json(item) for item in value), key=str)}
        case type():
            return {"type": value.__qualname__}
        case _ if callable(value):
            function = {"function": _function_name(value)}
            # Of functions that steps make: arguments of the step, besides the user's function.
            if hasattr(type(value), "saved_arguments"):
                function["arguments"] = _to_json(value.saved_arguments)
            return function
        case _ if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return {
                type(value).__qualname__: {f.name: _to_json(getattr(value, f.name)) for f in fields}
            }
        case _ if isinstance(getattr(value, "plan", None), Node):  # a dataset
            return _to_json(value.plan)
    return {"object": type(value).__qualname__}


def _dtype_name(dtype: np.dtype[Any]) -> str:
    # The length of the longest string is not a property of the data's type.
    return dtype.kind if dtype.kind in "SUO" else dtype.str


def _describe_object_array(value: np.ndarray[Any, Any] | np.generic) -> str:
    """Return the type of an object array's first element, to tell str from bytes."""
    if value.dtype.kind != "O" or not value.size:
        return ""
    return f" of {type(value.flat[0]).__qualname__}"


def _function_name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return _function_name(fn.func)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def _summarize_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as a few short JSON values."""
    shown: dict[str, Any] = {}
    remaining_length = _MAX_TEXT_LENGTH
    for name, value in arguments.items():
        if isinstance(value, bool | int | None):
            short: Any = value
        elif isinstance(value, np.ndarray):
            short = f"{value.dtype}{list(value.shape)}"
        elif callable(value):
            short = _function_name(value)
        else:
            short = str(value)[:_MAX_ARGUMENT_LENGTH]
        remaining_length -= len(name) + len(str(short))
        if remaining_length < 0:
            break
        shown[name] = short
    return shown


# --- Code of functions ----------------------------------------------------------------------------


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of the functions that an argument is or contains."""
    if isinstance(value, functools.partial):
        yield from _codes(value.func)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _codes(item)
    elif callable(value) and not isinstance(value, type):
        fn: Callable[..., Any] = getattr(value, "__func__", value)
        code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code


def _digest_of_code(codes: Sequence[types.CodeType]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    pending = list(codes)
    while pending:
        code = pending.pop()
        digest.update(code.co_code)
        digest.update(repr(code.co_names).encode())
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                pending.append(const)
            else:
                digest.update(_stable_text(const).encode())
    return digest.hexdigest()


def _stable_text(const: Any) -> str:
    # The order of a frozenset differs between processes.
    if isinstance(const, frozenset):
        return f"{{{sorted(map(_stable_text, const))}}}"
    return repr(const)


def _python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


_MAX_TEXT_LENGTH = 200
_MAX_ARGUMENT_LENGTH = 60
