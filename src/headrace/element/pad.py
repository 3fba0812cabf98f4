"""Elements of several shapes to one stacked element: what is missing is filled in.

A *padding* says how: to which shapes, and with what. Both may be given for each component, nested
as the elements are, or once for all components below a place. They are matched to the elements
when the first of these are there, for only then is it known how they are nested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import Stacked, stack_column
from headrace.element.structure import (
    Element,
    Kind,
    Node,
    Structure,
    component,
    container_kind,
    field_names,
    flatten,
    rebuild,
    unflatten,
)
from headrace.element.transpose import transpose
from headrace.errors import InvalidElementError

__all__ = ["Padding", "checked_shapes", "checked_values", "with_lengths"]

Shape: TypeAlias = tuple[int | None, ...]
"""Length of each axis; None: as long as the longest in the batch."""


class Padding:
    """Makes elements alike and stacks them.

    Args:
        shapes: What `checked_shapes` returned.
        values: What `checked_values` returned.
    """

    def __init__(self, shapes: Any = None, values: Any = None) -> None:
        self._shapes = shapes
        self._values = values
        self._structure: Structure | None = None
        #: For each leaf of elements of this structure: its shape, its value, where it is.
        self._leaves: list[tuple[Shape | None, Any, str]] = []

    def stack(self, elements: Sequence[Element]) -> Stacked:
        """Return elements as one stacked element of fresh arrays, padded.

        Raises:
            InvalidElementError: Structures, dtypes or numbers of axes differ, something is longer
                than its shape allows, or a value is none of the component's dtype.
        """
        structure, columns = transpose(elements)
        leaves = [
            _padded_column(column, *leaf)
            for column, leaf in zip(columns, self._matched(structure), strict=True)
        ]
        return unflatten(structure, leaves)

    def join(self, blocks: Sequence[Stacked]) -> Stacked:
        """Return the rows of stacked elements as one, padded: as `stack` does with rows."""
        structure, columns = transpose(blocks)
        leaves = [
            _padded_blocks(column, *leaf)
            for column, leaf in zip(columns, self._matched(structure), strict=True)
        ]
        return unflatten(structure, leaves)

    def leaves_as_it_is(self, stacked: Stacked) -> bool:
        """Say whether rows that are stacked already have the shapes that are asked for."""
        leaves, structure = flatten(stacked)
        for leaf, (shape, _, path) in zip(leaves, self._matched(structure), strict=True):
            _check_axes(leaf.shape[1:], shape, path)
            if shape is not None and any(
                want not in (None, have) for want, have in zip(shape, leaf.shape[1:], strict=True)
            ):
                return False
        return True

    def spec(self, spec: Spec, size: int | None) -> Spec:
        """Return the spec of `size` elements of this spec, padded; None: of any number.

        Raises:
            InvalidElementError: The shapes or values are not nested as the elements are, or have
                another number of axes.
        """
        leaves, structure = flatten(spec)
        made = []
        for leaf, (shape, _, path) in zip(leaves, self._matched(structure), strict=True):
            _check_axes(leaf.shape, shape, path)
            row = leaf.shape if shape is None else shape
            made.append(ArraySpec((size, *row), leaf.dtype, leaf.name))
        return unflatten(structure, made)

    def _matched(self, structure: Structure) -> list[tuple[Shape | None, Any, str]]:
        if structure is not self._structure:
            shapes = _matched("padded_shapes", structure, self._shapes, _is_shape)
            values = _matched("padding_values", structure, self._values, _is_value)
            self._leaves = list(zip(shapes, values, structure.paths, strict=True))
            self._structure = structure
        return self._leaves


# --- one component --------------------------------------------------------------------------------


def _padded_column(
    values: Sequence[Any], shape: Shape | None, value: Any, path: str
) -> NDArray[Any]:
    """Return the values of one leaf as one array with an axis in front, padded."""
    first = values[0]
    if type(first) is not np.ndarray or not first.ndim:
        if shape:
            _check_axes((), shape, path)
        return stack_column(values, path)
    if set(map(type, values)) != {np.ndarray}:
        position = next(i for i, found in enumerate(values) if type(found) is not np.ndarray)
        raise _odd(path, position, first, values[position])
    shapes = [found.shape for found in values]
    for position, found in enumerate(values):
        if found.dtype != first.dtype or len(shapes[position]) != first.ndim:
            raise _odd(path, position, first, found)
    _check_axes(first.shape, shape, path)
    if shapes.count(first.shape) == len(shapes):
        longest: Shape = first.shape
        if _lengths(longest, shape, path) == longest:
            return stack_column(values, path)
    elif first.ndim == 1:
        longest = max(shapes)
    else:
        longest = tuple(map(max, zip(*shapes, strict=True)))
    lengths = _lengths(longest, shape, path)
    out = _filled((len(values), *lengths), first.dtype, value, values, path)
    if first.ndim == 1:
        for row, found in zip(out, values, strict=True):
            row[: len(found)] = found
    else:
        for row, found in zip(out, values, strict=True):
            row[tuple(map(slice, found.shape))] = found
    return out


def _padded_blocks(
    blocks: Sequence[NDArray[Any]], shape: Shape | None, value: Any, path: str
) -> NDArray[Any]:
    """Return the rows of several arrays as one array, padded."""
    first = blocks[0]
    start = 0
    for block in blocks:
        if block.ndim != first.ndim or block.dtype != first.dtype:
            raise _odd(path, start, first[0], block[0])
        start += len(block)
    _check_axes(first.shape[1:], shape, path)
    longest = tuple(map(max, zip(*[block.shape[1:] for block in blocks], strict=True)))
    lengths = _lengths(longest, shape, path)
    out = _filled((start, *lengths), first.dtype, value, blocks, path)
    start = 0
    for block in blocks:
        out[(slice(start, start + len(block)), *map(slice, block.shape[1:]))] = block
        start += len(block)
    return out


def _lengths(longest: Shape, shape: Shape | None, path: str) -> tuple[int, ...]:
    """Return the length of each axis after padding."""
    made = []
    for have, want in zip(longest, longest if shape is None else shape, strict=True):
        assert have is not None
        if want is not None and have > want:
            raise InvalidElementError(
                f"{component(path)} has an element of length {have}, which is longer than the "
                f"padded shape {shape}; make that longer, or cut elements in map()"
            )
        made.append(have if want is None else want)
    return tuple(made)


def _filled(
    shape: tuple[int, ...], dtype: np.dtype[Any], value: Any, held: Sequence[Any], path: str
) -> NDArray[Any]:
    """Return a new array of the padding value; `held` are the arrays that are put into it."""
    if dtype.kind == "O":
        kind = _kind_of(held)
        if value is not None and type(value) is not kind:
            raise InvalidElementError(
                f"{component(path)} holds {kind.__name__}, and its padding value is {value!r}; "
                f"give one that is {kind.__name__}"
            )
        return np.full(shape, kind() if value is None else value, object)
    made = np.zeros(shape, dtype)
    if value is not None:
        made[...] = _cast(value, dtype, path)
    return made


def _cast(value: Any, dtype: np.dtype[Any], path: str) -> Any:
    try:
        with np.errstate(all="ignore"):
            cast = np.array(value).astype(dtype)
            if cast == value or (cast != cast and value != value) or dtype.kind in "fc":
                return cast
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidElementError(
        f"{component(path)} has dtype {dtype}, which does not hold the padding value {value!r}; "
        "give one that it holds"
    )


def _kind_of(arrays: Sequence[NDArray[Any]]) -> type:
    """Return what arrays of objects hold, bytes or str; what holds nothing says nothing."""
    for array in arrays:
        if array.size:
            return str if isinstance(array.flat[0], str) else bytes
    return bytes


def _check_axes(found: tuple[Any, ...], shape: Shape | None, path: str) -> None:
    if shape is not None and len(shape) != len(found):
        raise InvalidElementError(
            f"{component(path)} has the shape {found}, and the padded shape {shape} has "
            f"{len(shape)} axes; give one length, or None, for each of its axes"
        )


def _odd(path: str, position: int, first: Any, found: Any) -> InvalidElementError:
    return InvalidElementError(
        f"{component(path)}: element 0 has {_described(first)} and element {position} has "
        f"{_described(found)}; bring all elements to one dtype and number of axes with map()"
    )


def _described(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic):
        return f"dtype {leaf.dtype} and {leaf.ndim} axes"
    return f"a {type(leaf).__name__}"


# --- shapes and values as users give them ---------------------------------------------------------


def checked_shapes(shapes: Any, name: str = "padded_shapes") -> Any:
    """Return shapes with a tuple of lengths for each component, and None for any length.

    Args:
        shapes: Nested as the elements are; a shape is a list, tuple, array or `ArraySpec`, and a
            length an int, None or -1. None in place of a shape: that of the longest elements.
        name: What users call it.

    Raises:
        TypeError: It holds something else.
        ValueError: A length is less than -1.
    """
    if shapes is None or isinstance(shapes, ArraySpec):
        return None if shapes is None else shapes.shape
    if isinstance(shapes, list | np.ndarray):
        return tuple([_length(length, name) for length in shapes])
    if type(shapes) is tuple and all(map(_is_length, shapes)):
        return tuple([_length(length, name) for length in shapes])
    return _nested(shapes, name, checked_shapes)


def checked_values(values: Any, name: str = "padding_values") -> Any:
    """Return what is filled in, nested as it was given; None: zero, or an empty string.

    Raises:
        TypeError: It holds something that is no number, bytes or str.
    """
    if isinstance(values, np.generic) and values.dtype.kind in "biufc":
        return values.item()
    if _is_value(values):
        return values
    if isinstance(values, np.ndarray) and not values.ndim:
        return checked_values(values[()], name)
    return _nested(values, name, checked_values)


def with_lengths(shapes: Any, spec: Spec, length: int, *, is_proven: bool) -> Any:
    """Return shapes in which every axis of unknown length has this one.

    Args:
        shapes: What `checked_shapes` returned; None: the shapes of the elements.
        spec: Of the elements.
        length: That of an axis whose length is not known.
        is_proven: Whether all elements have this spec. If not, of a component without a shape the
            first axis counts as unknown, and the others are as long as the longest.
    """
    leaves, structure = flatten(spec)
    made: list[Shape] = []
    for leaf, one in zip(
        leaves, _matched("padded_shapes", structure, shapes, _is_shape), strict=True
    ):
        if one is None and not is_proven:
            made.append((length, *[None] * (leaf.ndim - 1)) if leaf.ndim else ())
        else:
            known = leaf.shape if one is None else one
            made.append(tuple([length if axis is None else axis for axis in known]))
    return unflatten(structure, made)


def _is_length(value: Any) -> bool:
    return value is None or isinstance(value, int | np.integer)


def _length(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` holds {value!r} where a length is expected; give an int, or None for as "
            "long as the longest element"
        )
    if value < -1:
        raise ValueError(f"`{name}` holds the length {value}; give one of at least 0, -1 or None")
    return None if value == -1 else int(value)


def _nested(value: Any, name: str, checked: Any) -> Any:
    """Return a container with its parts checked."""
    kind = container_kind(type(value))
    if kind == Kind.DICT:
        return {key: checked(part, name) for key, part in value.items()}
    if kind == Kind.TUPLE or isinstance(value, list):
        return tuple([checked(part, name) for part in value])
    if kind == Kind.NAMEDTUPLE:
        return type(value)(*[checked(part, name) for part in value])
    if kind == Kind.DATACLASS:
        names = field_names(type(value))
        return rebuild(type(value), names, [checked(getattr(value, one), name) for one in names])
    raise TypeError(
        f"`{name}` holds {value!r:.80} of type {type(value).__name__}; give shapes or values for "
        "the components, nested as the elements are"
    )


def _is_shape(value: Any) -> bool:
    return value is None


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, bytes | str | int | float | complex | np.generic)


def _matched(name: str, structure: Structure, given: Any, is_for_all: Any) -> list[Any]:
    """Return what was given for each leaf.

    Args:
        name: What users call it.
        structure: That of the elements.
        given: Nested as the elements are, down to something that holds for all below.
        is_for_all: Says whether it does.
    """
    paths = iter(structure.paths)
    found = list(_matched_below(name, structure.root, given, is_for_all, paths))
    assert len(found) == structure.size
    return found


def _matched_below(
    name: str, node: Node, given: Any, is_for_all: Any, paths: Iterator[str]
) -> Iterator[Any]:
    if node.kind == Kind.LEAF:
        path = next(paths)
        if given is not None and is_for_all is _is_shape and not _is_dims(given):
            raise _mismatch(name, component(path), given)
        if is_for_all is _is_value and not _is_value(given):
            raise _mismatch(name, component(path), given)
        yield given
        return
    parts: Sequence[Any]
    if is_for_all(given):
        parts = [given] * len(node.children)
    else:
        try:
            parts = _parts_like(node, given)
        except (InvalidElementError, TypeError, AttributeError):
            raise _mismatch(name, "the elements", given) from None
    for child, part in zip(node.children, parts, strict=True):
        yield from _matched_below(name, child, part, is_for_all, paths)


def _is_dims(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_length, value))


def _parts_like(node: Node, given: Any) -> Sequence[Any]:
    kind = container_kind(type(given))
    if kind == Kind.DICT and node.kind == Kind.DICT and set(given) == set(node.keys):
        return [given[key] for key in node.keys]
    if kind == Kind.DATACLASS and node.kind == Kind.DATACLASS:
        return [getattr(given, key) for key in node.keys]
    is_tuple = kind in (Kind.TUPLE, Kind.NAMEDTUPLE) and node.kind in (Kind.TUPLE, Kind.NAMEDTUPLE)
    if is_tuple and len(given) == len(node.children):
        return tuple(given)
    raise TypeError("another structure")


def _mismatch(name: str, what: str, given: Any) -> InvalidElementError:
    return InvalidElementError(
        f"`{name}` holds {given!r:.80} for {what}, which is nested in another way; give it as the "
        "elements are nested, or None"
    )
