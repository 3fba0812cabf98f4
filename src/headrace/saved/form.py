"""The form of a file: how elements of one structure are columns, one for each component.

A column holds numbers, bytes or str; each of its values has one shape, or shapes of one number of
axes. What a batch of elements needs is found by `measure`; what two batches need together, by
`Form.joined`. So a writer begins with the narrowest form, and goes on in a new file with a wider
one when an element does not fit.
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
from headrace.element.structure import Structure, component, flatten, unflatten
from headrace.element.transpose import flatten_like, transpose
from headrace.errors import DataLossError, FailedPreconditionError, InvalidElementError

__all__ = [
    "BYTES_HELD",
    "NOTHING",
    "NUMBERS",
    "STR_HELD",
    "SURROGATES",
    "Column",
    "Form",
    "Values",
    "decode_form",
    "measure",
]

NUMBERS = "numbers"
BYTES_HELD = "bytes"
STR_HELD = "str"
#: str that UTF-8 does not hold, as bytes in which lone surrogates are let pass.
SURROGATES = "str as bytes"
#: Object arrays in which there was no item so far.
NOTHING = "nothing"

_HELD = {NUMBERS, BYTES_HELD, STR_HELD, SURROGATES, NOTHING}

Values: TypeAlias = "NDArray[Any] | list[Any]"
"""The values of one component: stacked where they have one shape, else a list of arrays. bytes and
str without axes may also be a list."""


@dataclass(frozen=True)
class Column:
    """How the values of one component are kept.

    Attributes:
        held: What they hold: one of the names above.
        dtype: The dtype of numbers; of anything else it is `object`.
        shape: The length of each axis; None for one that differs.
    """

    held: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether all values have one shape."""
        return None not in self.shape

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape of each value of a fixed column."""
        return tuple(length for length in self.shape if length is not None)

    def spec(self, given: ArraySpec | None = None) -> ArraySpec:
        """Return the spec of the values: that which is given, as far as it is true of them."""
        dtype = self.dtype
        if self.held != NUMBERS:
            dtype = STR if self.held in (STR_HELD, SURROGATES) else BYTES
        if given is None or given.ndim != len(self.shape):
            return ArraySpec(self.shape, dtype)
        pairs = zip(self.shape, given.shape, strict=True)
        shape = [length if own is None else own for own, length in pairs]
        return ArraySpec(shape, given.dtype if self.held == NOTHING else dtype, given.name)

    def describe(self) -> list[Any]:
        """Return it as plain values."""
        dtype = encode_dtype(self.dtype) if self.held == NUMBERS else None
        return [self.held, dtype, list(self.shape)]

    def joined(self, other: Column) -> Column | None:
        """Return the column that holds the values of both; None: there is none."""
        held = (
            self.held
            if self.held == other.held
            else _JOINED.get(frozenset([self.held, other.held]))
        )
        if held is None:
            return None
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return None
        return Column(held, self.dtype, _common([self.shape, other.shape]))


_JOINED = {
    frozenset([NOTHING, BYTES_HELD]): BYTES_HELD,
    frozenset([NOTHING, STR_HELD]): STR_HELD,
    frozenset([NOTHING, SURROGATES]): SURROGATES,
    frozenset([STR_HELD, SURROGATES]): SURROGATES,
}


@dataclass(frozen=True)
class Form:
    """How elements are columns, one for each leaf of their structure."""

    structure: Structure
    columns: tuple[Column, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether all values of each column have one shape, so that rows can be stacked."""
        return all(column.is_fixed for column in self.columns)

    def describe(self) -> str:
        """Return it as JSON."""
        columns = [column.describe() for column in self.columns]
        return json.dumps([encode_structure(self.structure), columns])

    def spec(self, given: Spec | None) -> Spec:
        """Return the spec of the elements, with what the given one says and files do not."""
        if given is None:
            return unflatten(self.structure, [column.spec() for column in self.columns])
        leaves = [
            column.spec(leaf)
            for column, leaf in zip(self.columns, flatten_like(self.structure, given), strict=True)
        ]
        return unflatten(self.structure, leaves)

    def joined(self, other: Form, first: int) -> Form:
        """Return the form of the elements of both.

        Args:
            other: That of later elements, with the same structure.
            first: The number of the first of them, for errors.

        Raises:
            InvalidElementError: There is none; the message names the component.
        """
        columns = []
        paths = self.structure.paths
        for old, new, path in zip(self.columns, other.columns, paths, strict=True):
            column = old.joined(new)
            if column is None:
                raise InvalidElementError(
                    f"{component(path)} cannot be saved: it is {_shown(old)} in the elements "
                    f"before, and {_shown(new)} in element {first} or soon after it; a saved "
                    "component has one dtype and one number of axes: convert it with map()"
                )
            columns.append(column)
        return Form(self.structure, tuple(columns))

    def check(self, spec: Spec) -> None:
        """Check that elements of this form are what `spec` says.

        Raises:
            InvalidElementError: They are not; the message names the component.
        """
        wanted = flatten_like(self.structure, spec)
        for column, want, path in zip(self.columns, wanted, self.structure.paths, strict=True):
            found = column.spec()
            same = (found.dtype == want.dtype or column.held == NOTHING) and found.ndim == want.ndim
            if not same or any(
                n is not None and m != n for m, n in zip(found.shape, want.shape, strict=True)
            ):
                raise InvalidElementError(
                    f"{component(path)} cannot be saved: it is {_shown(column)}, but the "
                    f"dataset's spec says {want}"
                )

    def with_surrogates(self, index: int) -> Form:
        """Return the form that holds any str in this column."""
        columns = list(self.columns)
        columns[index] = replace(columns[index], held=SURROGATES)
        return Form(self.structure, tuple(columns))


