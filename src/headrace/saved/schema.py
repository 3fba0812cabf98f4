"""Schema of a file: maps elements of one structure to columns, one per component.

A column contains numbers, bytes or str. Its values have one shape, or shapes with the same number
of axes. `infer_schema` finds the narrowest schema of a batch, and `FileSchema.merge` that of two. A
writer starts with the narrowest schema, and continues in a new file with a wider one if an element
does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.description import (
    decode_dtype,
    decode_structure,
    encode_dtype,
    encode_structure,
)
from headrace.element.normalize import check_strings
from headrace.element.spec import BYTES, STR, ArraySpec, Spec
from headrace.element.stack import stack_column
from headrace.element.structure import Structure, describe_component, flatten, unflatten
from headrace.element.transpose import flatten_like, transpose
from headrace.errors import DataLossError, FailedPreconditionError, InvalidElementError

__all__ = [
    "BYTES_KIND",
    "EMPTY_KIND",
    "NUMBERS_KIND",
    "STR_KIND",
    "SURROGATES_KIND",
    "ColumnSchema",
    "FileSchema",
    "Values",
    "decode_schema",
    "infer_schema",
]

NUMBERS_KIND = "numbers"
BYTES_KIND = "bytes"
STR_KIND = "str"
#: str that is not valid UTF-8, stored as bytes that may encode lone surrogates.
SURROGATES_KIND = "str as bytes"
#: Object arrays that have contained no item so far.
EMPTY_KIND = "nothing"

_KINDS = {NUMBERS_KIND, BYTES_KIND, STR_KIND, SURROGATES_KIND, EMPTY_KIND}

Values: TypeAlias = "NDArray[Any] | list[Any]"
"""Values of one component: stacked if they have one shape, else a list of arrays. bytes and str
without axes may also be a list."""


@dataclass(frozen=True)
class ColumnSchema:
    """Storage of the values of one component.

    Attributes:
        kind: Kind of the values: one of the names above.
        dtype: Dtype of numbers; `object` for other kinds.
        shape: Length of each axis; None for one that varies.
    """

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether all values have one shape."""
        return None not in self.shape

    @property
    def lengths(self) -> tuple[int, ...]:
        """Shape of each value of a fixed column."""
        return tuple(length for length in self.shape if length is not None)

    def spec(self, given: ArraySpec | None = None) -> ArraySpec:
        """Return the spec of the values, with details of the given one that apply to them."""
        dtype = self.dtype
        if self.kind != NUMBERS_KIND:
            dtype = STR if self.kind in (STR_KIND, SURROGATES_KIND) else BYTES
        if given is None or given.ndim != len(self.shape):
            return ArraySpec(self.shape, dtype)
        pairs = zip(self.shape, given.shape, strict=True)
        shape = [length if own is None else own for own, length in pairs]
        return ArraySpec(shape, given.dtype if self.kind == EMPTY_KIND else dtype, given.name)

    def describe(self) -> list[Any]:
        """Return the column schema as plain values."""
        dtype = encode_dtype(self.dtype) if self.kind == NUMBERS_KIND else None
        return [self.kind, dtype, list(self.shape)]

    def merge(self, other: ColumnSchema) -> ColumnSchema | None:
        """Return a column schema for the values of both, or None if there is none."""
        held = (
            self.kind
            if self.kind == other.kind
            else _MERGED_KINDS.get(frozenset([self.kind, other.kind]))
        )
        if held is None:
            return None
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return None
        return ColumnSchema(held, self.dtype, _common_shape([self.shape, other.shape]))


_MERGED_KINDS = {
    frozenset([EMPTY_KIND, BYTES_KIND]): BYTES_KIND,
    frozenset([EMPTY_KIND, STR_KIND]): STR_KIND,
    frozenset([EMPTY_KIND, SURROGATES_KIND]): SURROGATES_KIND,
    frozenset([STR_KIND, SURROGATES_KIND]): SURROGATES_KIND,
}


