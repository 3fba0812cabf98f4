"""The objects of a checkpoint, by path: "model/layers/0/weights".

A dict, list or tuple, another `Checkpoint`, and whatever has `variables` (a metric) is looked into;
everything else is saved as one of the kinds of `KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.variable import Variable
from headrace.parameter_server.arrays import as_array
from headrace.parameter_server.checkpoint_format import (
    ArrayEntry,
    Entry,
    OptimizerEntry,
    StateEntry,
    TableEntry,
    ValueEntry,
    VariableEntry,
)
from headrace.parameter_server.dtypes import name_of
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.table import EmbeddingTable
from headrace.parameter_server.variable import ServerVariable

__all__ = ["Leaf", "describe", "has_state", "is_object", "leaves", "local_array", "refusal"]


class Leaf(NamedTuple):
    """One object, and how another takes its place.

    Attributes:
        path: Where it is.
        value: The object.
        replace: Puts another value there; raises TypeError where that cannot be.
    """

    path: str
    value: Any
    replace: Callable[[Any], None]


def leaves(objects: dict[str, Any]) -> dict[str, Leaf]:
    """Return all objects by their paths.

    Raises:
        TypeError: One is of a kind that is not saved.
    """
    found: dict[str, Leaf] = {}
    for leaf in _walk("", objects, ()):
        found[leaf.path] = leaf
    return found


def _walk(path: str, value: Any, within: tuple[int, ...]) -> Iterator[Leaf]:
    children = _children(value)
    if children is None:
        raise AssertionError(path)
    if id(value) in within:
        raise ValueError(f"{path or 'the checkpoint'} contains itself")
    for key, child in children:
        name = str(key).replace("%", "%25").replace("/", "%2F")
        below = f"{path}/{name}" if path else name
        if _children(child) is not None:
            yield from _walk(below, child, (*within, id(value)))
        else:
            _check_kind(below, child)
            yield Leaf(below, child, _replacing(below, value, key))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what is in a container by its keys; None: it is none."""
    inside = getattr(value, "checkpoint_objects", None)
    if isinstance(inside, dict):
        return list(inside.items())
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, ServerVariable | Variable | EmbeddingTable | Optimizer) or _has_state(
        value
    ):
        return None
    variables = getattr(value, "variables", None)
    return list(enumerate(variables)) if isinstance(variables, list | tuple) else None


def _replacing(path: str, container: Any, key: Any) -> Callable[[Any], None]:
    inside = getattr(container, "checkpoint_objects", container)

    def replace(value: Any) -> None:
        if not isinstance(inside, dict | list):
            raise TypeError(
                f"{path!r} cannot be restored: it is in a {type(container).__name__}, which cannot "
                "be changed; use a list, or an array"
            )
        inside[key] = value

    return replace


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )


def _check_kind(path: str, value: Any) -> None:
    if isinstance(value, ServerVariable | Variable | EmbeddingTable | Optimizer) or (
        value is None
        or isinstance(value, int | float | complex | str | np.generic | np.ndarray)
        or _has_state(value)
        or hasattr(value, "__array__")
    ):
        return
    raise TypeError(
        f"{path!r} is a {type(value).__name__}, which a checkpoint does not save: it saves "
        "variables, tables, optimizers, iterators and metrics, arrays, numbers and strings, and "
        "dicts and lists of them"
    )


def local_array(value: Any) -> NDArray[Any] | None:
    """Return what is saved of an object as an array here; None: it is saved otherwise."""
    if isinstance(value, ServerVariable | EmbeddingTable | Optimizer):
        return None
    if isinstance(value, Variable):
        return np.asarray(value.read())
    if isinstance(value, str | bool) or value is None or _has_state(value):
        return None
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return None
    if isinstance(value, float) and type(value) is float and math.isfinite(value):
        return None
    found = as_array(value)
    name_of(found.dtype)
    return found


def describe(leaf: Leaf, counters: dict[str, int]) -> Entry:
    """Return what a manifest says of an object."""
    value = leaf.value
    match value:
        case ServerVariable():
            return VariableEntry(value.name, value.shape, name_of(value.dtype))
        case EmbeddingTable():
            return TableEntry(value.name, value.dim, name_of(value.dtype))
        case Optimizer():
            taken = counters.get(f"{value.name}/iterations", 0)
            return OptimizerEntry(value.name, type(value).__name__, taken)
    array = local_array(value)
    if array is not None:
        return ArrayEntry(leaf.path, array.shape, name_of(array.dtype))
    if _has_state(value):
        return StateEntry(value.get_state())
    return ValueEntry(value)


def is_object(leaf: Leaf) -> bool:
    """Whether it stays the same object while its value changes: no number and no array."""
    return _kind(leaf.value) != _ARRAY


def has_state(leaf: Leaf) -> bool:
    """Whether it is saved by its `get_state`."""
    return _kind(leaf.value) == _STATE


def refusal(leaf: Leaf, entry: Entry) -> str:
    """Return why an object cannot be restored from what was saved; "": it can."""
    value = leaf.value
    here, saved = _kind(value), _KINDS[type(entry)]
    if here != saved and {here, saved} not in _CONVERTIBLE:
        return f"{leaf.path!r} is {here} here, and was saved as {saved}"
    if isinstance(entry, TableEntry):
        dtype = name_of(value.dtype)
        if (value.dim, dtype) != (entry.dim, entry.dtype):
            return (
                f"table {leaf.path!r} has rows of {value.dim} {dtype} here, and of {entry.dim} "
                f"{entry.dtype} in the checkpoint"
            )
    if isinstance(entry, VariableEntry | ArrayEntry) and (
        here in (_VARIABLE, _LOCAL) or isinstance(value, np.ndarray)
    ):
        shape, dtype = tuple(value.shape), name_of(value.dtype)
        if shape != entry.shape:
            return f"{leaf.path!r} has shape {shape} here, and {entry.shape} in the checkpoint"
        if dtype != entry.dtype:
            return f"{leaf.path!r} has dtype {dtype} here, and {entry.dtype} in the checkpoint"
    if isinstance(entry, OptimizerEntry) and type(value).__name__ != entry.kind:
        return (
            f"the optimizer {leaf.path!r} is {type(value).__name__} here, and {entry.kind} in the "
            "checkpoint"
        )
    return ""


_VARIABLE, _LOCAL, _ARRAY = "a variable on parameter servers", "a variable", "an array or number"
_TABLE, _OPTIMIZER, _STATE = "a table", "an optimizer", "an object with a state"

_KINDS: dict[type[Any], str] = {
    VariableEntry: _VARIABLE,
    TableEntry: _TABLE,
    OptimizerEntry: _OPTIMIZER,
    ArrayEntry: _ARRAY,
    ValueEntry: _ARRAY,
    StateEntry: _STATE,
}
_CONVERTIBLE = ({_VARIABLE, _LOCAL}, {_VARIABLE, _ARRAY}, {_LOCAL, _ARRAY})


def _kind(value: Any) -> str:
    for kind, name in (
        (ServerVariable, _VARIABLE),
        (EmbeddingTable, _TABLE),
        (Optimizer, _OPTIMIZER),
        (Variable, _LOCAL),
    ):
        if isinstance(value, kind):
            return name
    return _STATE if _has_state(value) else _ARRAY
