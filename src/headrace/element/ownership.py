"""Ownership: the consumer owns the elements that an iterator yields.

`take_ownership` normalizes a user function's return value like `normalize`, and ensures that only
the caller can reach the result's memory.

Rule 1. Memory that is provably unshared is kept: an array that a function just created is not
        copied.
Rule 2. Memory that may be shared is copied: a reused buffer, a row of a captured table, a read-only
        or memory-mapped array, memory of another library, an array that occurs twice, and all
        doubtful cases.
Rule 3. An array is unshared if the containers around it are, if only its container refers to it,
        and if it owns its memory (or is a view of an array with no other references). CPython
        counts references; the count of an unshared object is measured below at import, not assumed.
        If it can't be measured (other interpreters, free-threaded builds), all arrays are copied.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from typing import Any
from weakref import getweakrefcount

import numpy as np
from numpy.typing import NDArray

from headrace.element.normalize import NORMAL_KINDS, NORMAL_SCALARS, normalize
from headrace.element.structure import (
    Element,
    NodeKind,
    container_kind,
    field_names,
    flatten,
    rebuild,
    unflatten,
)
from headrace.errors import InvalidElementError, describe_error

__all__ = ["copy_element", "take_ownership"]

_getrefcount: Callable[[object], int] = getattr(sys, "getrefcount", lambda value: 0)
_ndarray = np.ndarray
_NONE_TYPE = type(None)
_SCALARS = NORMAL_SCALARS - {_NONE_TYPE}
#: Conversions of Python numbers; ints beyond int64 are left to `normalize`.
_NUMBERS: dict[type, Any] = {
    int: np.int64,
    float: np.float64,
    bool: np.bool_,
    complex: np.complex128,
}
# Bits of `ndarray.flags.num`, which replaces four attribute lookups.
_CONTIGUOUS, _OWN_AND_WRITEABLE, _WRITEABLE = 0x3, 0x404, 0x400

#: Reference counts of unshared objects, as seen by `_is_unshared`. In `take_ownership`: the value,
#: an item of a flat dict, an item of a flat tuple, the tuple itself. In `_take`: the value, an item
#: of a dict, an item of a tuple. In `_is_private`: the base of a view. Negative during measurement;
#: 0 if it failed, which no count equals, so that everything is copied.
_at_top, _in_dict, _in_tuple, _while_iterated, _below_top, _as_value, _as_part, _as_base = range(
    -1, -9, -1
)
_baseline_refcounts: dict[int, set[int]] = {}


def take_ownership(value: Any) -> Element:
    """Return a value as a normal element whose arrays and containers only the caller can reach.

    Call it with a temporary, as in `take_ownership(function(x))`: a variable that refers to the
    value counts as another owner.

    Raises:
        InvalidElementError: If the value is not an element, or is None; the message names the
            component.
    """
    cls = type(value)
    if cls in _SCALARS:
        return value
    if cls in _NUMBERS:
        try:
            return _NUMBERS[cls](value)
        except OverflowError:
            return copy_element(normalize(value))  # an int that does not fit into int64
    # Common cases without another call: flat dicts or tuples whose items are (nearly) normal.
    key = item = None
    if cls is dict:
        if _is_unshared(value, _at_top):
            try:
                for key, item in value.items():
                    kind = type(item)
                    if type(key) is not str:
                        break
                    if kind in _SCALARS:
                        continue
                    if kind in _NUMBERS:
                        value[key] = _NUMBERS[kind](item)  # the dict is unshared
                    elif not (kind is _ndarray and _is_private(item, _in_dict)):
                        break
                else:
                    return value
            except OverflowError:
                pass  # an int that does not fit into int64
    elif cls is tuple:
        # Tuples are immutable: another reference to this one shares only the arrays in it.
        for item in value:
            kind = type(item)
            if kind in _SCALARS:
                continue
            if not (
                kind is _ndarray
                and _is_private(item, _in_tuple)
                and _is_unshared(value, _while_iterated)
            ):
                break
        else:
            return value
    elif cls is _ndarray:
        if _is_private(value, _at_top):
            return value
    elif value is None:
        raise InvalidElementError(
            "None is not an element; did the function forget `return`, or the generator a value "
            "after `yield`?"
        )
    item = None  # else the reference would count as another owner
    try:
        return _take(value, _below_top)
    except (InvalidElementError, OverflowError):
        # Repeat with `normalize`, which names the component in the error.
        return copy_element(normalize(value))
    except Exception as error:
        raise InvalidElementError(
            f"the value of type {cls.__name__} cannot be read as an element: "
            f"{describe_error(error)}"
        ) from error


def _take(value: Any, alone: int) -> Any:
    cls = type(value)
    if cls is dict:
        # On its own line: an argument of a pending call counts as a reference.
        below = _as_value if _is_unshared(value, alone) else 0
        return _take_values(value, below)
    if cls is tuple:
        below = _as_part if _is_unshared(value, alone) else 0
        return tuple(_take_parts(list(value), below))
    if cls in NORMAL_SCALARS:
        return value
    if cls in _NUMBERS:
        return _NUMBERS[cls](value)
    if cls is _ndarray:
        if _is_private(value, alone):
            return value
        result = normalize(value)
        # Arrays of text are new after normalization.
        return result if result is not value and type(result) is _ndarray else _copy_leaf(result)
    kind = container_kind(cls)
    if kind == NodeKind.LEAF:
        result = normalize(value)
        # A list becomes a new array; `__array__` may return memory of another library.
        return result if cls is list else copy_element(result)
    # Other containers may hold references that no count shows: copy all their arrays.
    if kind == NodeKind.DICT:
        return _take_values(dict(value), 0)
    if kind == NodeKind.TUPLE:
        return tuple(_take_parts(list(value), 0))
    if kind == NodeKind.NAMEDTUPLE:
        below = _as_part if _is_unshared(value, alone) else 0
        return tuple.__new__(cls, _take_parts(list(value), below))
    names = field_names(cls)
    return rebuild(cls, names, _take_parts([getattr(value, name) for name in names], 0))


def _take_values(value: dict[Any, Any], alone: int) -> dict[Any, Any]:
    result = {}
    for key, part in value.items():
        if type(key) is not str and type(key) is not int:
            normalize({key: 0})  # raises the error for the key
        cls = type(part)
        if cls in NORMAL_SCALARS:
            result[key] = part
        elif cls in _NUMBERS:
            result[key] = _NUMBERS[cls](part)
        else:
            result[key] = _take(part, alone)
    return result


def _take_parts(parts: list[Any], alone: int) -> list[Any]:
    result = []
    for part in parts:
        cls = type(part)
        if cls in NORMAL_SCALARS:
            result.append(part)
        elif cls in _NUMBERS:
            result.append(_NUMBERS[cls](part))
        else:
            result.append(_take(part, alone))
    return result


def copy_element(element: Element) -> Element:
    """Return a normal element in new containers and arrays."""
    cls = type(element)
    if cls is _ndarray:
        return element.copy("K")
    if cls in _SCALARS:
        return element
    leaves, structure = flatten(element)
    return unflatten(structure, [_copy_leaf(leaf) for leaf in leaves])


def _copy_leaf(leaf: Any) -> Any:
    if type(leaf) is _ndarray:
        # "K" keeps the memory order of the axes, which copies fastest.
        return leaf.copy("K")
    # A structured scalar may be a view of an array; other scalars are immutable.
    return leaf.copy() if isinstance(leaf, np.void) else leaf


def _is_unshared(value: Any, alone: int) -> bool:
    """Return whether nothing refers to `value` but its holder here."""
    count = _getrefcount(value)
    if count == alone:
        return True
    if alone < 0:
        _baseline_refcounts.setdefault(alone, set()).add(count)
    return alone < 0


def _is_private(array: NDArray[Any], alone: int) -> bool:
    """Return whether an array is a valid leaf in memory that nothing else can reach."""
    # `_is_unshared` inlined, because it runs for nearly every array.
    count = _getrefcount(array)
    if count != alone:
        if alone >= 0:
            return False
        _baseline_refcounts.setdefault(alone, set()).add(count)
    if not array.ndim or array.dtype.kind not in NORMAL_KINDS or getweakrefcount(array):
        return False
    flags = array.flags.num
    if flags & _OWN_AND_WRITEABLE == _OWN_AND_WRITEABLE:
        return True
    base: Any = array.base
    return (
        flags & _WRITEABLE != 0
        and type(base) is _ndarray
        and _is_unshared(base, _as_base)
        and base.flags.num & _OWN_AND_WRITEABLE == _OWN_AND_WRITEABLE
        and not getweakrefcount(base)
        and (flags & _CONTIGUOUS != 0 or not _overlaps_itself(array))
    )


def _overlaps_itself(array: NDArray[Any]) -> bool:
    """Return whether two entries of an array may share memory."""
    reach = array.itemsize
    axes = zip(map(abs, array.strides), array.shape, strict=True)
    for stride, length in sorted(axis for axis in axes if axis[1] > 1):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def _measure_refcounts() -> None:
    """Measure the reference counts of unshared objects."""
    global _at_top, _in_dict, _in_tuple, _while_iterated, _below_top, _as_value, _as_part, _as_base

    def make() -> NDArray[Any]:
        return np.empty(2)

    def view() -> NDArray[Any]:
        return np.empty(4)[1:3]

    # Repeat until an interpreter that specializes code at run time has done so.
    for _ in range(16):
        take_ownership(make())
        take_ownership({"x": make()})
        take_ownership((make(),))
        take_ownership({"x": {"y": make(), "z": make()}, "w": make()})
        take_ownership(((make(), make()), make()))
        take_ownership(view())
    trusted = sys.implementation.name == "cpython" and not sysconfig.get_config_var(
        "Py_GIL_DISABLED"
    )
    measured = [_baseline_refcounts.get(depth, set()) for depth in range(-1, -9, -1)]
    counts = [max(found) if trusted and len(found) == 1 else 0 for found in measured]
    _at_top, _in_dict, _in_tuple, _while_iterated, _below_top, _as_value, _as_part, _as_base = (
        counts
    )


_measure_refcounts()
