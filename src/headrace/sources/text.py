"""Lines of text files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.element.spec import ArraySpec, Spec
from headrace.plan.source import Position, Reader
from headrace.sources.compression import check_compression
from headrace.sources.files import as_names
from headrace.sources.memory import check_range
from headrace.sources.record_files import Cut, RecordFilesReader, check_buffer_size

__all__ = ["TextLineSource", "cut_lines"]


def cut_lines(block: bytes, at_end: bool, name: str, offset: int) -> Cut:
    """Cut a block into lines without their ends; the last line of a file needs no end."""
    lines = block.split(b"\n")
    rest = lines.pop()
    used = len(block) - len(rest)
    if at_end and rest:
        lines.append(rest)
        used = len(block)
    if b"\r" in block:
        # A line that ended in "\r\n". A lone "\r" at the end of a file is part of its last line.
        ended = len(lines) - (1 if at_end and rest else 0)
        lines[:ended] = [line.removesuffix(b"\r") for line in lines[:ended]]
    return Cut(lines, used)


@dataclass(frozen=True)
class TextLineSource:
    r"""The lines of text files as `bytes`, without their ends (`\n` or `\r\n`); an index is a file.

    Args:
        filenames: A local path or fsspec URL, or several.
        compression_type: None, `""`, `"GZIP"` or `"ZLIB"`.
        buffer_size: Bytes to read at once; None for a good size.
    """

    filenames: tuple[str, ...]
    compression_type: str | None = None
    buffer_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "filenames", as_names("filenames", self.filenames))
        object.__setattr__(self, "compression_type", check_compression(self.compression_type))
        check_buffer_size(self.buffer_size)

    @property
    def size(self) -> int:
        return len(self.filenames)

    @property
    def element_spec(self) -> Spec | None:
        return ArraySpec((), np.dtype("S"))

    @property
    def elements_per_index(self) -> int | None:
        return None

    @property
    def splittable(self) -> bool:
        return True

    def open(self, start: int, stop: int, position: Position = None) -> Reader:
        check_range(start, stop, self.size)
        return RecordFilesReader(
            self.filenames,
            start,
            stop,
            cut_lines,
            check_compression(self.compression_type),
            check_buffer_size(self.buffer_size),
            position,
        )