@dataclass(frozen=True)
class FileSchema:
    """Mapping of elements to columns, one for each leaf of their structure."""

    structure: Structure
    columns: tuple[ColumnSchema, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether the values of each column have one shape, so that rows can be stacked."""
        return all(column.is_fixed for column in self.columns)

    def describe(self) -> str:
        """Return the schema as JSON."""
        columns = [column.describe() for column in self.columns]
        return json.dumps([encode_structure(self.structure), columns])

    def spec(self, given: Spec | None) -> Spec:
        """Return the spec of the elements, with details of `given` that files do not store."""
        if given is None:
            return unflatten(self.structure, [column.spec() for column in self.columns])
        leaves = [
            column.spec(leaf)
            for column, leaf in zip(self.columns, flatten_like(self.structure, given), strict=True)
        ]
        return unflatten(self.structure, leaves)

    def merge(self, other: FileSchema, first: int) -> FileSchema:
        """Return a schema for the elements of both.

        Args:
            other: Schema of later elements with the same structure.
            first: Number of the first of these elements, for errors.

        Raises:
            InvalidElementError: If there is no such schema; the message names the component.
        """
        columns = []
        paths = self.structure.paths
        for old, new, path in zip(self.columns, other.columns, paths, strict=True):
            column = old.merge(new)
            if column is None:
                raise InvalidElementError(
                    f"cannot save {describe_component(path)}: it is {_describe_column(old)} in "
                    f"earlier elements, and {_describe_column(new)} in element {first} or soon "
                    "after; a saved component has one dtype and one number of axes: convert it "
                    "with map()"
                )
            columns.append(column)
        return FileSchema(self.structure, tuple(columns))

    def check(self, spec: Spec) -> None:
        """Check that elements of this schema conform to `spec`.

        Raises:
            InvalidElementError: If they do not; the message names the component.
        """
        wanted = flatten_like(self.structure, spec)
        for column, want, path in zip(self.columns, wanted, self.structure.paths, strict=True):
            found = column.spec()
            same = (
                found.dtype == want.dtype or column.kind == EMPTY_KIND
            ) and found.ndim == want.ndim
            if not same or any(
                n is not None and m != n for m, n in zip(found.shape, want.shape, strict=True)
            ):
                raise InvalidElementError(
                    f"cannot save {describe_component(path)}: it is {_describe_column(column)}, "
                    f"but the dataset's spec is {want}"
                )

    def allow_surrogates(self, index: int) -> FileSchema:
        """Return a schema that allows any str in this column."""
        columns = list(self.columns)
        columns[index] = replace(columns[index], kind=SURROGATES_KIND)
        return FileSchema(self.structure, tuple(columns))


def decode_schema(text: str, path: str) -> FileSchema:
    """Return the schema that `FileSchema.describe` encoded.

    Args:
        text: The JSON.
        path: Path of the file, for errors.

    Raises:
        DataLossError: If it is damaged.
        FailedPreconditionError: If a dtype needs a package that is not installed.
    """
    try:
        described, columns = json.loads(text)
        structure = decode_structure(described)
        form = FileSchema(structure, tuple(_decode_column(*column) for column in columns))
        if len(form.columns) != structure.size:
            raise ValueError(f"{len(form.columns)} columns for {structure.size} components")
    except FailedPreconditionError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataLossError(f"{path!r} is damaged: {error}; save the dataset again") from error
    return form


def infer_schema(
    chunk: Chunk, first: int, structure: Structure | None
) -> tuple[FileSchema, list[Values]]:
    """Return the narrowest schema of elements, and the values of each column.

    Args:
        chunk: At least one element.
        first: Number of the first element, for errors.
        structure: Structure of earlier elements; None if these are the first.

    Raises:
        InvalidElementError: If they cannot be stored in columns; the message names the component.
    """
    if chunk.is_columnar:
        columns = chunk.columns()
        found = flatten(columns)[1] if structure is None else structure
        leaves = flatten_like(found, columns)
        measured = [
            (_infer_column(leaf, path), leaf)
            for leaf, path in zip(leaves, found.paths, strict=True)
        ]
    else:
        found, lists = transpose(chunk.rows(), structure)
        measured = [
            _infer_list_column(values, path, first)
            for values, path in zip(lists, found.paths, strict=True)
        ]
    form = FileSchema(found, tuple(column for column, _ in measured))
    return form, [values for _, values in measured]


def _infer_column(stacked: Any, path: str) -> ColumnSchema:
    if not isinstance(stacked, np.ndarray) or not stacked.ndim:
        raise InvalidElementError(
            f"{describe_component(path)} of a batch is {stacked!r:.80}, which has no "
            "leading axis; give every component the same leading axis"
        )
    shape = stacked.shape[1:]
    if stacked.dtype.kind == "O":
        return ColumnSchema(_KIND_OF_TYPE[check_strings(stacked, path)], stacked.dtype, shape)
    if stacked.dtype.hasobject:
        raise InvalidElementError(
            f"cannot save {describe_component(path)}: its dtype {stacked.dtype} "
            "contains Python objects"
        )
    return ColumnSchema(NUMBERS_KIND, stacked.dtype, shape)


def _infer_list_column(values: list[Any], path: str, first: int) -> tuple[ColumnSchema, Values]:
    cls = type(values[0])
    if len(set(map(type, values))) != 1:
        _raise_mixed(values, path, first, lambda value: type(value).__name__)
    if cls is bytes or cls is str:
        return ColumnSchema(_KIND_OF_TYPE[cls], _OBJECT), values
    if cls is not np.ndarray:
        # One class with several dtypes, since units and fields may differ.
        if issubclass(cls, _OF_MANY_DTYPES) and len({value.dtype for value in values}) != 1:
            _raise_mixed(values, path, first, lambda value: f"a {value.dtype}")
        stacked = stack_column(values, path)
        return _infer_column(stacked, path), stacked
    if len(set(map(attrgetter("dtype"), values))) != 1:
        _raise_mixed(values, path, first, lambda value: f"an array of {value.dtype}")
    if len(set(map(attrgetter("ndim"), values))) != 1:
        _raise_mixed(values, path, first, lambda value: f"an array of {value.ndim} axes")
    array = values[0]
    held = NUMBERS_KIND
    if array.dtype.kind == "O":
        found = {check_strings(value, path) for value in values} - {None}
        if len(found) > 1:
            _raise_mixed(values, path, first, lambda value: f"of {check_strings(value, path)}")
        held = _KIND_OF_TYPE[found.pop() if found else None]
    shapes = set(map(attrgetter("shape"), values))
    if len(shapes) != 1:
        return ColumnSchema(held, array.dtype, _common_shape(shapes)), values
    # Avoid copying a single large array.
    stacked = array[np.newaxis] if len(values) == 1 else stack_column(values, path)
    return ColumnSchema(held, array.dtype, array.shape), stacked


def _common_shape(shapes: Collection[tuple[int | None, ...]]) -> tuple[int | None, ...]:
    """Return a shape with the lengths that all shapes share, and None for those that differ."""
    return tuple(
        lengths.pop() if len(lengths) == 1 else None
        for lengths in map(set, zip(*shapes, strict=True))
    )


def _raise_mixed(values: Sequence[Any], path: str, first: int, shown: Any) -> None:
    before = shown(values[0])
    number, found = next(
        (first + index, shown(value))
        for index, value in enumerate(values)
        if shown(value) != before
    )
    raise InvalidElementError(
        f"cannot save {describe_component(path)}: it is {before} in element "
        f"{first}, and {found} in element {number}; a saved component has one dtype "
        "and one number of axes: convert it with map()"
    )


def _describe_column(column: ColumnSchema) -> str:
    description = str(column.dtype) if column.kind == NUMBERS_KIND else column.kind
    return f"{description} of shape {column.shape}" if column.shape else description


def _decode_column(kind: Any, dtype: Any, shape: Any) -> ColumnSchema:
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is not a column kind")
    lengths = tuple(shape)
    if any(n is not None and (type(n) is not int or n < 0) for n in lengths):
        raise ValueError(f"{shape!r} is not a shape")
    return ColumnSchema(kind, decode_dtype(dtype) if kind == NUMBERS_KIND else _OBJECT, lengths)


_OBJECT = np.dtype(object)
_OF_MANY_DTYPES = (np.void, np.datetime64, np.timedelta64)
_KIND_OF_TYPE: dict[type | None, str] = {bytes: BYTES_KIND, str: STR_KIND, None: EMPTY_KIND}
