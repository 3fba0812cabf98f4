"""Structures and dtypes as plain values that can be sent: lists, numbers and text, no pickles.

Rule 1. Decoding data from a peer imports nothing and runs no code. Classes are looked up in the
        dictionaries of modules that are already imported; if none has the same fields, a plain
        namedtuple or dataclass with these fields replaces it.
Rule 2. Invalid data raises ValueError or TypeError; callers add what was being decoded.
"""

from __future__ import annotations

import collections
import dataclasses
import keyword
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from headrace.element.structure import (
    NodeKind,
    Structure,
    StructureNode,
    container_kind,
    field_names,
)
from headrace.errors import InvalidElementError, MissingDependencyError

__all__ = [
    "Description",
    "decode_dtype",
    "decode_structure",
    "encode_dtype",
    "encode_structure",
]

Description: TypeAlias = Any
"""Nested lists of str, int and None."""

_MAX_DEPTH = 100
_MAX_FIELDS = 4096
_PLAIN_DTYPE = re.compile(r"[<>|]([biufcSUV]\d{0,9}|[mM]8(\[\d{0,9}[A-Za-zμ]{1,7}\])?)")
_EXTENSION_DTYPE = re.compile(r"bfloat16|(float|u?int|complex)[a-z0-9_]{1,24}")


def encode_structure(structure: Structure) -> Description:
    """Return `structure` as plain values.

    Raises:
        InvalidElementError: If it is nested more deeply than `decode_structure` accepts.
    """
    return _encode_node(structure.root, 0)


def decode_structure(description: Description) -> Structure:
    """Return the structure of a description.

    Raises:
        ValueError, TypeError: If the description is invalid.
    """
    return Structure(_decode_node(description, 0))


def encode_dtype(dtype: np.dtype[Any]) -> Description:
    """Return `dtype` as plain values.

    Raises:
        InvalidElementError: If it contains Python objects.
    """
    if dtype.hasobject:
        raise InvalidElementError(f"the dtype {dtype} holds Python objects and cannot be sent")
    if dtype.names is not None and dtype.fields is not None:
        fields = [(name, *dtype.fields[name][:2]) for name in dtype.names]
        return [
            dtype.itemsize,
            dtype.isalignedstruct,
            [[name, encode_dtype(field), offset] for name, field, offset in fields],
        ]
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [encode_dtype(base), list(shape)]
    if dtype.kind == "V" and dtype.type is not np.void:
        return dtype.name
    return dtype.str


def decode_dtype(description: Description) -> np.dtype[Any]:
    """Return the dtype of a description.

    Raises:
        ValueError, TypeError: If the description is invalid.
        FailedPreconditionError: If the dtype needs a package that is not installed.
    """
    if isinstance(description, str):
        return _named_dtype(description)
    if not isinstance(description, (list, tuple)):
        raise TypeError(f"{description!r} is not a dtype")
    if len(description) == 2:
        base, shape = description
        return np.dtype((decode_dtype(base), tuple(map(_check_int, shape))))
    itemsize, aligned, fields = description
    return np.dtype(
        {
            "names": [_check_text(name) for name, _, _ in fields],
            "formats": [decode_dtype(field) for _, field, _ in fields],
            "offsets": [_check_int(offset) for _, _, offset in fields],
            "itemsize": _check_int(itemsize),
        },
        align=aligned is True,
    )


@lru_cache(maxsize=256)
def _named_dtype(name: str) -> np.dtype[Any]:
    if _PLAIN_DTYPE.fullmatch(name):
        return np.dtype(name)
    if not _EXTENSION_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not a dtype")
    try:
        # Optional, and used in this file only: machine learning dtypes that NumPy lacks.
        import ml_dtypes  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            f"the dtype {name} requires the package ml_dtypes, which is not installed in this "
            "process; install it, or send another dtype"
        ) from error
    scalar = vars(ml_dtypes).get(name)
    if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
        raise ValueError(f"{name!r} is not a dtype")
    return np.dtype(scalar)


def _encode_node(node: StructureNode, depth: int) -> Description:
    kind = node.kind
    if kind in (NodeKind.LEAF, NodeKind.NONE):
        return kind
    if depth > _MAX_DEPTH:
        raise InvalidElementError(
            f"the element is nested more than {_MAX_DEPTH} levels deep, and cannot be sent; "
            "return fewer nested dicts and tuples, or an array"
        )
    children = [_encode_node(child, depth + 1) for child in node.children]
    if node.cls is None:
        return [kind, list(node.keys), children]
    return [kind, list(node.keys), children, node.cls.__module__, node.cls.__qualname__]


def _decode_node(description: Description, depth: int) -> StructureNode:
    if type(description) is int and description in (NodeKind.LEAF, NodeKind.NONE):
        return StructureNode(description)
    if depth > _MAX_DEPTH:
        raise ValueError(f"a structure is nested more than {_MAX_DEPTH} levels deep")
    kind, keys, children, *names = description
    nodes = tuple([_decode_node(child, depth + 1) for child in children])
    if kind == NodeKind.TUPLE and not keys and not names:
        return StructureNode(NodeKind.TUPLE, None, (), nodes)
    if len(keys) != len(nodes) or len(set(keys)) != len(nodes):
        raise ValueError("a structure must have one key for each of its parts")
    if kind == NodeKind.DICT and not names:
        if any(type(key) not in (str, int) for key in keys):
            raise TypeError("a key is neither str nor int")
        return StructureNode(NodeKind.DICT, None, tuple(keys), nodes)
    if kind not in (NodeKind.NAMEDTUPLE, NodeKind.DATACLASS):
        raise ValueError(f"{kind!r} is not a kind of structure")
    module, qualname = map(_check_text, names)
    fields = tuple(map(_check_text, keys))
    found = _find_class(kind, module, qualname, fields)
    return StructureNode(kind, found or _make_class(kind, module, qualname, fields), fields, nodes)


def _find_class(kind: int, module: str, qualname: str, fields: tuple[str, ...]) -> type | None:
    # Use dictionaries only: getattr may run a module's __getattr__, which may import.
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # A plain module or a class; a lazy module would load itself on access.
        if type(found) is not type(sys) and not isinstance(found, type):
            return None
        found = vars(found).get(part)
    if not isinstance(found, type) or container_kind(found) != kind:
        return None
    # A peer must not be able to create an instance that runs code when it is deleted.
    if hasattr(found, "__del__") or field_names(found) != fields:
        return None
    return found


@lru_cache(maxsize=256)
def _make_class(kind: int, module: str, qualname: str, fields: tuple[str, ...]) -> type:
    name = qualname.rpartition(".")[2]
    if len(fields) > _MAX_FIELDS or not all(map(_is_field, fields)) or not name.isidentifier():
        raise ValueError(f"{qualname!r} with fields {fields[:8]} is not a class of plain fields")
    result: type = (
        _make_namedtuple(name, fields)
        if kind == NodeKind.NAMEDTUPLE
        else dataclasses.make_dataclass(name, fields)
    )
    # Keep the original name, so that it is described the same way when it is sent on.
    result.__module__, result.__qualname__ = module, qualname
    return result


#: An alias, because type checkers require literal fields in calls of `namedtuple`.
_make_namedtuple: Callable[[str, tuple[str, ...]], type] = collections.namedtuple


def _is_field(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


def _check_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r} is not a length")
    return value


def _check_text(value: Any) -> str:
    if type(value) is not str or len(value) > 1024:
        raise TypeError("a name must be a str of limited length")
    return value
