"""The structure of elements: containers and leaves.

Rule 1. A container is a dict, a tuple, a namedtuple or a dataclass; None is an empty container.
Rule 2. All other objects are leaves. `normalize` leaves only NumPy arrays of one or more axes,
NumPy
        scalars, bytes and str, so other modules need not handle anything else.
Rule 3. Leaves are listed in the order of their containers. Dicts with the same keys in different
        order are compatible (`transpose`); the first one's order is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Element",
    "NodeKind",
    "Structure",
    "StructureNode",
    "container_kind",
    "describe_component",
    "field_names",
    "flatten",
    "rebuild",
    "unflatten",
]

Element: TypeAlias = Any
"""A nested dict / tuple / namedtuple / dataclass of arrays, NumPy scalars, bytes and str."""


class NodeKind:
    """Kinds of structure nodes: small integers, because they are also sent in frames."""

    LEAF = 0
    NONE = 1
    DICT = 2
    TUPLE = 3
    NAMEDTUPLE = 4
    DATACLASS = 5


class StructureNode(NamedTuple):
    """A node of a structure; a plain tuple, so that comparison and hashing run in C."""

    kind: int
    cls: type | None = None
    """Class of a namedtuple or dataclass."""
    keys: tuple[Any, ...] = ()
    """Keys of a dict, fields of a namedtuple or dataclass."""
    children: tuple[Any, ...] = ()


_LEAF = StructureNode(NodeKind.LEAF)
_NONE = StructureNode(NodeKind.NONE)


class Structure:
    """Nesting of an element, without its leaves. Immutable, hashable, compared by value.

    Attributes:
        root: The outermost node.
        size: Number of leaves.
    """

    __slots__ = ("_hash", "_paths", "root", "size")

    root: StructureNode
    size: int

    def __init__(self, root: StructureNode) -> None:
        self.root = root
        self.size = _count_leaves(root)
        self._hash = hash(root)
        self._paths: list[str] | None = None

    @property
    def paths(self) -> list[str]:
        """Path of each leaf, such as `"['image']"` or `"[0].label"`; `""` for a bare leaf."""
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
        return f"Structure({_format_node(self.root)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.root,)


def describe_component(path: str) -> str:
    """Return a description of the leaf at `path` for error messages."""
    return f"component {path}" if path else "the element"


def container_kind(cls: type) -> int:
    """Return the `NodeKind` of instances of `cls`; `NodeKind.LEAF` if they are leaves."""
    kind = _kinds.get(cls)
    if kind is None:
        kind = _find_kind(cls)
        # Bounded, because a program may create any number of classes.
        if len(_kinds) > 4096:
            _kinds.clear()
        _kinds[cls] = kind
    return kind


def field_names(cls: type) -> tuple[str, ...]:
    """Return the field names of a namedtuple or dataclass class, in order."""
    if issubclass(cls, tuple):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return tuple([field.name for field in fields])


def flatten(element: Element) -> tuple[list[Any], Structure]:
    """Return the leaves of `element` and its structure."""
    leaves: list[Any] = []
    return leaves, _intern(_flatten_into(element, leaves))


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Element:
    """Return the element with this structure and these leaves.

    Raises:
        ValueError: If the number of leaves is not `structure.size`.
    """
    if len(leaves) != structure.size:
        raise ValueError(
            f"leaves has {len(leaves)} entries, but the structure has {structure.size} leaves"
        )
    if structure.root is _LEAF:
        return leaves[0]
    return _unflatten(structure.root, iter(leaves))


def rebuild(cls: type, keys: tuple[str, ...], values: Sequence[Any]) -> Any:
    """Return a dataclass instance with these fields, without running code of the class.

    `__init__` and `__post_init__` might check or convert the values of a single element; batches
    and specs of the same class need not pass those checks.
    """
    result: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(result, key, value)
    return result


_kinds: dict[type, int] = {type(None): NodeKind.NONE, dict: NodeKind.DICT, tuple: NodeKind.TUPLE}
_structures: dict[StructureNode, Structure] = {}


def _intern(root: StructureNode) -> Structure:
    # With one object per structure, most comparisons are by identity.
    structure = _structures.get(root)
    if structure is None:
        structure = Structure(root)
        if len(_structures) > 4096:
            _structures.clear()
        _structures[root] = structure
    return structure


def _find_kind(cls: type) -> int:
    if issubclass(cls, tuple):
        return NodeKind.NAMEDTUPLE if hasattr(cls, "_fields") else NodeKind.TUPLE
    if issubclass(cls, dict):
        return NodeKind.DICT
    return NodeKind.DATACLASS if dataclasses.is_dataclass(cls) else NodeKind.LEAF


def _count_leaves(node: StructureNode) -> int:
    if node.kind == NodeKind.LEAF:
        return 1
    return sum(map(_count_leaves, node.children))


def _flatten_into(element: Element, leaves: list[Any]) -> StructureNode:
    cls = type(element)
    kind = _kinds.get(cls)
    if kind is None:
        kind = container_kind(cls)
    if kind == NodeKind.LEAF:
        leaves.append(element)
        return _LEAF
    if kind == NodeKind.DICT:
        return StructureNode(
            kind,
            None,
            tuple(element),
            tuple([_flatten_into(value, leaves) for value in element.values()]),
        )
    if kind == NodeKind.TUPLE:
        return StructureNode(
            kind, None, (), tuple([_flatten_into(value, leaves) for value in element])
        )
    if kind == NodeKind.NONE:
        return _NONE
    keys = field_names(cls)
    values = element if kind == NodeKind.NAMEDTUPLE else [getattr(element, key) for key in keys]
    return StructureNode(kind, cls, keys, tuple([_flatten_into(value, leaves) for value in values]))


def _unflatten(node: StructureNode, leaves: Iterator[Any]) -> Element:
    kind = node.kind
    if kind == NodeKind.LEAF:
        return next(leaves)
    if kind == NodeKind.NONE:
        return None
    values = [_unflatten(child, leaves) for child in node.children]
    if kind == NodeKind.DICT:
        return dict(zip(node.keys, values, strict=True))
    if kind == NodeKind.TUPLE:
        return tuple(values)
    assert node.cls is not None
    if kind == NodeKind.NAMEDTUPLE:
        return tuple.__new__(node.cls, values)
    return rebuild(node.cls, node.keys, values)


def _walk_paths(node: StructureNode, path: str) -> Iterator[str]:
    if node.kind == NodeKind.LEAF:
        yield path
    for index, child in enumerate(node.children):
        if node.kind == NodeKind.DICT:
            part = f"[{node.keys[index]!r}]"
        elif node.kind == NodeKind.TUPLE:
            part = f"[{index}]"
        else:
            part = f".{node.keys[index]}"
        yield from _walk_paths(child, path + part)


def _format_node(node: StructureNode) -> str:
    if node.kind == NodeKind.LEAF:
        return "*"
    if node.kind == NodeKind.NONE:
        return "None"
    shown = [_format_node(child) for child in node.children]
    if node.kind == NodeKind.DICT:
        return "{" + ", ".join(f"{k!r}: {s}" for k, s in zip(node.keys, shown, strict=True)) + "}"
    if node.kind == NodeKind.TUPLE:
        return "(" + ", ".join(shown) + ("," if len(shown) == 1 else "") + ")"
    assert node.cls is not None
    fields = ", ".join(f"{k}={s}" for k, s in zip(node.keys, shown, strict=True))
    return f"{node.cls.__name__}({fields})"
