"""The objects of a checkpoint, by path: "model/layers/0/weights".

A dict, list or tuple, another `Checkpoint`, and whatever has `variables` (a metric, a model of
Keras) is looked into; everything else is saved as one of the kinds of `_KINDS`.

What can be saved can be restored: an object that changes in place may be anywhere, a number, string
or other value that is replaced must be in a dict, a list or a `Checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.variable import Variable
from headrace.parameter_server.checkpoint_format import (
    ArrayEntry,
    Entry,
    OptimizerEntry,
    StateDictEntry,
    StateEntry,
    TableEntry,
    ValueEntry,
    VariableEntry,
    checksum_of,
)
from headrace.parameter_server.checkpoint_frameworks import (
    array_of,
    encode_state,
    form_of,
    has_state_dict,
    is_array,
    is_variable,
    kind_of_state,
    parameters_of,
    variables_of,
)
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.specs import name_of
from headrace.parameter_server.table import EmbeddingTable
from headrace.parameter_server.variable import ServerVariable

__all__ = [
    "Leaf",
    "changes_in_place",
    "describe",
    "describe_state_dict",
    "has_state",
    "holders",
    "is_object",
    "is_state_dict",
    "leaves",
    "local_array",
    "refusal",
]


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
        ValueError: A dict has two keys that are alike as strings, such as 1 and "1".
    """
    found: dict[str, Leaf] = {}
    for leaf in _walk("", objects, (), {}):
        found[leaf.path] = leaf
    return found


def holders(objects: dict[str, Any]) -> dict[str, str]:
    """Return the class and the number of variables of all that is saved by its variables, by path.

    Variables are matched by position, so those of another class would be taken for its own.
    """
    found: dict[str, str] = {}
    for _ in _walk("", objects, (), found):
        pass
    return found


def _walk(path: str, value: Any, within: tuple[int, ...], held: dict[str, str]) -> Iterator[Leaf]:
    children = _children(value)
    if children is None:
        raise AssertionError(path)
    if id(value) in within:
        raise ValueError(f"{path or 'the checkpoint'} contains itself")
    if not isinstance(value, dict | list | tuple) and not hasattr(value, "checkpoint_objects"):
        held[path] = (
            f"{type(value).__name__} of {len(children)} variable{'s' * (len(children) != 1)}"
        )
    keys: dict[str, Any] = {}
    for key, child in children:
        name = str(key).replace("%", "%25").replace("/", "%2F")
        below = f"{path}/{name}" if path else name
        if keys.setdefault(below, key) is not key:
            raise ValueError(
                f"{below!r} is the path of two objects, which have the keys {keys[below]!r} and "
                f"{key!r} in a dict: only one would be saved; rename one of them"
            )
        if _children(child) is not None:
            yield from _walk(below, child, (*within, id(value)), held)
        else:
            _check_kind(below, child, value)
            yield Leaf(below, child, _replacing(value, key))


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
    variables = variables_of(value)
    if variables is None and has_state_dict(value):
        return None
    if variables is None:
        variables = getattr(value, "variables", None)
    return list(enumerate(variables)) if isinstance(variables, list | tuple) else None


def _replacing(container: Any, key: Any) -> Callable[[Any], None]:
    inside = getattr(container, "checkpoint_objects", container)

    def replace(value: Any) -> None:
        inside[key] = value

    return replace


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )


def _check_kind(path: str, value: Any, container: Any) -> None:
    if changes_in_place(value):
        return
    if not (
        value is None
        or isinstance(value, int | float | complex | str | np.generic | np.ndarray)
        or is_array(value)
    ):
        raise TypeError(
            f"{path!r} is a {type(value).__name__}, which a checkpoint does not save: it saves "
            "variables, tables, optimizers, iterators and metrics, arrays, numbers and strings, "
            "objects of Keras and PyTorch, and dicts and lists of them"
        )
    if not isinstance(getattr(container, "checkpoint_objects", container), dict | list):
        raise TypeError(
            f"{path!r} is a {type(value).__name__} in a {type(container).__name__}, where it could "
            "never be restored: neither of them can be changed. Use a list or a dict in place of "
            f"the {type(container).__name__}, or a NumPy array or a variable in it"
        )


def changes_in_place(value: Any) -> bool:
    """Return whether a value is restored without another one in its place."""
    return (
        isinstance(value, ServerVariable | Variable | EmbeddingTable | Optimizer)
        or (isinstance(value, np.ndarray) and value.flags.writeable)
        or is_variable(value)
        or _has_state(value)
        or has_state_dict(value)
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
    if has_state_dict(value):
        return None
    found = array_of(value)
    name_of(found.dtype)
    return found


def describe_state_dict(leaf: Leaf) -> tuple[StateDictEntry, dict[str, NDArray[Any]]]:
    """Return what a manifest says of an object with a `state_dict`, and the arrays in it."""
    arrays: dict[str, NDArray[Any]] = {}

    def add(array: NDArray[Any]) -> str:
        key = f"{leaf.path}//{len(arrays)}"
        name_of(array.dtype)
        arrays[key] = np.array(array)  # training may go on while it is written
        return key

    state = encode_state(leaf.path, leaf.value.state_dict(), add)
    sums = {key: checksum_of({key: array}) for key, array in arrays.items()}
    entry = StateDictEntry(state, sums, kind_of_state(leaf.value), parameters_of(leaf.value))
    return entry, arrays


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


def is_state_dict(leaf: Leaf) -> bool:
    """Whether it is saved by its `state_dict`."""
    return _kind(leaf.value) == _STATE_DICT


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
        here in (_VARIABLE, _LOCAL) or isinstance(value, np.ndarray) or is_array(value)
    ):
        shape, dtype = form_of(value)
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
_STATE_DICT = "an object with a state_dict"

_KINDS: dict[type[Any], str] = {
    VariableEntry: _VARIABLE,
    TableEntry: _TABLE,
    OptimizerEntry: _OPTIMIZER,
    ArrayEntry: _ARRAY,
    ValueEntry: _ARRAY,
    StateEntry: _STATE,
    StateDictEntry: _STATE_DICT,
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
    if _has_state(value):
        return _STATE
    if is_variable(value):
        return _LOCAL
    return _STATE_DICT if has_state_dict(value) else _ARRAY
