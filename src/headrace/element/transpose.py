"""Elements of one structure, leaf by leaf: many rows to columns and back, several elements at once.

Elements that meet must have one structure; two dicts may hold the same keys in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from headrace.element.structure import (
    Element,
    Kind,
    Node,
    Structure,
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
    """Return the structure of `elements` and for each leaf the list of its values.

    Args:
        elements: At least one element; all of one structure.
        structure: The structure to expect; the first element's if not given.

    Raises:
        InvalidElementError: A structure differs; the message names the place and the position.
    """
    if structure is None:
        structure = flatten(elements[0])[1]
    columns: list[list[Any]] = []
    _transpose_into(structure.root, elements, "", columns)
    return structure, columns


def untranspose(structure: Structure, columns: Sequence[Sequence[Any]], size: int) -> list[Element]:
    """Return `size` elements whose leaves are taken from the columns, one column a leaf."""
    return list(_untranspose(structure.root, iter(columns), size))


def flatten_like(structure: Structure, element: Element) -> list[Any]:
    """Return the leaves of `element` in the order of `structure`.

    Raises:
        InvalidElementError: `element` has another structure; the order of dict keys may differ.
    """
    return [column[0] for column in transpose([element], structure)[1]]


def map_leaves(fn: Callable[..., Any], element: Element, *others: Element) -> Element:
    """Return an element like `element` with `fn(leaf, *leaves of the others)` for its leaves.

    Raises:
        InvalidElementError: One of `others` has another structure.
    """
    leaves, structure = flatten(element)
    if not others:
        return unflatten(structure, [fn(leaf) for leaf in leaves])
    columns = [flatten_like(structure, other) for other in others]
    return unflatten(structure, list(map(fn, leaves, *columns)))


def _transpose_into(node: Node, values: Sequence[Any], path: str, columns: list[list[Any]]) -> None:
    kind = node.kind
    if kind == Kind.LEAF:
        if any(container_kind(cls) != Kind.LEAF for cls in set(map(type, values))):
            _refuse_structure(node, values, path)
        columns.append(values if type(values) is list else list(values))
        return
    for cls in set(map(type, values)):
        if container_kind(cls) != kind or (node.cls is not None and cls is not node.cls):
            _refuse_structure(node, values, path)
    if kind == Kind.DICT:
        # Same keys in the same order is the common case, and the cheapest to see.
        if list(map(tuple, values)).count(node.keys) != len(values) and not all(
            map(dict.fromkeys(node.keys).keys().__eq__, map(dict.keys, values))
        ):
            _refuse_structure(node, values, path)
        for key, child in zip(node.keys, node.children, strict=True):
            _transpose_into(child, list(map(itemgetter(key), values)), f"{path}[{key!r}]", columns)
    elif kind == Kind.DATACLASS:
        for key, child in zip(node.keys, node.children, strict=True):
            _transpose_into(child, list(map(attrgetter(key), values)), f"{path}.{key}", columns)
    elif kind != Kind.NONE:
        if set(map(len, values)) != {len(node.children)}:
            _refuse_structure(node, values, path)
        parts = [f".{key}" for key in node.keys] or [f"[{i}]" for i in range(len(node.children))]
        for index, (part, child) in enumerate(zip(parts, node.children, strict=True)):
            _transpose_into(child, list(map(itemgetter(index), values)), path + part, columns)


def _refuse_structure(node: Node, values: Sequence[Any], path: str) -> None:
    for position, value in enumerate(values):
        found = _top(value)
        if found != _top_of_node(node):
            place = f"at {path}" if path else "at the top"
            raise InvalidElementError(
                f"elements of different structure cannot go together: {place}, "
                f"{_describe_top(_top_of_node(node))} was expected, "
                f"and element {position} has {_describe_top(found)}; "
                "give all elements the same structure with map()"
            )
    raise AssertionError("no value differs")  # pragma: no cover


def _top(value: Any) -> tuple[int, Any]:
    kind = container_kind(type(value))
    if kind == Kind.DICT:
        return kind, frozenset(value)
    if kind == Kind.TUPLE:
        return kind, len(value)
    return kind, type(value) if kind in (Kind.NAMEDTUPLE, Kind.DATACLASS) else None


def _top_of_node(node: Node) -> tuple[int, Any]:
    if node.kind == Kind.DICT:
        return node.kind, frozenset(node.keys)
    if node.kind == Kind.TUPLE:
        return node.kind, len(node.children)
    return node.kind, node.cls


def _describe_top(top: tuple[int, Any]) -> str:
    kind, detail = top
    if kind == Kind.DICT:
        return f"a dict with keys {sorted(detail, key=repr)}"
    if kind == Kind.TUPLE:
        return f"a tuple of {detail}"
    if kind in (Kind.NAMEDTUPLE, Kind.DATACLASS):
        return f"a {detail.__name__}"
    return "None" if kind == Kind.NONE else "a leaf"


def _untranspose(node: Node, columns: Iterator[Sequence[Any]], size: int) -> Sequence[Any]:
    kind = node.kind
    if kind == Kind.LEAF:
        return next(columns)
    if kind == Kind.NONE:
        return [None] * size
    parts = [_untranspose(child, columns, size) for child in node.children]
    if not parts:
        empty = Structure(node)
        return [unflatten(empty, ()) for _ in range(size)]
    rows = zip(*parts, strict=True)
    if kind == Kind.DICT:
        keys = node.keys
        return [dict(zip(keys, row, strict=True)) for row in rows]
    if kind == Kind.TUPLE:
        return list(rows)
    cls = node.cls
    assert cls is not None
    if kind == Kind.NAMEDTUPLE:
        make = tuple.__new__
        return [make(cls, row) for row in rows]
    return [rebuild(cls, node.keys, row) for row in rows]
