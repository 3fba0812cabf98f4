"""The structure of elements: containers, their leaves, and what counts as a leaf.

Rule 1. A container is a dict, a tuple, a namedtuple or a dataclass; None is an empty one.
Rule 2. Everything else is a leaf. `tree.normalize` lets only NumPy arrays of one or more axes,
        NumPy scalars, bytes and str pass, so that nothing below ever meets anything else.
Rule 3. Leaves are listed in the order in which their containers hold them. Two dicts with the same
        keys in another order go together wherever elements meet (`transpose`, `map_leaves`); the
        first one's order wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import InvalidElementError

__all__ = [
    "Element",
    "Kind",
    "Node",
    "Structure",
    "component",
    "container_kind",
    "field_names",
    "flatten",
    "flatten_like",
    "map_leaves",
    "rebuild",
    "transpose",
    "unflatten",
    "untranspose",
]

Element: TypeAlias = Any
"""A nested dict / tuple / namedtuple / dataclass of arrays, NumPy scalars, bytes and str."""


class Kind:
    """What a node of a structure is: small integers, for they also travel in frames."""

    LEAF = 0
    NONE = 1
    DICT = 2
    TUPLE = 3
    NAMEDTUPLE = 4
    DATACLASS = 5


class Node(NamedTuple):
    """One place of a structure; a plain tuple, so that comparing and hashing run in C."""

    kind: int
    cls: type | None = None
    """Class of a namedtuple or dataclass."""
    keys: tuple[Any, ...] = ()
    """Keys of a dict, fields of a namedtuple or dataclass."""
    children: tuple[Any, ...] = ()


_LEAF = Node(Kind.LEAF)
_NONE = Node(Kind.NONE)


class Structure:
    """How an element is nested, without its leaves. Immutable, hashable, compared by value.

    Attributes:
        root: The outermost node.
        size: Number of leaves.
    """

    __slots__ = ("_hash", "_paths", "root", "size")

    root: Node
    size: int

    def __init__(self, root: Node) -> None:
        self.root = root
        self.size = _count_leaves(root)
        self._hash = hash(root)
        self._paths: list[str] | None = None

    @property
    def paths(self) -> list[str]:
        """Where each leaf is, as in `"['image']"`, `"[0].label"`; `""` for a bare leaf."""
        if self._paths is None:
            self._paths = list(_walk_paths(self.root, ""))
        return self._paths

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self.root == other.root

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Structure({_show(self.root)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.root,)


def component(path: str) -> str:
    """Return words for the leaf at `path`, for an error message."""
    return f"component {path}" if path else "the element"


def container_kind(cls: type) -> int:
    """Return the `Kind` of container that instances of `cls` are; `Kind.LEAF` for a leaf."""
    kind = _kinds.get(cls)
    if kind is None:
        kind = _find_kind(cls)
        # Bounded: a program that makes classes without end must not fill the memory.
        if len(_kinds) > 4096:
            _kinds.clear()
        _kinds[cls] = kind
    return kind


def field_names(cls: type) -> tuple[str, ...]:
    """Return the fields of a namedtuple or dataclass class, in order."""
    if issubclass(cls, tuple):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return tuple([field.name for field in fields])


def flatten(element: Element) -> tuple[list[Any], Structure]:
    """Return the leaves of `element` and its structure."""
    leaves: list[Any] = []
    return leaves, _intern(_flatten_into(element, leaves))


def flatten_like(structure: Structure, element: Element) -> list[Any]:
    """Return the leaves of `element` in the order of `structure`.

    Raises:
        InvalidElementError: `element` has another structure; the order of dict keys may differ.
    """
    return [column[0] for column in transpose([element], structure)[1]]


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Element:
    """Return the element of this structure with these leaves.

    Raises:
        ValueError: The number of leaves is not `structure.size`.
    """
    if len(leaves) != structure.size:
        raise ValueError(
            f"leaves has {len(leaves)} entries, but the structure has {structure.size} leaves"
        )
    if structure.root is _LEAF:
        return leaves[0]
    return _unflatten(structure.root, iter(leaves))


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


def rebuild(cls: type, keys: tuple[str, ...], values: Sequence[Any]) -> Any:
    """Return a dataclass instance with these fields, without calling code of the class.

    `__init__` and `__post_init__` would check or convert one element's values; batches and specs
    of the same class need not pass those checks.
    """
    made: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


_kinds: dict[type, int] = {type(None): Kind.NONE, dict: Kind.DICT, tuple: Kind.TUPLE}
_structures: dict[Node, Structure] = {}


def _intern(root: Node) -> Structure:
    # One object a structure makes the usual comparison one of identity.
    structure = _structures.get(root)
    if structure is None:
        structure = Structure(root)
        if len(_structures) > 4096:
            _structures.clear()
        _structures[root] = structure
    return structure


def _find_kind(cls: type) -> int:
    if issubclass(cls, tuple):
        return Kind.NAMEDTUPLE if hasattr(cls, "_fields") else Kind.TUPLE
    if issubclass(cls, dict):
        return Kind.DICT
    return Kind.DATACLASS if dataclasses.is_dataclass(cls) else Kind.LEAF


def _count_leaves(node: Node) -> int:
    if node.kind == Kind.LEAF:
        return 1
    return sum(map(_count_leaves, node.children))


def _flatten_into(element: Element, leaves: list[Any]) -> Node:
    cls = type(element)
    kind = _kinds.get(cls)
    if kind is None:
        kind = container_kind(cls)
    if kind == Kind.LEAF:
        leaves.append(element)
        return _LEAF
    if kind == Kind.DICT:
        return Node(
            kind,
            None,
            tuple(element),
            tuple([_flatten_into(value, leaves) for value in element.values()]),
        )
    if kind == Kind.TUPLE:
        return Node(kind, None, (), tuple([_flatten_into(value, leaves) for value in element]))
    if kind == Kind.NONE:
        return _NONE
    keys = field_names(cls)
    values = element if kind == Kind.NAMEDTUPLE else [getattr(element, key) for key in keys]
    return Node(kind, cls, keys, tuple([_flatten_into(value, leaves) for value in values]))


def _unflatten(node: Node, leaves: Iterator[Any]) -> Element:
    kind = node.kind
    if kind == Kind.LEAF:
        return next(leaves)
    if kind == Kind.NONE:
        return None
    values = [_unflatten(child, leaves) for child in node.children]
    if kind == Kind.DICT:
        return dict(zip(node.keys, values, strict=True))
    if kind == Kind.TUPLE:
        return tuple(values)
    assert node.cls is not None
    if kind == Kind.NAMEDTUPLE:
        return tuple.__new__(node.cls, values)
    return rebuild(node.cls, node.keys, values)


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
        return [_unflatten(node, iter(())) for _ in range(size)]
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


def _walk_paths(node: Node, path: str) -> Iterator[str]:
    if node.kind == Kind.LEAF:
        yield path
    for index, child in enumerate(node.children):
        if node.kind == Kind.DICT:
            part = f"[{node.keys[index]!r}]"
        elif node.kind == Kind.TUPLE:
            part = f"[{index}]"
        else:
            part = f".{node.keys[index]}"
        yield from _walk_paths(child, path + part)


def _show(node: Node) -> str:
    if node.kind == Kind.LEAF:
        return "*"
    if node.kind == Kind.NONE:
        return "None"
    shown = [_show(child) for child in node.children]
    if node.kind == Kind.DICT:
        return "{" + ", ".join(f"{k!r}: {s}" for k, s in zip(node.keys, shown, strict=True)) + "}"
    if node.kind == Kind.TUPLE:
        return "(" + ", ".join(shown) + ("," if len(shown) == 1 else "") + ")"
    assert node.cls is not None
    fields = ", ".join(f"{k}={s}" for k, s in zip(node.keys, shown, strict=True))
    return f"{node.cls.__name__}({fields})"
