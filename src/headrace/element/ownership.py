"""Ownership: an element that was yielded belongs to its consumer.

`owned` does what `normalize` does to a value that a user's function gave, and sees to it that
nobody but the receiver can reach the result's memory.

Rule 1. What is provably nobody else's is kept: no copy of an array that a function just made.
Rule 2. What may be shared is copied: a buffer that is used again, a row of a captured table, a
        read-only or mapped array, memory of another library, one array in two places; all that
        is in doubt.
Rule 3. An array is nobody else's if the containers around it are, if nothing but its container
        refers to it, and if it owns its memory (or is a view of an array that nothing else refers
        to). CPython counts references; how many there are of a thing that nobody else holds is
        measured below when this module is imported, not assumed. Where it cannot be measured
        (other interpreters, builds without the GIL), all arrays are copied.
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
    Kind,
    container_kind,
    field_names,
    flatten,
    rebuild,
    unflatten,
)
from headrace.errors import InvalidElementError, describe_error

__all__ = ["copied", "owned"]

_getrefcount: Callable[[object], int] = getattr(sys, "getrefcount", lambda value: 0)
_ndarray = np.ndarray
_NONE_TYPE = type(None)
_SCALARS = NORMAL_SCALARS - {_NONE_TYPE}
#: What Python's own numbers become; an int beyond int64 is left to `normalize`.
_NUMBERS: dict[type, Any] = {
    int: np.int64,
    float: np.float64,
    bool: np.bool_,
    complex: np.complex128,
}
# Bits of `ndarray.flags.num`: one attribute in place of four.
_CONTIGUOUS, _OWN_AND_WRITEABLE, _WRITEABLE = 0x3, 0x404, 0x400

#: How many references a thing has that nobody else holds, seen from `_is_unshared`. In `owned`:
#: the value, in a flat dict, in a flat tuple, that tuple. In `_own`: the value, in a dict, in a
#: tuple. In `_is_private`: the base of a view. Negative while it is being measured; 0 is never
#: found, so that everything is copied.
_at_top, _in_dict, _in_tuple, _while_iterated, _below_top, _as_value, _as_part, _as_base = range(
    -1, -9, -1
)
_measured: dict[int, set[int]] = {}


def owned(value: Any) -> Element:
    """Return a value as a normal element whose arrays and containers nobody else can reach.

    Call it with a temporary, as in `owned(function(x))`: a variable that holds the value as well
    counts as somebody else.

    Raises:
        InvalidElementError: It is not an element, or None; the message names the component.
    """
    cls = type(value)
    if cls in _SCALARS:
        return value
    if cls in _NUMBERS:
        try:
            return _NUMBERS[cls](value)
        except OverflowError:
            return copied(normalize(value))  # an int that int64 does not hold
    # The common cases stay in this frame: a flat dict or tuple of what is (nearly) normal already.
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
                        value[key] = _NUMBERS[kind](item)  # nobody else's dict
                    elif not (kind is _ndarray and _is_private(item, _in_dict)):
                        break
                else:
                    return value
            except OverflowError:
                pass  # an int that int64 does not hold
    elif cls is tuple:
        # A tuple does not change: whoever else holds it shares the arrays in it, no more.
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
    item = None  # or it would count as somebody else's
    try:
        return _own(value, _below_top)
    except (InvalidElementError, OverflowError):
        # Again the long way, which knows the name of the component.
        return copied(normalize(value))
    except Exception as error:
        raise InvalidElementError(
            f"the value of type {cls.__name__} cannot be read as an element: "
            f"{describe_error(error)}"
        ) from error


def _own(value: Any, alone: int) -> Any:
    cls = type(value)
    if cls is dict:
        # On a line of its own: an argument that waits for its call counts, too.
        below = _as_value if _is_unshared(value, alone) else 0
        return _own_values(value, below)
    if cls is tuple:
        below = _as_part if _is_unshared(value, alone) else 0
        return tuple(_own_parts(list(value), below))
    if cls in NORMAL_SCALARS:
        return value
    if cls in _NUMBERS:
        return _NUMBERS[cls](value)
    if cls is _ndarray:
        if _is_private(value, alone):
            return value
        made = normalize(value)
        # Arrays of text are new ones already.
        return made if made is not value and type(made) is _ndarray else _copied_leaf(made)
    kind = container_kind(cls)
    if kind == Kind.LEAF:
        made = normalize(value)
        # A list makes an array of its own; `__array__` may show memory of another library.
        return made if cls is list else copied(made)
    # Of other containers too much may be kept where no count shows it: all their arrays are copied.
    if kind == Kind.DICT:
        return _own_values(dict(value), 0)
    if kind == Kind.TUPLE:
        return tuple(_own_parts(list(value), 0))
    if kind == Kind.NAMEDTUPLE:
        below = _as_part if _is_unshared(value, alone) else 0
        return tuple.__new__(cls, _own_parts(list(value), below))
    names = field_names(cls)
    return rebuild(cls, names, _own_parts([getattr(value, name) for name in names], 0))


def _own_values(value: dict[Any, Any], alone: int) -> dict[Any, Any]:
    made = {}
    for key, part in value.items():
        if type(key) is not str and type(key) is not int:
            normalize({key: 0})  # which refuses it
        cls = type(part)
        if cls in NORMAL_SCALARS:
            made[key] = part
        elif cls in _NUMBERS:
            made[key] = _NUMBERS[cls](part)
        else:
            made[key] = _own(part, alone)
    return made


def _own_parts(parts: list[Any], alone: int) -> list[Any]:
    made = []
    for part in parts:
        cls = type(part)
        if cls in NORMAL_SCALARS:
            made.append(part)
        elif cls in _NUMBERS:
            made.append(_NUMBERS[cls](part))
        else:
            made.append(_own(part, alone))
    return made


def copied(element: Element) -> Element:
    """Return a normal element in fresh containers and arrays."""
    cls = type(element)
    if cls is _ndarray:
        return element.copy("K")
    if cls in _SCALARS:
        return element
    leaves, structure = flatten(element)
    return unflatten(structure, [_copied_leaf(leaf) for leaf in leaves])


def _copied_leaf(leaf: Any) -> Any:
    if type(leaf) is _ndarray:
        # "K" keeps the order of the axes in memory: a copy at full speed.
        return leaf.copy("K")
    # A structured scalar may show a row of an array; other scalars do not change.
    return leaf.copy() if isinstance(leaf, np.void) else leaf


def _is_unshared(value: Any, alone: int) -> bool:
    """Tell whether nothing refers to `value` but what holds it here."""
    count = _getrefcount(value)
    if count == alone:
        return True
    if alone < 0:
        _measured.setdefault(alone, set()).add(count)
    return alone < 0


def _is_private(array: NDArray[Any], alone: int) -> bool:
    """Tell whether an array is a leaf as it is, in memory that nobody else can reach."""
    # As in `_is_unshared`, in this frame: most arrays are asked this.
    count = _getrefcount(array)
    if count != alone:
        if alone >= 0:
            return False
        _measured.setdefault(alone, set()).add(count)
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
    """Tell whether two entries of an array may lie in the same memory."""
    reach = array.itemsize
    axes = zip(map(abs, array.strides), array.shape, strict=True)
    for stride, length in sorted(axis for axis in axes if axis[1] > 1):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def _measure() -> None:
    """Find out how many references a thing has that nobody else holds."""
    global _at_top, _in_dict, _in_tuple, _while_iterated, _below_top, _as_value, _as_part, _as_base

    def make() -> NDArray[Any]:
        return np.empty(2)

    def view() -> NDArray[Any]:
        return np.empty(4)[1:3]

    # Often enough for an interpreter that changes code as it runs to have done so.
    for _ in range(16):
        owned(make())
        owned({"x": make()})
        owned((make(),))
        owned({"x": {"y": make(), "z": make()}, "w": make()})
        owned(((make(), make()), make()))
        owned(view())
    trusted = sys.implementation.name == "cpython" and not sysconfig.get_config_var(
        "Py_GIL_DISABLED"
    )
    measured = [_measured.get(where, set()) for where in range(-1, -9, -1)]
    counts = [max(found) if trusted and len(found) == 1 else 0 for found in measured]
    _at_top, _in_dict, _in_tuple, _while_iterated, _below_top, _as_value, _as_part, _as_base = (
        counts
    )


_measure()
