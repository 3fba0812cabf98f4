"""Rows of Lance datasets, read by index; the only file that uses the package pylance."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_int, check_strings
from headrace.errors import (
    DataLossError,
    InvalidArgumentError,
    MissingDependencyError,
    NotFoundError,
    UnavailableError,
)
from headrace.saved.schema import FileSchema
from headrace.sources.arrow_rows import ArrowRows, infer_row_schema
from headrace.storage.names import FileName, as_names, is_local

__all__ = ["LanceRows"]


class _OpenDataset:
    """Opens the dataset once. A pickled copy opens it again."""

    def __init__(self) -> None:
        self.open = functools.lru_cache(1)(_open_dataset)

    def __reduce__(self) -> tuple[type[_OpenDataset], tuple[()]]:
        return _OpenDataset, ()


@dataclass(frozen=True)
class LanceRows(ArrowRows):
    """Rows of one version of a Lance dataset, as dicts; an index is a row.

    Args:
        uri: Path or URL.
        version: Version of the dataset.
        columns: Columns of the rows.
        schema: Schema of the rows.
        count: Number of rows.
        storage_options: Options for object stores, as pairs.
    """

    uri: str
    version: int
    columns: tuple[str, ...]
    schema: FileSchema
    count: int
    storage_options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    _dataset: _OpenDataset = field(
        default_factory=_OpenDataset, init=False, repr=False, compare=False
    )

    @classmethod
    def of_dataset(
        cls,
        uri: FileName,
        columns: Sequence[str] | None,
        version: int | None,
        storage_options: Mapping[str, str] | None,
    ) -> LanceRows:
        """Return the rows of a dataset.

        Raises:
            NotFoundError: If there is no such dataset or version.
            InvalidArgumentError: If there is no such column, or if a column has no NumPy values.
        """
        names = as_names("uri", uri)
        if len(names) != 1:
            raise ValueError(f"`uri` must be a single dataset, but got {len(names)} names")
        if columns is not None:
            check_strings("columns", columns)
        if version is not None:
            check_int("version", version, minimum=1)
        options = tuple(sorted((storage_options or {}).items()))
        dataset = _open_dataset(names[0], version, options)
        found = tuple(dataset.schema.names if columns is None else columns)
        if missing := [name for name in found if name not in dataset.schema.names]:
            raise InvalidArgumentError(
                f"{names[0]!r} has no column {missing[0]!r}; its columns are {dataset.schema.names}"
            )
        try:
            schema = infer_row_schema([dataset.schema.field(name) for name in found])
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{names[0]!r}: {error}") from error
        return cls(names[0], dataset.version, found, schema, dataset.count_rows(), options)

    @property
    def size(self) -> int:
        return self.count

    def take(self, indices: NDArray[np.int64]) -> Any:
        dataset = self._dataset.open(self.uri, self.version, self.storage_options)
        try:
            return dataset.take(indices.tolist(), columns=list(self.columns))
        except (OSError, ValueError) as error:
            # Rows that cannot be reached now are not damaged: `ignore_errors` must not drop them.
            is_remote = isinstance(error, OSError) and not is_local(self.uri)
            raise (UnavailableError if is_remote else DataLossError)(
                f"{self.uri!r}: {len(indices)} rows from row {min(indices.tolist())} cannot be "
                f"read: {error}"
            ) from error

    def describe_row(self, index: int) -> str:
        return f"row {index} of {self.uri!r}"


def _open_dataset(uri: str, version: int | None, options: tuple[tuple[str, str], ...]) -> Any:
    """Open a version of a dataset, the latest one by default.

    Raises:
        NotFoundError: If it does not exist.
        UnavailableError: If it cannot be opened for another reason.
        MissingDependencyError: If the package pylance is not installed.
    """
    try:
        # Optional, and used in this file only.
        import lance  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            "reading Lance datasets requires the package pylance, which is not installed; "
            "pip install 'headrace[lance]'"
        ) from error
    try:
        return lance.dataset(uri, version=version, storage_options=dict(options))
    except (OSError, ValueError) as error:
        which = f"{uri!r}" if version is None else f"version {version} of {uri!r}"
        if "not found" in str(error).lower():
            raise NotFoundError(f"No such Lance dataset: {which}") from error
        raise UnavailableError(f"the Lance dataset {which} cannot be opened: {error}") from error
