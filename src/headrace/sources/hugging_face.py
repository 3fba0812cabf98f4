"""Rows of Hugging Face datasets, read from their Arrow tables or Parquet files.

The package `datasets` makes a Python object of each value, which takes about 50 µs per row. Where
the columns have NumPy equivalents, they are read directly instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError, UnavailableError
from headrace.saved.schema import FileSchema
from headrace.sources.arrow_columns import find_null
from headrace.sources.arrow_rows import ArrowRows, infer_row_schema
from headrace.sources.parquet import ParquetSource

__all__ = ["HuggingFaceRows", "find_parquet_rows"]

_PLAIN_FEATURES = frozenset({"ClassLabel", "LargeList", "List", "Sequence", "Value"})
"""Features whose values are those of the Arrow columns; others (Image, Audio) decode them."""


@dataclass(frozen=True)
class HuggingFaceRows(ArrowRows):
    """Rows of a map-style Hugging Face dataset as dicts; an index is a row.

    Args:
        dataset: The dataset, with format "arrow".
        schema: Schema of the rows.
    """

    dataset: Any
    schema: FileSchema

    @classmethod
    def of_dataset(cls, dataset: Any) -> HuggingFaceRows | None:
        """Return the rows of a dataset; None if its values must be made by `datasets`.

        This is so if it has a format, columns without NumPy equivalent, features that decode
        values, or nulls.
        """
        if dataset.format["type"] is not None or not _is_plain(dataset.features):
            return None
        table = dataset.data.table.select(dataset.column_names)
        try:
            schema = infer_row_schema(table.schema)
        except InvalidArgumentError:
            return None
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count or any(find_null([name], [chunk]) for chunk in column.chunks):
                return None
        return cls(dataset.with_format("arrow"), schema)

    @property
    def size(self) -> int:
        return len(self.dataset)

    def take(self, indices: NDArray[np.int64]) -> Any:
        is_range = indices.size > 0 and bool((np.diff(indices) == 1).all())
        if is_range:  # a slice of the table, without copying
            return self.dataset[int(indices[0]) : int(indices[-1]) + 1]
        return self.dataset[indices.tolist()]

    def describe_row(self, index: int) -> str:
        return f"row {index} of {self.dataset!r:.40}"


def find_parquet_rows(stream: Any) -> ParquetSource | None:
    """Return the source of the Parquet files whose rows are the elements of a stream.

    Returns:
        The source; None if the stream is transformed or shuffled, reads other files, or if its
        values must be made by `datasets`.
    """
    files = _find_parquet_files(stream)
    if not files:
        return None
    try:
        source = ParquetSource.of_files(files)
    except (InvalidArgumentError, UnavailableError):
        return None  # a type without NumPy equivalent, or a file system of `datasets` alone
    return None if source.may_have_nulls() else source


def _find_parquet_files(stream: Any) -> tuple[str, ...]:
    examples = getattr(stream, "_ex_iterable", None)
    arguments = getattr(examples, "kwargs", None)
    if type(examples).__name__ != "ArrowExamplesIterable" or not isinstance(arguments, dict):
        return ()
    changes = ("_distributed", "_formatting", "_shuffling", "_starting_state_dict")
    if any(getattr(stream, name, None) for name in changes) or not _is_plain(stream.features):
        return ()
    files = arguments.get("files")
    if not isinstance(files, list) or set(arguments) - {"files", "row_groups_list"}:
        return ()
    if any(groups is not None for groups in arguments.get("row_groups_list") or ()):
        return ()
    is_parquet = stream.info.builder_name == "parquet"
    return tuple(map(str, files)) if is_parquet else ()


def _is_plain(feature: Any) -> bool:
    """Return whether the values of a feature are those of its Arrow column."""
    if isinstance(feature, Mapping):
        return bool(feature) and all(map(_is_plain, feature.values()))
    name = type(feature).__name__
    if name in ("List", "LargeList", "Sequence"):
        return _is_plain(feature.feature)
    return name in _PLAIN_FEATURES
