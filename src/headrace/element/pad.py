"""Padded stacking of elements of different shapes.

A *padding* has target shapes and fill values. Both may be given per component, nested like the
elements, or once for all components of a subtree. They are matched to the elements when the first
elements arrive, since their structure is unknown before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import StackedElement, stack_column
from headrace.element.structure import (
    Element,
    NodeKind,
    Structure,
    StructureNode,
    container_kind,
    describe_component,
    field_names,
    flatten,
    rebuild,
    unflatten,
)
from headrace.element.transpose import transpose
from headrace.errors import InvalidElementError

__all__ = ["Padding", "check_shapes", "check_values", "fill_unknown_lengths"]

Shape: TypeAlias = tuple[int | None, ...]
"""Length of each axis; None is the length of the longest element in the batch."""


class Padding:
    """Pads elements to equal shapes and stacks them.

    Args:
        shapes: Result of `check_shapes`.
        values: Result of `check_values`.
    """

    def __init__(self, shapes: Any = None, values: Any = None) -> None:
        self._shapes = shapes
        self._values = values
        self._structure: Structure | None = None
        #: Shape, value and path of each leaf of elements with this structure.
        self._leaves: list[tuple[Shape | None, Any, str]] = []

    def stack(self, elements: Sequence[Element]) -> StackedElement:
        """Return elements as one stacked element of new arrays, padded.

        Raises:
            InvalidElementError: If structures, dtypes or numbers of axes differ, an axis is longer
                than its shape allows, or a fill value does not fit the component's dtype.
        """
        structure, columns = transpose(elements)
        leaves = [
            _pad_column(column, *leaf)
            for column, leaf in zip(columns, self._match_structure(structure), strict=True)
        ]
        return unflatten(structure, leaves)

    def join(self, blocks: Sequence[StackedElement]) -> StackedElement:
        """Return the rows of stacked elements as one, padded as `stack` does with elements."""
        structure, columns = transpose(blocks)
        leaves = [
            _pad_blocks(column, *leaf)
            for column, leaf in zip(columns, self._match_structure(structure), strict=True)
        ]
        return unflatten(structure, leaves)

    def needs_no_padding(self, stacked: StackedElement) -> bool:
        """Return whether stacked rows already have the requested shapes."""
        leaves, structure = flatten(stacked)
        for leaf, (shape, _, path) in zip(leaves, self._match_structure(structure), strict=True):
            _check_axes(leaf.shape[1:], shape, path)
            if shape is not None and any(
                want not in (None, have) for want, have in zip(shape, leaf.shape[1:], strict=True)
            ):
                return False
        return True

    def spec(self, spec: Spec, size: int | None) -> Spec:
        """Return the spec of a padded batch of elements with this spec.

        Args:
            spec: Spec of an element.
            size: Number of elements, or None if it varies.

        Raises:
            InvalidElementError: If shapes or values are not nested like the elements, or have
                another number of axes.
        """
        leaves, structure = flatten(spec)
        result = []
        for leaf, (shape, _, path) in zip(leaves, self._match_structure(structure), strict=True):
            _check_axes(leaf.shape, shape, path)
            row = leaf.shape if shape is None else shape
            result.append(ArraySpec((size, *row), leaf.dtype, leaf.name))
        return unflatten(structure, result)

    def _match_structure(self, structure: Structure) -> list[tuple[Shape | None, Any, str]]:
        if structure is not self._structure:
            shapes = _match_leaves("padded_shapes", structure, self._shapes, _is_shape)
            values = _match_leaves("padding_values", structure, self._values, _is_value)
            self._leaves = list(zip(shapes, values, structure.paths, strict=True))
            self._structure = structure
        return self._leaves


# --- One component --------------------------------------------------------------------------------


def _pad_column(values: Sequence[Any], shape: Shape | None, value: Any, path: str) -> NDArray[Any]:
    """Return the values of one leaf as one padded array with a new leading axis."""
    first = values[0]
    if type(first) is not np.ndarray or not first.ndim:
        if shape:
            _check_axes((), shape, path)
        return stack_column(values, path)
    if set(map(type, values)) != {np.ndarray}:
        position = next(i for i, found in enumerate(values) if type(found) is not np.ndarray)
        raise _mismatch_error(path, position, first, values[position])
    shapes = [found.shape for found in values]
    for position, found in enumerate(values):
        if found.dtype != first.dtype or len(shapes[position]) != first.ndim:
            raise _mismatch_error(path, position, first, found)
    _check_axes(first.shape, shape, path)
    if shapes.count(first.shape) == len(shapes):
        longest: Shape = first.shape
        if _padded_lengths(longest, shape, path) == longest:
            return stack_column(values, path)
    elif first.ndim == 1:
        longest = max(shapes)
    else:
        longest = tuple(map(max, zip(*shapes, strict=True)))
    lengths = _padded_lengths(longest, shape, path)
    out = _allocate_filled((len(values), *lengths), first.dtype, value, values, path)
    if first.ndim == 1:
        for row, found in zip(out, values, strict=True):
            row[: len(found)] = found
    else:
        for row, found in zip(out, values, strict=True):
            row[tuple(map(slice, found.shape))] = found
    return out


def _pad_blocks(
    blocks: Sequence[NDArray[Any]], shape: Shape | None, value: Any, path: str
) -> NDArray[Any]:
    """Return the rows of several arrays as one padded array."""
    first = blocks[0]
    start = 0
    for block in blocks:
        if block.ndim != first.ndim or block.dtype != first.dtype:
            raise _mismatch_error(path, start, first[0], block[0])
        start += len(block)
    _check_axes(first.shape[1:], shape, path)
    longest = tuple(map(max, zip(*[block.shape[1:] for block in blocks], strict=True)))
    lengths = _padded_lengths(longest, shape, path)
    out = _allocate_filled((start, *lengths), first.dtype, value, blocks, path)
    start = 0
    for block in blocks:
        out[(slice(start, start + len(block)), *map(slice, block.shape[1:]))] = block
        start += len(block)
    return out


def _padded_lengths(longest: Shape, shape: Shape | None, path: str) -> tuple[int, ...]:
    """Return the length of each axis after padding."""
    result = []
    for have, want in zip(longest, longest if shape is None else shape, strict=True):
        assert have is not None
        if want is not None and have > want:
            raise InvalidElementError(
                f"{describe_component(path)} has an element of length {have}, which exceeds the "
                f"padded shape {shape}; increase the padded shape, or truncate elements in map()"
            )
        result.append(have if want is None else want)
    return tuple(result)


def _allocate_filled(
    shape: tuple[int, ...], dtype: np.dtype[Any], value: Any, arrays: Sequence[Any], path: str
) -> NDArray[Any]:
    """Return a new array of the fill value; `arrays` are the arrays that will be copied into it."""
    if dtype.kind == "O":
        kind = _string_type(arrays)
        if value is not None and type(value) is not kind:
            raise InvalidElementError(
                f"{describe_component(path)} contains {kind.__name__}, but its padding value is "
                f"{value!r}; pass a padding value of type {kind.__name__}"
            )
        return np.full(shape, kind() if value is None else value, object)
    result = np.zeros(shape, dtype)
    if value is not None:
        result[...] = _cast_padding_value(value, dtype, path)
    return result


def _cast_padding_value(value: Any, dtype: np.dtype[Any], path: str) -> Any:
    try:
        with np.errstate(all="ignore"):
            cast = np.array(value).astype(dtype)
            if cast == value or (cast != cast and value != value) or dtype.kind in "fc":
                return cast
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidElementError(
        f"{describe_component(path)} has dtype {dtype}, which cannot represent the padding value "
        f"{value!r}; pass another padding value"
    )


def _string_type(arrays: Sequence[NDArray[Any]]) -> type:
    """Return the type in arrays of objects, bytes or str; bytes if all of them are empty."""
    for array in arrays:
        if array.size:
            return str if isinstance(array.flat[0], str) else bytes
    return bytes


def _check_axes(found: tuple[Any, ...], shape: Shape | None, path: str) -> None:
    if shape is not None and len(shape) != len(found):
        raise InvalidElementError(
            f"{describe_component(path)} has shape {found}, but the padded shape {shape} has "
            f"{len(shape)} axes; pass a length, or None, for each axis"
        )


def _mismatch_error(path: str, position: int, first: Any, found: Any) -> InvalidElementError:
    return InvalidElementError(
        f"{describe_component(path)}: element 0 has {_describe_leaf(first)} and element "
        f"{position} has {_describe_leaf(found)}; convert all elements to the same dtype and "
        "number of axes with map()"
    )


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic):
        return f"dtype {leaf.dtype} and {leaf.ndim} axes"
    return f"a {type(leaf).__name__}"


# --- Shapes and values as users give them ---------------------------------------------------------


def check_shapes(shapes: Any, name: str = "padded_shapes") -> Any:
    """Return shapes with a tuple of lengths for each component; None stands for any length.

    Args:
        shapes: Shapes, nested like the elements. A shape is a list, tuple, array or `ArraySpec`, or
            an int for one axis; a length is an int, None or -1. None instead of a shape uses the
            longest elements.
        name: Name of the argument in the public API.

    Raises:
        TypeError: If it contains anything else.
        ValueError: If a length is less than -1.
    """
    if _is_length(shapes) and shapes is not None:
        shapes = (shapes,)
    if shapes is None or isinstance(shapes, ArraySpec):
        return None if shapes is None else shapes.shape
    if isinstance(shapes, list | np.ndarray):
        return tuple([_check_length(length, name) for length in shapes])
    if type(shapes) is tuple and all(map(_is_length, shapes)):
        return tuple([_check_length(length, name) for length in shapes])
    return _check_nested(shapes, name, check_shapes)


def check_values(values: Any, name: str = "padding_values") -> Any:
    """Return the fill values, nested as given; None stands for zero or an empty string.

    Raises:
        TypeError: If a value is not a number, bytes or str.
    """
    if isinstance(values, np.generic) and values.dtype.kind in "biufc":
        return values.item()
    if _is_value(values):
        return values
    if isinstance(values, np.ndarray) and not values.ndim:
        return check_values(values[()], name)
    return _check_nested(values, name, check_values)


def fill_unknown_lengths(shapes: Any, spec: Spec, length: int, *, is_proven: bool) -> Any:
    """Return shapes in which every axis of unknown length gets a given length.

    Args:
        shapes: Result of `check_shapes`; None uses the shapes of the elements.
        spec: Spec of the elements.
        length: Length for axes of unknown length.
        is_proven: Whether all elements have this spec. If not, the first axis of a component
            without a shape counts as unknown, and the others get the longest length.
    """
    leaves, structure = flatten(spec)
    result: list[Shape] = []
    for leaf, one in zip(
        leaves, _match_leaves("padded_shapes", structure, shapes, _is_shape), strict=True
    ):
        if one is None and not is_proven:
            result.append((length, *[None] * (leaf.ndim - 1)) if leaf.ndim else ())
        else:
            known = leaf.shape if one is None else one
            result.append(tuple([length if axis is None else axis for axis in known]))
    return unflatten(structure, result)


def _is_length(value: Any) -> bool:
    return value is None or isinstance(value, int | np.integer)


def _check_length(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` contains {value!r} in place of a length; pass an int, or None for the "
            "length of the longest element"
        )
    if value < -1:
        raise ValueError(
            f"`{name}` contains the length {value}; pass a length of at least 0, or -1 or None"
        )
    return None if value == -1 else int(value)


def _check_nested(value: Any, name: str, checked: Any) -> Any:
    """Return a container with checked parts."""
    kind = container_kind(type(value))
    if kind == NodeKind.DICT:
        return {key: checked(part, name) for key, part in value.items()}
    if kind == NodeKind.TUPLE or isinstance(value, list):
        return tuple([checked(part, name) for part in value])
    if kind == NodeKind.NAMEDTUPLE:
        return type(value)(*[checked(part, name) for part in value])
    if kind == NodeKind.DATACLASS:
        names = field_names(type(value))
        return rebuild(type(value), names, [checked(getattr(value, one), name) for one in names])
    raise TypeError(
        f"`{name}` contains {value!r:.80} of type {type(value).__name__}; pass shapes or values "
        "for the components, nested like the elements"
    )


def _is_shape(value: Any) -> bool:
    return value is None


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, bytes | str | int | float | complex | np.generic)


def _match_leaves(name: str, structure: Structure, given: Any, is_for_all: Any) -> list[Any]:
    """Return the value given for each leaf.

    Args:
        name: Name of the argument in the public API.
        structure: Structure of the elements.
        given: Values nested like the elements, down to values that apply to all leaves below.
        is_for_all: Returns whether a value applies to all leaves below.
    """
    paths = iter(structure.paths)
    found = list(_match_node(name, structure.root, given, is_for_all, paths))
    assert len(found) == structure.size
    return found


def _match_node(
    name: str, node: StructureNode, given: Any, is_for_all: Any, paths: Iterator[str]
) -> Iterator[Any]:
    if node.kind == NodeKind.LEAF:
        path = next(paths)
        if given is not None and is_for_all is _is_shape and not _is_dims(given):
            raise _nesting_error(name, describe_component(path), given)
        if is_for_all is _is_value and not _is_value(given):
            raise _nesting_error(name, describe_component(path), given)
        yield given
        return
    parts: Sequence[Any]
    if is_for_all(given):
        parts = [given] * len(node.children)
    else:
        try:
            parts = _parts_like(node, given)
        except (InvalidElementError, TypeError, AttributeError):
            raise _nesting_error(name, "the elements", given) from None
    for child, part in zip(node.children, parts, strict=True):
        yield from _match_node(name, child, part, is_for_all, paths)


def _is_dims(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_length, value))


def _parts_like(node: StructureNode, given: Any) -> Sequence[Any]:
    kind = container_kind(type(given))
    if kind == NodeKind.DICT and node.kind == NodeKind.DICT and set(given) == set(node.keys):
        return [given[key] for key in node.keys]
    if kind == NodeKind.DATACLASS and node.kind == NodeKind.DATACLASS:
        return [getattr(given, key) for key in node.keys]
    is_tuple = kind in (NodeKind.TUPLE, NodeKind.NAMEDTUPLE) and node.kind in (
        NodeKind.TUPLE,
        NodeKind.NAMEDTUPLE,
    )
    if is_tuple and len(given) == len(node.children):
        return tuple(given)
    raise TypeError("the structures differ")


def _nesting_error(name: str, kind: str, given: Any) -> InvalidElementError:
    return InvalidElementError(
        f"`{name}` contains {given!r:.80} for {kind}, which has a different nesting; pass a "
        "value nested like the elements, or None"
    )
