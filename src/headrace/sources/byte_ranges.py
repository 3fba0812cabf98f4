"""Sources of text files whose indices are byte ranges, so that many workers can read one file.

A file is divided into parts of about 8 MiB. A part contains the records that begin in its range;
its last record may end after the range.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import ClassVar

from headrace.plan.source import IndexKind, Position, Reader, Source, check_range
from headrace.sources.byte_range_reader import ByteRangeReader, FilePart, RecordFormat
from headrace.storage.compression import check_compression
from headrace.storage.files import find_file_size
from headrace.storage.names import as_names
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["BLOCK_SIZE", "ByteRangeSource", "count_parts"]

BLOCK_SIZE = 1 << 20
"""Number of bytes to read and decode at once."""
PART_BYTES = 8 << 20
"""Approximate size of a part."""

_MAX_DIVIDED_FILES = 256
_MAX_THREADS = 16


def count_parts(
    names: Sequence[str], options: StorageOptions = NO_OPTIONS, part_bytes: int = PART_BYTES
) -> tuple[int, ...]:
    """Return the number of parts of each uncompressed file, for `ByteRangeSource.part_counts`.

    Files are not divided if there are many, or if all are small. A file whose size cannot be
    determined is one part; its error is raised when it is read.
    """
    if len(names) > _MAX_DIVIDED_FILES:
        return ()
    with ThreadPoolExecutor(min(len(names), _MAX_THREADS)) as pool:
        sizes = list(pool.map(partial(find_file_size, options=options), names))
    counts = tuple(max(1, round(size / part_bytes)) if size else 1 for size in sizes)
    return counts if max(counts) > 1 else ()


@dataclass(frozen=True)
class ByteRangeSource(Source):
    """The records of text files of one format; an index is a part of a file.

    Each format is a subclass.

    Args:
        filenames: A local path or fsspec URL, or several.
        compression_type: None, `""`, `"GZIP"` or `"ZLIB"`. Compressed files cannot be divided.
        part_counts: Number of parts of each file; empty if an index is a whole file.
        part_bytes: Size of all parts of a file but its last.
        block_bytes: Number of bytes to read and decode at once.
        storage_options: Options of the file systems of URLs.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("block_bytes", "storage_options")

    filenames: tuple[str, ...]
    compression_type: str | None = None
    part_counts: tuple[int, ...] = ()
    part_bytes: int = PART_BYTES
    block_bytes: int = BLOCK_SIZE
    storage_options: StorageOptions = field(default=NO_OPTIONS, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "filenames", as_names("filenames", self.filenames))
        object.__setattr__(self, "compression_type", check_compression(self.compression_type))
        if self.part_counts and self.compression_type:
            raise ValueError("part_counts must be empty for compressed files")

    @abstractmethod
    def make_format(self) -> RecordFormat:
        """Return the format, for one reader."""

    @property
    def size(self) -> int:
        return sum(self.part_counts) if self.part_counts else len(self.filenames)

    @property
    def index_kind(self) -> IndexKind:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        if not self.part_counts:
            return self.filenames
        pairs = zip(self.filenames, self.part_counts, strict=True)
        return tuple(name for name, count in pairs for _ in range(count))

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return ByteRangeReader(
            self._part_finder(),
            start,
            stop,
            self.make_format(),
            check_compression(self.compression_type),
            self.block_bytes,
            position,
            self.storage_options,
        )

    def _part_finder(self) -> Callable[[int], FilePart]:
        """Return a function that returns the part at an index."""
        names, counts, size = self.filenames, self.part_counts, self.part_bytes
        if not counts:
            return lambda index: FilePart(names[index], 0, None)
        ends = list(accumulate(counts))

        def find_part(index: int) -> FilePart:
            file = bisect_right(ends, index)
            number = index - (ends[file] - counts[file])
            is_last = index + 1 == ends[file]
            return FilePart(names[file], number * size, None if is_last else (number + 1) * size)

        return find_part
