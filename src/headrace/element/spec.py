"""Specs: the shapes and dtypes of an element's components, nested as the element is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.element.description import (
    Description,
    decode_dtype,
    decode_structure,
    encode_dtype,
    encode_structure,
)
from headrace.element.normalize import check_strings
from headrace.element.structure import Element, component, flatten, unflatten
from headrace.element.transpose import flatten_like, map_leaves
from headrace.errors import DataLossError, InvalidElementError

__all__ = [
    "ArraySpec",
    "Spec",
    "batched",
    "check",
    "decode_spec",
    "describe_spec",
    "described_spec",
    "encode_spec",
    "leaf_spec",
    "loosened",
    "relax",
    "spec_of",
    "unbatched",
]

Spec: TypeAlias = Any
"""What an element looks like: the same nesting with `ArraySpec` for leaves."""

BYTES = np.dtype("S")
STR = np.dtype("U")
_STRING_NAMES = {BYTES.str: "bytes", STR.str: "str"}


class ArraySpec:
    """Shape and dtype of one component. Immutable and hashable.

    >>> hr.ArraySpec((None, 3), "float32")
    ArraySpec(shape=(None, 3), dtype=float32)
    >>> hr.Dataset.from_tensors({"x": 1.0, "name": "a"}).element_spec
    {'x': ArraySpec(shape=(), dtype=float64), 'name': ArraySpec(shape=(), dtype=str)}

    Attributes:
        shape: Length of each axis; None for one that differs from element to element.
        dtype: The NumPy dtype; `np.dtype("S")` for bytes and `np.dtype("U")` for str.
        name: A name for people, or None.
    """

    __slots__ = ("_hash", "dtype", "name", "shape")

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]
    name: str | None

    def __init__(
        self, shape: Sequence[int | None], dtype: npt.DTypeLike, name: str | None = None
    ) -> None:
        checked = _check_shape(shape)
        canonical = _check_dtype(dtype)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, not {name!r}")
        put = object.__setattr__
        put(self, "shape", checked)
        put(self, "dtype", canonical)
        put(self, "name", name)
        put(self, "_hash", hash((checked, canonical, name)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"ArraySpec is immutable: cannot set {attribute}")

    def __delattr__(self, attribute: str) -> None:
        raise AttributeError(f"ArraySpec is immutable: cannot delete {attribute}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArraySpec):
            return NotImplemented
        return self.shape == other.shape and self.dtype == other.dtype and self.name == other.name

    def __hash__(self) -> int:
        hashed: int = self._hash  # type: ignore[attr-defined]
        return hashed

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"ArraySpec(shape={self.shape}, dtype={_dtype_name(self.dtype)}{name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ArraySpec, (self.shape, self.dtype, self.name)


def spec_of(element: Element) -> Spec:
    """Return the spec of a normal element."""
    leaves, structure = flatten(element)
    return unflatten(
        structure,
        [leaf_spec(leaf, path) for leaf, path in zip(leaves, structure.paths, strict=True)],
    )


def leaf_spec(leaf: Any, path: str = "") -> ArraySpec:
    """Return the spec of one leaf.

    Raises:
        InvalidElementError: It is not a leaf of a normal element.
    """
    if isinstance(leaf, bytes):
        return ArraySpec((), BYTES)
    if isinstance(leaf, str):
        return ArraySpec((), STR)
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind == "O":
            # An empty one says nothing of what it holds; bytes is the commoner.
            held = check_strings(np.asarray(leaf), path)
            return ArraySpec(leaf.shape, STR if held is str else BYTES)
        return ArraySpec(leaf.shape, leaf.dtype)
    raise InvalidElementError(
        f"{component(path)} is a {type(leaf).__name__}, not an array, NumPy scalar, bytes or str; "
        "use headrace.element.normalize.normalize"
    )


def batched(spec: Spec, size: int | None) -> Spec:
    """Return the spec of `size` stacked elements; None where the size is not known."""
    return map_leaves(lambda leaf: ArraySpec((size, *leaf.shape), leaf.dtype, leaf.name), spec)


def unbatched(spec: Spec) -> Spec:
    """Return the spec of one row of a stacked element.

    Raises:
        ValueError: A component has no axes.
    """
    leaves, structure = flatten(spec)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not leaf.shape:
            raise ValueError(
                f"cannot unbatch: {component(path)} has no axis to remove ({leaf}); "
                "every component needs a leading batch axis"
            )
    return unflatten(
        structure, [ArraySpec(leaf.shape[1:], leaf.dtype, leaf.name) for leaf in leaves]
    )


def relax(a: Spec, b: Spec) -> Spec:
    """Return the most specific spec that covers both: axes that differ become None.

    Raises:
        InvalidElementError: Structures, dtypes or numbers of axes differ.
    """
    ours, structure = flatten(a)
    theirs = flatten_like(structure, b)
    made = []
    for x, y, path in zip(ours, theirs, structure.paths, strict=True):
        if x.dtype != y.dtype or len(x.shape) != len(y.shape):
            raise InvalidElementError(
                f"no spec covers both {x} and {y} for {component(path)}; "
                "dtypes and numbers of axes must be equal: convert with map()"
            )
        shape = tuple([m if m == n else None for m, n in zip(x.shape, y.shape, strict=True)])
        made.append(ArraySpec(shape, x.dtype, x.name if x.name == y.name else None))
    return unflatten(structure, made)


def loosened(spec: Spec) -> Spec:
    """Return `spec` with all axes of unknown length: what one element proves of those like it.

    Structure, dtypes and numbers of axes stay; the next element may have other lengths.
    """
    return map_leaves(
        lambda leaf: ArraySpec((None,) * len(leaf.shape), leaf.dtype, leaf.name), spec
    )


def check(spec: Spec, element: Element) -> None:
    """Check that a normal element is what `spec` says.

    Raises:
        InvalidElementError: It is not; the message names the component.
    """
    expected, structure = flatten(spec)
    leaves = flatten_like(structure, element)
    for index, (leaf, want) in enumerate(zip(leaves, expected, strict=True)):
        path = structure.paths[index]
        found = leaf_spec(leaf, path)
        if found.dtype != want.dtype and not _holds_nothing(leaf, want):
            raise InvalidElementError(
                f"{component(path)} has dtype {_dtype_name(found.dtype)}, "
                f"but the spec says {want}; convert it with astype, or change the spec"
            )
        if len(found.shape) != len(want.shape) or any(
            n is not None and n != m for m, n in zip(found.shape, want.shape, strict=True)
        ):
            raise InvalidElementError(
                f"{component(path)} has shape {found.shape}, but the spec says {want}; "
                "give the element this shape, or use None for axes that vary"
            )


def describe_spec(spec: Spec) -> Description:
    """Return `spec` as nested lists of plain values."""
    leaves, structure = flatten(spec)
    return [
        encode_structure(structure),
        [[list(leaf.shape), encode_dtype(leaf.dtype), leaf.name] for leaf in leaves],
    ]


def described_spec(description: Description) -> Spec:
    """Return the spec that `describe_spec` described. Imports and runs nothing that it names.

    Raises:
        DataLossError: The description is none.
        FailedPreconditionError: A dtype needs a package that is not installed here.
    """
    try:
        structure_description, leaves = description
        structure = decode_structure(structure_description)
        specs = [ArraySpec(shape, decode_dtype(dtype), name) for shape, dtype, name in leaves]
        return unflatten(structure, specs)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataLossError(f"this is not an element spec: {error}") from error


def encode_spec(spec: Spec) -> bytes:
    """Return `spec` as bytes that need no pickle to be read."""
    return msgspec.msgpack.encode(describe_spec(spec))


def decode_spec(data: bytes) -> Spec:
    """Return the spec that `encode_spec` wrote. Imports and runs nothing that the bytes name.

    Raises:
        DataLossError: The bytes are not a spec.
        FailedPreconditionError: A dtype needs a package that is not installed here.
    """
    try:
        return described_spec(msgspec.msgpack.decode(data))
    except (ValueError, RecursionError) as error:
        raise DataLossError(f"these bytes are not an element spec: {error}") from error


def _holds_nothing(leaf: Any, want: ArraySpec) -> bool:
    return (
        isinstance(leaf, np.ndarray)
        and leaf.size == 0
        and leaf.dtype.kind == "O"
        and want.dtype.kind in "SU"
    )


def _check_shape(shape: Any) -> tuple[int | None, ...]:
    if isinstance(shape, (int, np.integer)) or shape is None:
        raise TypeError(f"shape must be a tuple of int or None, not {shape!r}")
    checked: list[int | None] = []
    for length in shape:
        if length is None:
            checked.append(None)
        elif isinstance(length, (int, np.integer)) and length >= 0:
            checked.append(int(length))
        else:
            raise ValueError(f"shape must hold lengths >= 0 or None, not {shape!r}")
    return tuple(checked)


def _check_dtype(dtype: Any) -> np.dtype[Any]:
    if dtype is bytes:
        return BYTES
    if dtype is str:
        return STR
    made: np.dtype[Any] = np.dtype(dtype)
    if made.kind == "S":
        return BYTES
    if made.kind in "UT":
        return STR
    if made.hasobject:
        raise ValueError(
            f"dtype must not hold Python objects, as {dtype!r} does; "
            "use bytes or str for strings, else a numeric dtype"
        )
    return made


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return _STRING_NAMES.get(dtype.str) or str(dtype)
