"""Files of records of one length, with an optional header and footer."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.errors import DataLossError
from headrace.plan.source import IndexedSource, Source
from headrace.sources.record_files import BlockParser, ParsedBlock, RecordFilesSource
from headrace.storage.files import find_file_size, open_file
from headrace.storage.names import is_local
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["FixedLengthFilesSource", "FixedLengthRecordsSource", "make_fixed_length_source"]

_MAX_INDEXED_FILES = 256


def make_fixed_length_source(
    names: tuple[str, ...],
    record_bytes: int,
    header_bytes: int,
    footer_bytes: int,
    storage_options: StorageOptions = NO_OPTIONS,
) -> Source:
    """Return a source of all records; its elements can be read in any order if possible.

    That requires at most 256 files, all local and complete. Otherwise an index is a file, and
    missing and incomplete files raise an error when they are read.
    """
    if len(names) <= _MAX_INDEXED_FILES and all(
        is_local(name.removeprefix("file://")) for name in names
    ):
        sizes = map(find_file_size, names)
        data_sizes = [-1 if size is None else size - header_bytes - footer_bytes for size in sizes]
        if all(size >= 0 and size % record_bytes == 0 for size in data_sizes):
            counts = tuple(size // record_bytes for size in data_sizes)
            return FixedLengthRecordsSource(names, counts, record_bytes, header_bytes)
    return FixedLengthFilesSource(
        names,
        storage_options=storage_options,
        record_bytes=record_bytes,
        header_bytes=header_bytes,
        footer_bytes=footer_bytes,
    )


@dataclass(frozen=True)
class FixedLengthRecordsSource(IndexedSource):
    """The records of local files; an index is a record.

    Args:
        filenames: Paths of the files.
        record_counts: Number of records of each file.
        record_bytes: Size of a record.
        header_bytes: Size of the header of each file.
    """

    filenames: tuple[str, ...]
    record_counts: tuple[int, ...]
    record_bytes: int
    header_bytes: int

    @property
    def size(self) -> int:
        return sum(self.record_counts)

    @property
    def element_spec(self) -> Spec | None:
        return ArraySpec((), np.dtype("S"))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of records with the shape of `indices`."""
        flat = indices.ravel()
        ends = np.cumsum(self.record_counts)
        files = np.searchsorted(ends, flat, side="right")
        result = np.empty(flat.size, object)
        for file in np.unique(files).tolist():
            chosen = np.flatnonzero(files == file)
            first = int(ends[file]) - self.record_counts[file]
            result[chosen] = self._read_records(file, (flat[chosen] - first).tolist())
        return result.reshape(indices.shape)

    def gather_run(self, start: int, stop: int) -> Any:
        """Return an object array of consecutive records."""
        result = np.empty(stop - start, object)
        ends = list(accumulate(self.record_counts))
        index = start
        while index < stop:
            file = bisect_right(ends, index)
            last = min(stop, ends[file])
            number = index - (ends[file] - self.record_counts[file])
            result[index - start : last - start] = self._read_run(file, number, last - index)
            index = last
        return result

    def _read_records(self, file: int, numbers: list[int]) -> list[bytes]:
        """Return records of a file."""
        size, name = self.record_bytes, self.filenames[file]
        stream: Any = open_file(name)
        try:
            descriptor = stream.fileno()
            return [
                _check_size(os.pread(descriptor, size, offset), size, name, offset)
                for number in numbers
                for offset in (self.header_bytes + number * size,)
            ]
        finally:
            stream.close()

    def _read_run(self, file: int, first: int, count: int) -> list[bytes]:
        """Return consecutive records of a file."""
        size, name = self.record_bytes, self.filenames[file]
        offset = self.header_bytes + first * size
        stream = open_file(name, "", offset)
        try:
            data = b""
            while len(data) < count * size and (block := stream.read(count * size - len(data))):
                data += block
        finally:
            stream.close()
        _check_size(data, count * size, name, offset)
        return [data[at : at + size] for at in range(0, len(data), size)]


def _check_size(data: bytes, size: int, name: str, offset: int) -> bytes:
    if len(data) < size:
        raise DataLossError(
            f"{name!r} ends at byte {offset + len(data)}, but had {offset + size} bytes or more "
            "when the dataset was created; create the dataset again"
        )
    return data


@dataclass(frozen=True)
class FixedLengthFilesSource(RecordFilesSource):
    """The records of files of any storage; an index is a file.

    Args:
        record_bytes: Size of a record.
        header_bytes: Size of the header of each file.
        footer_bytes: Size of the footer of each file.
    """

    record_bytes: int = field(kw_only=True)
    header_bytes: int = field(default=0, kw_only=True)
    footer_bytes: int = field(default=0, kw_only=True)

    def make_parser(self) -> BlockParser:
        return _make_parser(self.record_bytes, self.header_bytes, self.footer_bytes)


def _make_parser(record_bytes: int, header_bytes: int, footer_bytes: int) -> BlockParser:
    def parse(block: bytes, at_end: bool, name: str, offset: int) -> ParsedBlock:
        start = 0 if offset else header_bytes
        num_bytes = len(block) - start - footer_bytes
        count = max(num_bytes, 0) // record_bytes
        stop = start + count * record_bytes
        records = [block[at : at + record_bytes] for at in range(start, stop, record_bytes)]
        if not at_end:
            return ParsedBlock(records, stop if count else 0)
        if num_bytes == count * record_bytes or not (block or offset):
            return ParsedBlock(records, len(block))
        if num_bytes < 0 and not offset:
            error = DataLossError(
                f"{name!r} has {len(block)} bytes, fewer than its header of "
                f"{header_bytes} bytes and its footer of {footer_bytes} bytes"
            )
            return ParsedBlock(records, len(block), error=error)
        error = DataLossError(
            f"{name!r} has {num_bytes - count * record_bytes} bytes after its last complete "
            f"record, which ends at byte {offset + stop}, before a footer of {footer_bytes} bytes; "
            f"expected a multiple of {record_bytes} bytes after a header of {header_bytes} bytes"
        )
        return ParsedBlock(records, len(block), error=error)

    return parse
