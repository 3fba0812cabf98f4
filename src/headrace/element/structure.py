"""The structure of elements: containers, their leaves, and what counts as a leaf.

Rule 1. A container is a dict, a tuple, a namedtuple or a dataclass; None is an empty one.
Rule 2. Everything else is a leaf. `normalize` lets only NumPy arrays of one or more axes,
        NumPy scalars, bytes and str pass, so that nothing below ever meets anything else.
Rule 3. Leaves are listed in the order in which their containers hold them. Two dicts with the same
        keys in another order go together wherever elements meet (`transpose`); the first one's
        order wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Element",
    "Kind",
    "Node",
    "Structure",
    "component",
    "container_kind",
    "field_names",
    "flatten",
    "rebuild",
    "unflatten",
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
