"""Normalization: conversion of users' return values to arrays, scalars, bytes and str."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.dataset_leaf import DatasetLeaf
from headrace.element.structure import (
    Element,
    NodeKind,
    container_kind,
    describe_component,
    field_names,
    rebuild,
)
from headrace.errors import InvalidElementError

__all__ = [
    "NORMAL_KINDS",
    "NORMAL_SCALARS",
    "check_strings",
    "normalize",
]

#: Types that are valid leaves. Object, bytes and str scalars of NumPy are not among them.
NORMAL_SCALARS = frozenset(
    [cls for cls in np.sctypeDict.values() if not issubclass(cls, (np.flexible, np.object_))]
    + [bytes, str, type(None)]
)
#: Kinds of dtypes whose arrays are valid leaves.
NORMAL_KINDS = frozenset("biufcmM")


def normalize(element: Element) -> Element:
    """Return `element` with all leaves converted to supported types.

    Python numbers become NumPy scalars (int64, or uint64 if larger; float64, bool, complex128),
    lists become arrays, zero-dimensional arrays become scalars, arrays of dtype S or U become
    object arrays of bytes or str, and objects with `__array__` become arrays. Values that are
    normal already are returned as the same object, including containers.

    Raises:
        InvalidElementError: If a leaf has another type; the message names the component.
    """
    cls = type(element)
    if cls in NORMAL_SCALARS:
        return element
    if cls is np.ndarray:
        if element.ndim and element.dtype.kind in NORMAL_KINDS:
            return element
    elif cls is dict:
        # A flat dict of arrays is the common case: check it without another call.
        for key, value in element.items():
            value_cls = type(value)
            if type(key) is not str or not (
                value_cls in NORMAL_SCALARS
                or (value_cls is np.ndarray and value.ndim and value.dtype.kind in NORMAL_KINDS)
            ):
                break
        else:
            return element
    return _normalize(element, "")


def check_strings(array: NDArray[Any], path: str) -> type | None:
    """Return whether an object array contains bytes or str; None if it is empty.

    Raises:
        InvalidElementError: If it contains other types, or both.
    """
    found = set(map(type, array.ravel().tolist()))
    if len(found) == 1:
        (only,) = found
        if only is bytes or only is str:
            return only
    elif not found:
        return None
    names = ", ".join(sorted(cls.__name__ for cls in found))
    raise InvalidElementError(
        f"{describe_component(path)} is an object array of shape {array.shape} that contains "
        f"{names}; an object array may contain only bytes or only str: use a numeric dtype, or a "
        "tuple or dict for values of different kinds"
    )


def _normalize(value: Any, path: str) -> Any:
    cls = type(value)
    if cls in NORMAL_SCALARS:
        return value
    if cls is np.ndarray:
        return _normalize_array(value, path)
    convert = _CONVERSIONS.get(cls)
    if convert is not None:
        return convert(value, path)
    kind = container_kind(cls)
    if kind == NodeKind.LEAF:
        return _normalize_other(value, path)
    if isinstance(value, type):
        raise _unsupported_type_error(value, path)
    if kind == NodeKind.DICT:
        return _normalize_dict(value, path)
    if kind == NodeKind.TUPLE:
        parts = [_normalize(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return value if cls is tuple and _are_identical(parts, value) else tuple(parts)
    names = field_names(cls)
    if kind == NodeKind.NAMEDTUPLE:
        parts = [_normalize(v, f"{path}.{n}") for n, v in zip(names, value, strict=True)]
        return value if _are_identical(parts, value) else tuple.__new__(cls, parts)
    fields = [getattr(value, name) for name in names]
    parts = [_normalize(v, f"{path}.{n}") for n, v in zip(names, fields, strict=True)]
    return value if _are_identical(parts, fields) else rebuild(cls, names, parts)


def _are_identical(parts: Iterable[Any], values: Iterable[Any]) -> bool:
    return all(map(is_, parts, values))


def _normalize_dict(value: dict[Any, Any], path: str) -> dict[Any, Any]:
    changed = type(value) is not dict
    result = {}
    for key, item in value.items():
        if type(key) is not str and type(key) is not int:
            raise InvalidElementError(
                f"{describe_component(path)} is a dict with the key {key!r} of type "
                f"{type(key).__name__}; "
                "keys must be str or int"
            )
        part = _normalize(item, f"{path}[{key!r}]")
        changed = changed or part is not item
        result[key] = part
    return result if changed else value


def _normalize_array(array: NDArray[Any], path: str) -> Any:
    dtype = array.dtype
    if dtype.kind in "SUT":
        array = array.astype(object)
    elif dtype.kind == "O":
        types = set(map(type, array.ravel().tolist()))
        if types - {bytes, str}:
            # Instances of a subclass such as np.str_ are converted; others are rejected below.
            plain = np.empty(array.shape, object)
            plain.reshape(-1)[:] = [_plain_string(item) for item in array.ravel().tolist()]
            array = plain
        check_strings(array, path)
    elif dtype.hasobject:
        raise InvalidElementError(
            f"{describe_component(path)} has the dtype {dtype}, which holds Python objects; "
            "use numeric fields, or one component for each field"
        )
    return array if array.ndim else array[()]


def _plain_string(item: Any) -> Any:
    if isinstance(item, bytes):
        return bytes(item)
    return str(item) if isinstance(item, str) else item


def _from_int(value: int, path: str) -> Any:
    if -(1 << 63) <= value < 1 << 63:
        return np.int64(value)
    if 0 <= value < 1 << 64:
        return np.uint64(value)
    raise InvalidElementError(
        f"{describe_component(path)} is the integer {value}, which does not fit into 64 bits; "
        "use a float, or bytes"
    )


def _from_list(value: list[Any], path: str) -> Any:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            # Convert the list again: dtypes S and U would strip trailing NULs.
            array = np.array(value, object)
    except (ValueError, TypeError) as error:
        raise InvalidElementError(
            f"{describe_component(path)} is a list that cannot be converted to an array "
            f"({error}); a list is converted to an array, so its items must have the same shape; "
            "reshape them, or use a tuple for separate components"
        ) from error
    return _normalize_array(array, path)


_CONVERSIONS: dict[type, Callable[[Any, str], Any]] = {
    int: _from_int,
    float: lambda value, path: np.float64(value),
    bool: lambda value, path: np.bool_(value),
    complex: lambda value, path: np.complex128(value),
    list: _from_list,
    np.str_: lambda value, path: str(value),
    np.bytes_: lambda value, path: bytes(value),
    bytearray: lambda value, path: bytes(value),
    memoryview: lambda value, path: bytes(value),
}


#: For subclasses of Python's built-in types, such as members of an IntEnum.
_SUBCLASS_CONVERSIONS: dict[type, Callable[[Any, str], Any]] = {
    bytes: lambda value, path: bytes(value),
    str: lambda value, path: str.__str__(value),
    int: lambda value, path: _from_int(int(value), path),
    float: lambda value, path: np.float64(value),
    complex: lambda value, path: np.complex128(value),
}


def _normalize_other(value: Any, path: str) -> Any:
    """Normalize an instance of a type that is not in the tables."""
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidElementError(
            f"{describe_component(path)} is a masked array, whose mask would be lost; "
            "use array.filled(), or a tuple of array.data and array.mask"
        )
    if isinstance(value, np.generic) and not isinstance(value, (np.bytes_, np.str_)):
        # Structured scalars, and scalars of dtypes that other packages define.
        if value.dtype.hasobject:
            raise _unsupported_type_error(value, path)
        return value
    if isinstance(value, DatasetLeaf) and value._reads_window:
        return value
    for base, convert in _SUBCLASS_CONVERSIONS.items():
        if isinstance(value, base):
            return convert(value, path)
    if hasattr(value, "__array__") and not isinstance(value, type):
        try:
            array = np.asarray(value)
        except Exception as error:
            raise InvalidElementError(
                f"{describe_component(path)} is a {_type_name(value)} that cannot be converted "
                f"to a NumPy array: {error}"
            ) from error
        return _normalize_array(array, path)
    raise _unsupported_type_error(value, path)


def _type_name(value: Any) -> str:
    cls = type(value)
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def _unsupported_type_error(value: Any, path: str) -> InvalidElementError:
    name = _type_name(value)
    article = "an" if name.lstrip("_")[0] in "aeiouAEIOU" else "a"
    fix = next(
        (fix for known, fix in _HINTS_BY_MODULE.items() if name.startswith(known)),
        _SUPPORTED_VALUES_HINT,
    )
    return InvalidElementError(
        f"{describe_component(path)} is {article} {name}, which is not an element; {fix}"
    )


_SUPPORTED_VALUES_HINT = (
    "use arrays, numbers, bytes or str, nested in dicts, tuples, namedtuples or dataclasses"
)
#: Remedies for unsupported types, by the beginning of the type's name.
_HINTS_BY_MODULE = {
    "PIL.": "convert it to an array: np.asarray(image)",
    "headrace.data.": "a function that returns datasets belongs in flat_map() or interleave()",
    "generator": "convert its items to a list or an array, or use flat_map() and from_generator",
    "set": "sort it, and convert it to an array",
    "_io.": "read the file, and return its contents",
}
