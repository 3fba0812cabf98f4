"""Stacking of elements into batches, and its inverse.

A *stacked* element has the structure of its elements, each leaf has an additional leading axis, and
bytes and str become object arrays. `stack`, `concatenate` and `take` return new memory that the
caller owns; `unstack` and `slice_rows` return views.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.dataset_leaf import WINDOW_REMEDY, DatasetLeaf
from headrace.element.memory import allocate_array
from headrace.element.structure import Element, describe_component, flatten, unflatten
from headrace.element.transpose import map_leaves, transpose, untranspose
from headrace.errors import InvalidElementError

__all__ = [
    "StackedElement",
    "concatenate",
    "join",
    "num_rows",
    "slice_rows",
    "stack",
    "stack_column",
    "take",
    "unstack",
]

StackedElement: TypeAlias = Any
"""An element whose leaves each have an additional leading axis."""


def stack(elements: Sequence[Element]) -> StackedElement:
    """Return `elements` as one stacked element of new arrays.

    Raises:
        ValueError: If there are no elements.
        InvalidElementError: If structures, shapes or dtypes differ; the message names the
            component, the position of the differing element, and a remedy.
    """
    if not len(elements):
        raise ValueError("elements is empty; at least one element is needed to know its structure")
    structure, columns = transpose(elements)
    leaves = [
        stack_column(column, path) for column, path in zip(columns, structure.paths, strict=True)
    ]
    return unflatten(structure, leaves)


def stack_column(values: Sequence[Any], path: str = "") -> NDArray[Any]:
    """Return the values of one leaf as one array with a new leading axis.

    Raises:
        InvalidElementError: If shapes or dtypes differ, or a value is not a leaf.
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
            # One class with several dtypes, since units and fields may differ.
            return _stack_arrays([np.asarray(value) for value in values], path)
        return np.fromiter(values, dtype, len(values))
    remedy = "return arrays, numbers, bytes or str from map()"
    if isinstance(first, DatasetLeaf):
        remedy = f"`window` yields datasets: {WINDOW_REMEDY}"
    raise InvalidElementError(
        f"{describe_component(path)} is a {cls.__name__}, which cannot be batched; {remedy}"
    )


def unstack(stacked: StackedElement, size: int) -> list[Element]:
    """Return the `size` elements of a stacked element; their arrays are views.

    Raises:
        InvalidElementError: If a leaf does not have `size` rows.
    """
    leaves, structure = flatten(stacked)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim or len(leaf) != size:
            found = f"shape {leaf.shape}" if isinstance(leaf, np.ndarray) else repr(type(leaf))
            raise InvalidElementError(
                f"cannot split {describe_component(path)} along the first axis: it has {found}, "
                f"but {size} rows are expected; all components must have a leading axis of the "
                "same length"
            )
    columns = [list(leaf) if leaf.ndim > 1 else _scalars(leaf) for leaf in leaves]
    return untranspose(structure, columns, size)


def concatenate(stacked: Sequence[StackedElement]) -> StackedElement:
    """Return the rows of all stacked elements in order, in new arrays.

    Raises:
        ValueError: If `stacked` is empty.
        InvalidElementError: If structures, dtypes or the shapes of rows differ.
    """
    if not len(stacked):
        raise ValueError("stacked is empty; at least one stacked element is needed")
    structure, columns = transpose(stacked)
    leaves = []
    for values, path in zip(columns, structure.paths, strict=True):
        first = values[0]
        for position, value in enumerate(values):
            if value.dtype != first.dtype:
                raise _dtype_error(path, position, first.dtype, value.dtype)
            if value.shape[1:] != first.shape[1:]:
                raise _shape_error(path, position, first.shape[1:], value.shape[1:])
        leaves.append(join(values, first.dtype))
    return unflatten(structure, leaves)


def take(stacked: StackedElement, indices: Any) -> StackedElement:
    """Return a copy of the rows at `indices`, whose axes replace the leading one."""
    return map_leaves(lambda leaf: np.take(leaf, indices, axis=0), stacked)


def slice_rows(stacked: StackedElement, start: int, stop: int) -> StackedElement:
    """Return the rows from `start` to `stop` - 1 as views."""
    return map_leaves(lambda leaf: leaf[start:stop], stacked)


def num_rows(stacked: StackedElement) -> int:
    """Return the number of rows: the leading length of the first leaf.

    Raises:
        InvalidElementError: If there is no leaf, or the first one has no axis.
    """
    leaves, structure = flatten(stacked)
    if not leaves:
        raise InvalidElementError(
            "an element without arrays has no number of rows; add a component to it"
        )
    shape = np.shape(leaves[0])
    if not shape:
        raise InvalidElementError(
            f"{describe_component(structure.paths[0])} has no axes, so its rows cannot be "
            "counted; every component must have a leading axis"
        )
    return int(shape[0])


def join(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the rows of all arrays in one new array; dtypes and row shapes are equal."""
    rows = sum(map(len, arrays))
    # Allocated here, because NumPy would convert big-endian and padded dtypes to others.
    result = allocate_array((rows, *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=result)
    return result


_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


def _scalars(leaf: NDArray[Any]) -> list[Any]:
    return leaf.tolist() if leaf.dtype.kind == "O" else list(leaf)


def _object_array(values: Sequence[Any]) -> NDArray[Any]:
    result = np.empty(len(values), object)
    result[:] = values
    return result


def _stack_arrays(values: Sequence[NDArray[Any]], path: str) -> NDArray[Any]:
    first = values[0]
    shape, dtype = first.shape, first.dtype
    shapes, dtypes = list(map(_shape_of, values)), list(map(_dtype_of, values))
    # `list.count` compares by identity first, in C: the common case takes one fast pass.
    if shapes.count(shape) != len(values):
        position = next(i for i, found in enumerate(shapes) if found != shape)
        raise _shape_error(path, position, shape, shapes[position])
    if dtypes.count(dtype) != len(values):
        position = next(i for i, found in enumerate(dtypes) if found != dtype)
        raise _dtype_error(path, position, dtype, dtypes[position])
    if not shape:
        result = np.zeros(len(values), dtype)
        for index, value in enumerate(values):
            result[index] = value
        return result
    return join(values, dtype).reshape(len(values), *shape)


def _stack_mixed(values: Sequence[Any], path: str) -> NDArray[Any]:
    """Stack values of several classes: scalars mixed with 0-d arrays; others raise."""
    first = values[0]
    for position, value in enumerate(values):
        if isinstance(value, (np.ndarray, np.generic)) != isinstance(
            first, (np.ndarray, np.generic)
        ) or (isinstance(first, (bytes, str)) and type(value) is not type(first)):
            raise InvalidElementError(
                f"cannot batch {describe_component(path)}: element 0 has a "
                f"{type(first).__name__} and element {position} a {type(value).__name__}; "
                "convert them to the same type with map()"
            )
    return _stack_arrays([np.asarray(value) for value in values], path)


def _shape_error(
    path: str, position: int, expected: tuple[int, ...], found: tuple[int, ...]
) -> InvalidElementError:
    hint = (
        "pad or truncate them to the same shape in map()"
        if len(expected) == len(found)
        else "convert all elements to the same number of axes with map()"
    )
    return InvalidElementError(
        f"cannot batch {describe_component(path)}: element 0 has shape {expected} and "
        f"element {position} has shape {found}; {hint}"
    )


def _dtype_error(path: str, position: int, expected: Any, found: Any) -> InvalidElementError:
    return InvalidElementError(
        f"cannot batch {describe_component(path)}: element 0 has dtype {expected} and "
        f"element {position} has dtype {found}; convert with astype in map()"
    )
