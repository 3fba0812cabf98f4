"""Arrays of different lengths in one array: their concatenation, and where each of them begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import StackedElement, join, stack_column
from headrace.element.structure import Element, describe_component, flatten, unflatten
from headrace.element.transpose import transpose
from headrace.errors import InvalidElementError

__all__ = ["RaggedArray", "find_fixed_lengths", "ragged_spec", "stack_ragged"]


class RaggedArray(NamedTuple):
    """Rows of different lengths: a namedtuple of two arrays, which is an element structure.

    Row i is `values[row_splits[i] : row_splits[i + 1]]`.

    >>> words = hr.Dataset.range(1, 4).map(lambda n: np.full(int(n), n))
    >>> batch = next(iter(words.ragged_batch(3)))
    >>> batch
    RaggedArray(values=array([1, 2, 2, 3, 3, 3]), row_splits=array([0, 1, 3, 6]))
    >>> batch.to_list()
    [[1], [2, 2], [3, 3, 3]]
    """

    values: Any
    """The rows, concatenated along their first axis."""
    row_splits: Any
    """Start of each row, and the number of values: int64, one entry more than there are rows."""

    def row(self, index: int) -> NDArray[Any]:
        """Return row `index`, as a view."""
        index = range(len(self.row_splits) - 1)[index]
        row: NDArray[Any] = self.values[self.row_splits[index] : self.row_splits[index + 1]]
        return row

    def to_list(self) -> list[Any]:
        """Return the rows as nested lists of Python values."""
        return [self.row(index).tolist() for index in range(len(self.row_splits) - 1)]


def find_fixed_lengths(spec: Spec | None) -> tuple[str, ...]:
    """Return the paths of the components whose first axis has one length in all elements."""
    leaves, structure = flatten(spec)
    return tuple(
        path
        for leaf, path in zip(leaves, structure.paths, strict=True)
        if leaf.shape and leaf.shape[0] is not None
    )


def ragged_spec(spec: Spec, size: int | None, fixed_lengths: Collection[str]) -> Spec:
    """Return the spec of `stack_ragged` of `size` elements; None is an unknown size."""
    leaves, structure = flatten(spec)
    splits = ArraySpec((None if size is None else size + 1,), np.int64)
    return unflatten(
        structure,
        [
            ArraySpec((size, *leaf.shape), leaf.dtype, leaf.name)
            if not leaf.shape or path in fixed_lengths
            else RaggedArray(ArraySpec((None, *leaf.shape[1:]), leaf.dtype, leaf.name), splits)
            for leaf, path in zip(leaves, structure.paths, strict=True)
        ],
    )


def stack_ragged(elements: Sequence[Element], fixed_lengths: Collection[str]) -> StackedElement:
    """Return `elements` as one element of new arrays.

    Args:
        elements: At least one element.
        fixed_lengths: Paths of the arrays to stack. Other arrays become a `RaggedArray`, and
            components without axes are always stacked.

    Raises:
        InvalidElementError: If structures, dtypes, or shapes beyond the first axis differ.
    """
    structure, columns = transpose(elements)
    return unflatten(
        structure,
        [
            _concatenate_rows(column, path)
            if isinstance(column[0], np.ndarray) and path not in fixed_lengths
            else stack_column(column, path)
            for column, path in zip(columns, structure.paths, strict=True)
        ],
    )


def _concatenate_rows(arrays: Sequence[Any], path: str) -> RaggedArray:
    first = arrays[0]
    for position, array in enumerate(arrays):
        if not isinstance(array, np.ndarray):
            raise InvalidElementError(
                f"{describe_component(path)} is an array in element 0 and a "
                f"{type(array).__name__} in element {position}; make it an array with map()"
            )
        if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
            raise InvalidElementError(
                f"{describe_component(path)} has dtype {first.dtype} and shape {first.shape} in "
                f"element 0, and dtype {array.dtype} and shape {array.shape} in element "
                f"{position}; only the first axis may differ, so convert it with map()"
            )
    row_splits = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)), out=row_splits[1:])
    return RaggedArray(join(arrays, first.dtype), row_splits)
