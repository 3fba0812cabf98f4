"""Rows of Arrow tables that can be read by index: of Hugging Face and of Lance datasets."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import Element, flatten, unflatten
from headrace.errors import InvalidArgumentError
from headrace.plan.source import IndexedSource
from headrace.saved.schema import NUMBERS_KIND, FileSchema
from headrace.sources.arrow_columns import find_null, infer_arrow_schema, read_columns

__all__ = ["ArrowRows", "infer_row_schema"]


def infer_row_schema(arrow_schema: Any) -> FileSchema:
    """Return the schema of rows of a table.

    Raises:
        InvalidArgumentError: If a column cannot be read by index; the message names it.
    """
    schema = infer_arrow_schema(arrow_schema)
    for path, column in zip(schema.structure.paths, schema.columns, strict=True):
        if not column.is_fixed and column.kind != NUMBERS_KIND:
            raise InvalidArgumentError(
                f"column {path} has lists of strings of different lengths; leave the column out "
                "with `columns`, or write lists of one length"
            )
    return schema


class ArrowRows(IndexedSource):
    """Rows of a table as dicts; an index is a row.

    Lists of numbers of different lengths cannot be stacked: they are the `bytes` of their arrays,
    which `as_dataset` decodes.

    Attributes:
        schema: Schema of the rows.
    """

    schema: FileSchema

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Any:
        """Return the rows with these indices, in this order, as an Arrow table."""

    @abstractmethod
    def describe_row(self, index: int) -> str:
        """Return a dataset and the number of a row in it, for an error."""

    def as_dataset(self, make: Any) -> Any:
        """Return the rows as a dataset of class `make`."""
        dataset = make.from_source(self)
        return dataset if self.schema.is_fixed else dataset.map(_DecodeLists(self.schema))

    @property
    def element_spec(self) -> Spec | None:
        leaves, structure = flatten(self.schema.spec(None))
        encoded = [
            leaf if column.is_fixed else ArraySpec((), bytes)
            for leaf, column in zip(leaves, self.schema.columns, strict=True)
        ]
        return unflatten(structure, encoded)

    def gather(self, indices: NDArray[np.int64]) -> Any:
        flat, shape = np.asarray(indices).ravel(), np.shape(indices)
        table = self.take(flat).combine_chunks()
        arrays = [_only_chunk(column) for column in table.columns]
        null = find_null(table.column_names, arrays)
        if null is not None:
            raise InvalidArgumentError(
                f"{self.describe_row(int(flat[null.row]))}: column {null.column!r} is null, which "
                "has no NumPy value; leave the column out with `columns`"
            )
        leaves = []
        for values in read_columns(self.schema, arrays):
            if isinstance(values, list):
                column = np.empty(flat.size, object)
                column[:] = [array.tobytes() for array in values]
            else:
                column = values.copy()  # numbers are views of the table
            leaves.append(column.reshape(*shape, *column.shape[1:]))
        return unflatten(self.schema.structure, leaves)


def _only_chunk(column: Any) -> Any:
    """Return the array of a combined column, which has no chunk if it is empty."""
    return column.chunk(0) if column.num_chunks else column.combine_chunks()


@dataclass(frozen=True)
class _DecodeLists:
    """Function that decodes the lists in a row of `ArrowRows`."""

    schema: FileSchema

    def __call__(self, row: Element) -> Element:
        """Return the row with arrays in place of encoded lists."""
        leaves, structure = flatten(row)
        for number, column in enumerate(self.schema.columns):
            if not column.is_fixed:
                array = np.frombuffer(leaves[number], column.dtype)
                leaves[number] = array.reshape(-1, *column.lengths).copy()
        return unflatten(structure, leaves)