def decode_form(text: str, path: str) -> Form:
    """Return what `Form.describe` said.

    Args:
        text: The JSON.
        path: Whose it is, for errors.

    Raises:
        DataLossError: It is damaged.
        FailedPreconditionError: A dtype needs a package that is not installed here.
    """
    try:
        described, columns = json.loads(text)
        structure = decode_structure(described)
        form = Form(structure, tuple(_decode_column(*column) for column in columns))
        if len(form.columns) != structure.size:
            raise ValueError(f"{len(form.columns)} columns for {structure.size} components")
    except FailedPreconditionError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataLossError(f"{path!r} is damaged: {error}; save the dataset again") from error
    return form


def measure(chunk: Chunk, first: int, structure: Structure | None) -> tuple[Form, list[Values]]:
    """Return the narrowest form of some elements, and the values of each of its columns.

    Args:
        chunk: At least one element.
        first: The number of the first of them, for errors.
        structure: That of elements before; None: these are the first.

    Raises:
        InvalidElementError: They cannot be columns; the message names the component.
    """
    if chunk.is_columnar:
        columns = chunk.columns()
        found = flatten(columns)[1] if structure is None else structure
        leaves = flatten_like(found, columns)
        measured = [
            (_column_of(leaf, path), leaf) for leaf, path in zip(leaves, found.paths, strict=True)
        ]
    else:
        found, lists = transpose(chunk.rows(), structure)
        measured = [
            _measure_list(values, path, first)
            for values, path in zip(lists, found.paths, strict=True)
        ]
    form = Form(found, tuple(column for column, _ in measured))
    return form, [values for _, values in measured]


def _column_of(stacked: Any, path: str) -> Column:
    if not isinstance(stacked, np.ndarray) or not stacked.ndim:
        raise InvalidElementError(
            f"{component(path)} of a batch is {stacked!r:.80}, which has no leading axis; "
            "give every component the same leading axis"
        )
    shape = stacked.shape[1:]
    if stacked.dtype.kind == "O":
        return Column(_HELD_OF[check_strings(stacked, path)], stacked.dtype, shape)
    if stacked.dtype.hasobject:
        raise InvalidElementError(
            f"{component(path)} cannot be saved: its dtype {stacked.dtype} holds Python objects"
        )
    return Column(NUMBERS, stacked.dtype, shape)


def _measure_list(values: list[Any], path: str, first: int) -> tuple[Column, Values]:
    cls = type(values[0])
    if len(set(map(type, values))) != 1:
        _refuse_mixed(values, path, first, lambda value: type(value).__name__)
    if cls is bytes or cls is str:
        return Column(_HELD_OF[cls], _OBJECT), values
    if cls is not np.ndarray:
        # One class, many dtypes: units and fields differ.
        if issubclass(cls, _OF_MANY_DTYPES) and len({value.dtype for value in values}) != 1:
            _refuse_mixed(values, path, first, lambda value: f"a {value.dtype}")
        stacked = stack_column(values, path)
        return _column_of(stacked, path), stacked
    if len(set(map(attrgetter("dtype"), values))) != 1:
        _refuse_mixed(values, path, first, lambda value: f"an array of {value.dtype}")
    if len(set(map(attrgetter("ndim"), values))) != 1:
        _refuse_mixed(values, path, first, lambda value: f"an array of {value.ndim} axes")
    array = values[0]
    held = NUMBERS
    if array.dtype.kind == "O":
        found = {check_strings(value, path) for value in values} - {None}
        if len(found) > 1:
            _refuse_mixed(values, path, first, lambda value: f"of {check_strings(value, path)}")
        held = _HELD_OF[found.pop() if found else None]
    shapes = set(map(attrgetter("shape"), values))
    if len(shapes) != 1:
        return Column(held, array.dtype, _common(shapes)), values
    # One large array is not copied.
    stacked = array[np.newaxis] if len(values) == 1 else stack_column(values, path)
    return Column(held, array.dtype, array.shape), stacked


def _common(shapes: Collection[tuple[int | None, ...]]) -> tuple[int | None, ...]:
    """Return the lengths that shapes of one number of axes have in common, else None."""
    return tuple(
        lengths.pop() if len(lengths) == 1 else None
        for lengths in map(set, zip(*shapes, strict=True))
    )


def _refuse_mixed(values: Sequence[Any], path: str, first: int, shown: Any) -> None:
    before = shown(values[0])
    number, found = next(
        (first + index, shown(value))
        for index, value in enumerate(values)
        if shown(value) != before
    )
    raise InvalidElementError(
        f"{component(path)} cannot be saved: it is {before} in element {first}, and {found} in "
        f"element {number}; a saved component has one dtype and one number of axes: convert it "
        "with map()"
    )


def _shown(column: Column) -> str:
    what = str(column.dtype) if column.held == NUMBERS else column.held
    return f"{what} of shape {column.shape}" if column.shape else what


def _decode_column(held: Any, dtype: Any, shape: Any) -> Column:
    if held not in _HELD:
        raise ValueError(f"{held!r} is not what a column holds")
    lengths = tuple(shape)
    if any(n is not None and (type(n) is not int or n < 0) for n in lengths):
        raise ValueError(f"{shape!r} is not a shape")
    return Column(held, decode_dtype(dtype) if held == NUMBERS else _OBJECT, lengths)


_OBJECT = np.dtype(object)
_OF_MANY_DTYPES = (np.void, np.datetime64, np.timedelta64)
_HELD_OF: dict[type | None, str] = {bytes: BYTES_HELD, str: STR_HELD, None: NOTHING}
