"""Conversions between elements of one structure and lists of their leaves.

The elements must have the same structure; dicts may have the same keys in different order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from headrace.element.structure import (
    Element,
    NodeKind,
    Structure,
    StructureNode,
    container_kind,
    flatten,
    rebuild,
    unflatten,
)
from headrace.errors import InvalidElementError

__all__ = ["flatten_like", "map_leaves", "transpose", "untranspose"]


def transpose(
    elements: Sequence[Element], structure: Structure | None = None
) -> tuple[Structure, list[list[Any]]]:
    """Return the structure of `elements`, and the list of values for each leaf.

    Args:
        elements: At least one element; all have the same structure.
        structure: Expected structure; None uses the first element's.

    Raises:
        InvalidElementError: If a structure differs; the message names the path and the position.
    """
    if structure is None:
        structure = flatten(elements[0])[1]
    columns: list[list[Any]] = []
    _transpose_into(structure.root, elements, "", columns)
    return structure, columns


def untranspose(structure: Structure, columns: Sequence[Sequence[Any]], size: int) -> list[Element]:
    """Return `size` elements whose leaves are taken from the columns, one column per leaf."""
    return list(_untranspose(structure.root, iter(columns), size))


def flatten_like(structure: Structure, element: Element) -> list[Any]:
    """Return the leaves of `element` in the order of `structure`.

    Raises:
        InvalidElementError: If the structures differ, except for the order of dict keys.
    """
    return [column[0] for column in transpose([element], structure)[1]]


def map_leaves(fn: Callable[..., Any], element: Element, *others: Element) -> Element:
    """Return an element like `element` whose leaves are `fn(leaf, *leaves of the others)`.

    Raises:
        InvalidElementError: If one of `others` has another structure.
    """
    leaves, structure = flatten(element)
    if not others:
        return unflatten(structure, [fn(leaf) for leaf in leaves])
    columns = [flatten_like(structure, other) for other in others]
    return unflatten(structure, list(map(fn, leaves, *columns)))


def _transpose_into(
    node: StructureNode, values: Sequence[Any], path: str, columns: list[list[Any]]
) -> None:
    kind = node.kind
    if kind == NodeKind.LEAF:
        if any(container_kind(cls) != NodeKind.LEAF for cls in set(map(type, values))):
            _raise_structure_error(node, values, path)
        columns.append(values if type(values) is list else list(values))
        return
    for cls in set(map(type, values)):
        if container_kind(cls) != kind or (node.cls is not None and cls is not node.cls):
            _raise_structure_error(node, values, path)
    if kind == NodeKind.DICT:
        # Equal keys in equal order are the common case, and the cheapest to check.
        if list(map(tuple, values)).count(node.keys) != len(values) and not all(
            map(dict.fromkeys(node.keys).keys().__eq__, map(dict.keys, values))
        ):
            _raise_structure_error(node, values, path)
        for key, child in zip(node.keys, node.children, strict=True):
            _transpose_into(child, list(map(itemgetter(key), values)), f"{path}[{key!r}]", columns)
    elif kind == NodeKind.DATACLASS:
        for key, child in zip(node.keys, node.children, strict=True):
            _transpose_into(child, list(map(attrgetter(key), values)), f"{path}.{key}", columns)
    elif kind != NodeKind.NONE:
        if set(map(len, values)) != {len(node.children)}:
            _raise_structure_error(node, values, path)
        parts = [f".{key}" for key in node.keys] or [f"[{i}]" for i in range(len(node.children))]
        for index, (part, child) in enumerate(zip(parts, node.children, strict=True)):
            _transpose_into(child, list(map(itemgetter(index), values)), path + part, columns)


def _raise_structure_error(node: StructureNode, values: Sequence[Any], path: str) -> None:
    for position, value in enumerate(values):
        found = _outer_structure(value)
        if found != _outer_structure_of_node(node):
            where = f"at {path}" if path else "at the top level"
            raise InvalidElementError(
                f"elements must have the same structure: {where}, "
                f"{_describe_outer_structure(_outer_structure_of_node(node))} was expected, and "
                f"element {position} has {_describe_outer_structure(found)}; give all elements "
                "the same structure with map()"
            )
    raise AssertionError("no value differs")  # pragma: no cover


def _outer_structure(value: Any) -> tuple[int, Any]:
    kind = container_kind(type(value))
    if kind == NodeKind.DICT:
        return kind, frozenset(value)
    if kind == NodeKind.TUPLE:
        return kind, len(value)
    return kind, type(value) if kind in (NodeKind.NAMEDTUPLE, NodeKind.DATACLASS) else None


def _outer_structure_of_node(node: StructureNode) -> tuple[int, Any]:
    if node.kind == NodeKind.DICT:
        return node.kind, frozenset(node.keys)
    if node.kind == NodeKind.TUPLE:
        return node.kind, len(node.children)
    return node.kind, node.cls


def _describe_outer_structure(top: tuple[int, Any]) -> str:
    kind, detail = top
    if kind == NodeKind.DICT:
        return f"a dict with keys {sorted(detail, key=repr)}"
    if kind == NodeKind.TUPLE:
        return f"a tuple of {detail}"
    if kind in (NodeKind.NAMEDTUPLE, NodeKind.DATACLASS):
        return f"a {detail.__name__}"
    return "None" if kind == NodeKind.NONE else "a leaf"


def _untranspose(node: StructureNode, columns: Iterator[Sequence[Any]], size: int) -> Sequence[Any]:
    kind = node.kind
    if kind == NodeKind.LEAF:
        return next(columns)
    if kind == NodeKind.NONE:
        return [None] * size
    parts = [_untranspose(child, columns, size) for child in node.children]
    if not parts:
        empty = Structure(node)
        return [unflatten(empty, ()) for _ in range(size)]
    rows = zip(*parts, strict=True)
    if kind == NodeKind.DICT:
        keys = node.keys
        return [dict(zip(keys, row, strict=True)) for row in rows]
    if kind == NodeKind.TUPLE:
        return list(rows)
    cls = node.cls
    assert cls is not None
    if kind == NodeKind.NAMEDTUPLE:
        make = tuple.__new__
        return [make(cls, row) for row in rows]
    return [rebuild(cls, node.keys, row) for row in rows]
