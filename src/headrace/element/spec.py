"""Specs: shapes and dtypes of an element's components, nested like the element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.element.dataset_leaf import WINDOW_REMEDY, DatasetLeaf, DatasetSpec
from headrace.element.description import (
    Description,
    decode_dtype,
    decode_structure,
    encode_dtype,
    encode_structure,
)
from headrace.element.normalize import check_strings
from headrace.element.structure import Element, describe_component, flatten, unflatten
from headrace.element.transpose import flatten_like, map_leaves
from headrace.errors import DataLossError, InvalidElementError

__all__ = [
    "ArraySpec",
    "Spec",
    "batch_spec",
    "check_element",
    "decode_spec",
    "describe_spec",
    "encode_spec",
    "leaf_spec",
    "parse_spec",
    "relax",
    "relax_lengths",
    "spec_of",
    "unbatch_spec",
]

Spec: TypeAlias = Any
"""Description of an element: the same nesting, with an `ArraySpec` for each leaf, or a
`DatasetSpec` if the leaf is a window."""

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
        shape: Length of each axis; None for an axis whose length varies.
        dtype: The NumPy dtype; `np.dtype("S")` for bytes and `np.dtype("U")` for str.
        name: A descriptive name, or None.
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


def leaf_spec(leaf: Any, path: str = "") -> Any:
    """Return the spec of one leaf.

    Raises:
        InvalidElementError: If it is not a leaf of a normal element.
    """
    if isinstance(leaf, DatasetLeaf):
        return DatasetSpec(leaf._known_spec)
    if isinstance(leaf, bytes):
        return ArraySpec((), BYTES)
    if isinstance(leaf, str):
        return ArraySpec((), STR)
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind == "O":
            # An empty array does not show its type; bytes are more common.
            checked = check_strings(np.asarray(leaf), path)
            return ArraySpec(leaf.shape, STR if checked is str else BYTES)
        return ArraySpec(leaf.shape, leaf.dtype)
    raise InvalidElementError(
        f"{describe_component(path)} is a {type(leaf).__name__}, not an array, NumPy scalar, bytes "
        "or str; "
        "use headrace.element.normalize.normalize"
    )


def batch_spec(spec: Spec, size: int | None) -> Spec:
    """Return the spec of `size` stacked elements; None is an unknown size."""
    leaves, structure = flatten(spec)
    _refuse_datasets("batch", leaves)
    return unflatten(
        structure, [ArraySpec((size, *leaf.shape), leaf.dtype, leaf.name) for leaf in leaves]
    )


def unbatch_spec(spec: Spec) -> Spec:
    """Return the spec of one row of a stacked element.

    Raises:
        ValueError: If a component has no axes.
    """
    leaves, structure = flatten(spec)
    _refuse_datasets("unbatch", leaves)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not leaf.shape:
            raise ValueError(
                f"cannot unbatch: {describe_component(path)} has no axis to remove ({leaf}); "
                "every component needs a leading batch axis"
            )
    return unflatten(
        structure, [ArraySpec(leaf.shape[1:], leaf.dtype, leaf.name) for leaf in leaves]
    )


def relax(a: Spec, b: Spec) -> Spec:
    """Return the most specific spec that covers both: lengths that differ become None.

    Raises:
        InvalidElementError: If structures, dtypes or numbers of axes differ.
    """
    ours, structure = flatten(a)
    theirs = flatten_like(structure, b)
    result: list[Any] = []
    for x, y, path in zip(ours, theirs, structure.paths, strict=True):
        if isinstance(x, DatasetSpec) and isinstance(y, DatasetSpec):
            result.append(x if x == y else DatasetSpec())
            continue
        _refuse_datasets("join arrays and", [x, y])
        if x.dtype != y.dtype or len(x.shape) != len(y.shape):
            raise InvalidElementError(
                f"no spec matches both {x} and {y} for {describe_component(path)}; dtypes and "
                "numbers of axes must be equal; convert elements with map()"
            )
        shape = tuple([m if m == n else None for m, n in zip(x.shape, y.shape, strict=True)])
        result.append(ArraySpec(shape, x.dtype, x.name if x.name == y.name else None))
    return unflatten(structure, result)


def relax_lengths(spec: Spec) -> Spec:
    """Return `spec` with unknown lengths for all axes.

    That is what one element shows about the others: structure, dtypes and numbers of axes are
    equal, but lengths may differ.
    """
    return map_leaves(_relax_leaf, spec)


def _relax_leaf(leaf: Any) -> Any:
    if isinstance(leaf, DatasetSpec):
        known = leaf.element_spec
        return DatasetSpec(None if known is None else relax_lengths(known))
    return ArraySpec((None,) * len(leaf.shape), leaf.dtype, leaf.name)


def _refuse_datasets(verb: str, leaves: Sequence[Any]) -> None:
    if any(isinstance(leaf, DatasetSpec) for leaf in leaves):
        raise InvalidElementError(
            f"cannot {verb} elements that are datasets, as `window` yields them; {WINDOW_REMEDY}"
        )


def check_element(spec: Spec, element: Element) -> None:
    """Check that a normal element conforms to `spec`.

    Raises:
        InvalidElementError: If it does not; the message names the component.
    """
    expected, structure = flatten(spec)
    leaves = flatten_like(structure, element)
    for index, (leaf, want) in enumerate(zip(leaves, expected, strict=True)):
        path = structure.paths[index]
        found = leaf_spec(leaf, path)
        if found.dtype != want.dtype and not _is_empty_string_array(leaf, want):
            raise InvalidElementError(
                f"{describe_component(path)} has dtype {_dtype_name(found.dtype)}, but the spec "
                f"is {want}; convert it with astype, or change the spec"
            )
        if len(found.shape) != len(want.shape) or any(
            n is not None and n != m for m, n in zip(found.shape, want.shape, strict=True)
        ):
            raise InvalidElementError(
                f"{describe_component(path)} has shape {found.shape}, but the spec has shape "
                f"{want}; reshape the element, or use None for axes that vary"
            )


def describe_spec(spec: Spec) -> Description:
    """Return `spec` as nested lists of plain values."""
    leaves, structure = flatten(spec)
    _refuse_datasets("save or send", leaves)
    return [
        encode_structure(structure),
        [[list(leaf.shape), encode_dtype(leaf.dtype), leaf.name] for leaf in leaves],
    ]


def parse_spec(description: Description) -> Spec:
    """Return the spec of a description. Imports nothing and runs no code that it names.

    Raises:
        DataLossError: If the description is invalid.
        FailedPreconditionError: If a dtype needs a package that is not installed.
    """
    try:
        structure_description, leaves = description
        structure = decode_structure(structure_description)
        specs = [ArraySpec(shape, decode_dtype(dtype), name) for shape, dtype, name in leaves]
        return unflatten(structure, specs)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataLossError(f"invalid element spec: {error}") from error


def encode_spec(spec: Spec) -> bytes:
    """Return `spec` as bytes that can be read without pickle."""
    return msgspec.msgpack.encode(describe_spec(spec))


def decode_spec(data: bytes) -> Spec:
    """Return the spec that `encode_spec` wrote. Imports nothing and runs no code that it names.

    Raises:
        DataLossError: If the bytes are not a spec.
        FailedPreconditionError: If a dtype needs a package that is not installed.
    """
    try:
        return parse_spec(msgspec.msgpack.decode(data))
    except (ValueError, RecursionError) as error:
        raise DataLossError(f"invalid encoded element spec: {error}") from error


def _is_empty_string_array(leaf: Any, want: ArraySpec) -> bool:
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
    result: np.dtype[Any] = np.dtype(dtype)
    if result.kind == "S":
        return BYTES
    if result.kind in "UT":
        return STR
    if result.hasobject:
        raise ValueError(
            f"dtype must not hold Python objects, as {dtype!r} does; "
            "use bytes or str for strings, else a numeric dtype"
        )
    return result


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return _STRING_NAMES.get(dtype.str) or str(dtype)
