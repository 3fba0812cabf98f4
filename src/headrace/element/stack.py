"""Elements to one stacked element and back: the arithmetic of batches.

A *stacked* element has the structure of its elements; each leaf got one axis in front, and bytes
and str became object arrays. `stack`, `concatenate` and `take` return fresh memory that the caller
owns; `unstack` and `slice_rows` return views.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.memory import fresh
from headrace.element.structure import Element, component, flatten, unflatten
from headrace.element.transpose import map_leaves, transpose, untranspose
from headrace.errors import InvalidElementError

__all__ = [
    "Stacked",
    "concatenate",
    "count",
    "join",
    "slice_rows",
    "stack",
    "stack_column",
    "take",
    "unstack",
]

Stacked: TypeAlias = Any
"""An element each of whose leaves has one axis more in front."""


def stack(elements: Sequence[Element]) -> Stacked:
    """Return `elements` as one stacked element of fresh arrays.

    Raises:
        ValueError: There are no elements.
        InvalidElementError: Structures, shapes or dtypes differ; the message names the component,
            the position of the odd element, and what would do.
    """
    if not len(elements):
        raise ValueError("elements is empty; at least one element is needed to know its structure")
    structure, columns = transpose(elements)
    leaves = [
        stack_column(column, path) for column, path in zip(columns, structure.paths, strict=True)
    ]
    return unflatten(structure, leaves)


def stack_column(values: Sequence[Any], path: str = "") -> NDArray[Any]:
    """Return the values of one leaf as one array with an axis in front.

    Raises:
        InvalidElementError: Shapes or dtypes differ, or a value is no leaf.
    """
    first = values[0]
    cls = type(first)
    if len(set(map(type, values))) != 1:
        return _stack_mixed(values, path)
    if cls is np.ndarray:
        return _stack_arrays(values, path)
    if cls is bytes or cls is str:
        return _object_array(values)
    if isinstance(first, np.generic):
        dtype = first.dtype
        if dtype.kind in "mMV":
            # One class, many dtypes: units and fields differ.
            return _stack_arrays([np.asarray(value) for value in values], path)
        return np.fromiter(values, dtype, len(values))
    raise InvalidElementError(
        f"{component(path)} is a {cls.__name__}, which cannot be batched; "
        "return arrays, numbers, bytes or str from map()"
    )


def unstack(stacked: Stacked, size: int) -> list[Element]:
    """Return the `size` elements of a stacked element; their arrays are views.

    Raises:
        InvalidElementError: A leaf does not have `size` rows.
    """
    leaves, structure = flatten(stacked)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim or len(leaf) != size:
            found = f"shape {leaf.shape}" if isinstance(leaf, np.ndarray) else repr(type(leaf))
            raise InvalidElementError(
                f"cannot take {component(path)} apart: it has {found}, and {size} rows are "
                "expected; give every component the same leading axis"
            )
    columns = [list(leaf) if leaf.ndim > 1 else _scalars(leaf) for leaf in leaves]
    return untranspose(structure, columns, size)


def concatenate(stacked: Sequence[Stacked]) -> Stacked:
    """Return the rows of all stacked elements, one after the other, in fresh arrays.

    Raises:
        ValueError: There is nothing to concatenate.
        InvalidElementError: Structures, dtypes or the shapes of rows differ.
    """
    if not len(stacked):
        raise ValueError("stacked is empty; at least one stacked element is needed")
    structure, columns = transpose(stacked)
    leaves = []
    for values, path in zip(columns, structure.paths, strict=True):
        first = values[0]
        for position, value in enumerate(values):
            if value.dtype != first.dtype:
                raise _odd_dtype(path, position, first.dtype, value.dtype)
            if value.shape[1:] != first.shape[1:]:
                raise _odd_shape(path, position, first.shape[1:], value.shape[1:])
        leaves.append(join(values, first.dtype))
    return unflatten(structure, leaves)


def take(stacked: Stacked, indices: Any) -> Stacked:
    """Return a fresh copy of the rows at `indices`; their axes replace the leading one."""
    return map_leaves(lambda leaf: np.take(leaf, indices, axis=0), stacked)


def slice_rows(stacked: Stacked, start: int, stop: int) -> Stacked:
    """Return the rows from `start` to `stop` - 1 as views."""
    return map_leaves(lambda leaf: leaf[start:stop], stacked)


def count(stacked: Stacked) -> int:
    """Return the number of rows: the leading length of the first leaf.

    Raises:
        InvalidElementError: There is no leaf, or the first one has no axis.
    """
    leaves, structure = flatten(stacked)
    if not leaves:
        raise InvalidElementError(
            "an element without any array has no number of rows; add a component to it"
        )
    shape = np.shape(leaves[0])
    if not shape:
        raise InvalidElementError(
            f"{component(structure.paths[0])} has no axis, so there are no rows to count; "
            "give every component a leading axis"
        )
    return int(shape[0])


def join(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the rows of all arrays in one fresh array; all are of `dtype` and of like rows."""
    rows = sum(map(len, arrays))
    # Into memory of ours: left to itself, NumPy turns big endian and padded dtypes into others.
    made = fresh((rows, *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=made)
    return made


_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


def _scalars(leaf: NDArray[Any]) -> list[Any]:
    return leaf.tolist() if leaf.dtype.kind == "O" else list(leaf)


def _object_array(values: Sequence[Any]) -> NDArray[Any]:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _stack_arrays(values: Sequence[NDArray[Any]], path: str) -> NDArray[Any]:
    first = values[0]
    shape, dtype = first.shape, first.dtype
    shapes, dtypes = list(map(_shape_of, values)), list(map(_dtype_of, values))
    # `count` compares by identity first, in C: one pass finds that there is nothing to find.
    if shapes.count(shape) != len(values):
        position = next(i for i, found in enumerate(shapes) if found != shape)
        raise _odd_shape(path, position, shape, shapes[position])
    if dtypes.count(dtype) != len(values):
        position = next(i for i, found in enumerate(dtypes) if found != dtype)
        raise _odd_dtype(path, position, dtype, dtypes[position])
    if not shape:
        made = np.zeros(len(values), dtype)
        for index, value in enumerate(values):
            made[index] = value
        return made
    return join(values, dtype).reshape(len(values), *shape)


def _stack_mixed(values: Sequence[Any], path: str) -> NDArray[Any]:
    """Stack values of several classes: scalars beside arrays without axes, or an error."""
    first = values[0]
    for position, value in enumerate(values):
        if isinstance(value, (np.ndarray, np.generic)) != isinstance(
            first, (np.ndarray, np.generic)
        ) or (isinstance(first, (bytes, str)) and type(value) is not type(first)):
            raise InvalidElementError(
                f"cannot batch {component(path)}: element 0 has a {type(first).__name__} and "
                f"element {position} a {type(value).__name__}; convert them to one kind with map()"
            )
    return _stack_arrays([np.asarray(value) for value in values], path)


def _odd_shape(
    path: str, position: int, expected: tuple[int, ...], found: tuple[int, ...]
) -> InvalidElementError:
    hint = (
        "pad or cut them in map(), so that all have one shape"
        if len(expected) == len(found)
        else "bring all elements to one number of axes with map()"
    )
    return InvalidElementError(
        f"cannot batch {component(path)}: element 0 has shape {expected} and "
        f"element {position} has shape {found}; {hint}"
    )


def _odd_dtype(path: str, position: int, expected: Any, found: Any) -> InvalidElementError:
    return InvalidElementError(
        f"cannot batch {component(path)}: element 0 has dtype {expected} and "
        f"element {position} has dtype {found}; convert with astype in map()"
    )
