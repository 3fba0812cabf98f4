"""ArrayRecord files, read by index; the only file that uses the package array_record."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.errors import DataLossError, MissingDependencyError
from headrace.plan.source import IndexedSource
from headrace.storage.names import as_names, expand_names, is_local, match_files

__all__ = ["ArrayRecordSource"]

_MAX_OPEN_FILES = 64
_MAX_THREADS = 16
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""Options for random access."""
_UNKNOWN_FAILURE = "array_record gives no reason; the file is probably truncated"


class _OpenFiles:
    """Open readers, the most recently used ones. Each is safe for threads; copies open their own.

    A reader closes its file when it is collected, since another thread may still use it.
    """

    def __init__(self) -> None:
        self.open = functools.lru_cache(_MAX_OPEN_FILES)(_open_reader)

    def __reduce__(self) -> tuple[type[_OpenFiles], tuple[()]]:
        return _OpenFiles, ()


@dataclass(frozen=True)
class ArrayRecordSource(IndexedSource):
    """Records of ArrayRecord files, as `bytes`; an index is a record.

    Args:
        filenames: Local paths.
        counts: Number of records of each file.
    """

    filenames: tuple[str, ...]
    counts: tuple[int, ...]
    _files: _OpenFiles = field(default_factory=_OpenFiles, init=False, repr=False, compare=False)

    @classmethod
    def from_files(cls, filenames: Any) -> ArrayRecordSource:
        """Return a source of the records of the files that match names or patterns.

        Each file is opened to read its number of records.

        Raises:
            NotFoundError: If no file matches a name.
            DataLossError: If a file is damaged.
        """
        names: list[str] = []
        for name in as_names("filenames", filenames):
            if not is_local(name.removeprefix("file://")):
                raise ValueError(f"ArrayRecord files must be local files, but got {name!r}")
            for expanded in expand_names("filenames", name):
                names += match_files(expanded)
        with ThreadPoolExecutor(min(_MAX_THREADS, len(names))) as pool:
            return cls(tuple(names), tuple(pool.map(_count_records, names)))

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def element_spec(self) -> Spec | None:
        return ArraySpec((), bytes)

    def gather(self, indices: NDArray[np.int64]) -> Any:
        flat = np.asarray(indices).ravel()
        ends = np.cumsum(self.counts)
        file_numbers = np.searchsorted(ends, flat, side="right")
        column = np.empty(flat.size, object)
        for number in np.unique(file_numbers).tolist():
            rows = np.flatnonzero(file_numbers == number)
            records = (flat[rows] - (ends[number] - self.counts[number])).tolist()
            name = self.filenames[number]
            reader = self._files.open(name, self.counts[number])
            try:
                found = reader.read(records)
            except (RuntimeError, IndexError) as error:
                which = f"record {records[0]}" if len(records) == 1 else f"{len(records)} records"
                raise DataLossError(f"{name!r}: cannot read {which}: {error}") from error
            for row, record in zip(rows.tolist(), found, strict=True):
                column[row] = record
        return column.reshape(np.shape(indices))


def _failure_of(reader: Any) -> str:
    """Return why a reader failed, which closing it raises."""
    try:
        reader.close()
    except RuntimeError as error:
        return str(error) or _UNKNOWN_FAILURE
    return _UNKNOWN_FAILURE


def _count_records(name: str) -> int:
    return int(_open_reader(name).num_records())


def _open_reader(name: str, expected: int | None = None) -> Any:
    """Return a reader of a file.

    Args:
        name: Local path.
        expected: Number of records that the file had when the dataset was created, or None.

    Raises:
        NotFoundError: If the file does not exist.
        DataLossError: If it is damaged, or has another number of records.
        MissingDependencyError: If the package array_record is not installed.
    """
    try:
        # Optional, and used in this file only.
        from array_record.python import array_record_module  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            "reading ArrayRecord files requires the package array-record, which is not installed; "
            "pip install 'headrace[array-record]'"
        ) from error
    match_files(name)
    reader = array_record_module.ArrayRecordReader(name, _READER_OPTIONS)
    if not reader.ok():
        raise DataLossError(
            f"{name!r} is no ArrayRecord file, or damaged ({os.path.getsize(name)} bytes): "
            f"{_failure_of(reader)}"
        )
    count = int(reader.num_records())
    if expected not in (None, count):
        raise DataLossError(
            f"{name!r} has {count} records, but it had {expected} when the dataset was created"
        )
    return reader
