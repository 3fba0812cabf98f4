"""Sources of file names, and of lines of text files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.plan.source import IndexedSource
from headrace.sources.record_files import BlockParser, ParsedBlock, RecordFilesSource
from headrace.storage.names import FileName, as_names, match_files
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["FileNamesSource", "TextLineSource", "parse_lines"]


@dataclass(frozen=True)
class FileNamesSource(IndexedSource):
    """The names of files, one str per index.

    File sharding (FILE) recognizes this source: each worker may get its own shard of the names.

    Args:
        patterns: Patterns given by the user.
        names: Names that match them, in the order of the elements.
    """

    patterns: tuple[str, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", as_names("patterns", self.patterns))
        object.__setattr__(self, "names", as_names("names", self.names))

    @classmethod
    def from_patterns(
        cls,
        patterns: FileName | Iterable[FileName],
        storage_options: StorageOptions = NO_OPTIONS,
    ) -> FileNamesSource:
        """Return a source of the sorted names of all matching files; see `match_files`."""
        wanted = as_names("patterns", patterns)
        return cls(wanted, match_files(wanted, storage_options))

    @property
    def size(self) -> int:
        """Number of names."""
        return len(self.names)

    @property
    def element_spec(self) -> Spec | None:
        """Spec of a str."""
        return ArraySpec((), np.dtype("U"))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of names with the shape of `indices`."""
        names = self.names
        column = np.empty(indices.size, object)
        column[:] = [names[index] for index in indices.ravel().tolist()]
        return column.reshape(indices.shape)


def parse_lines(block: bytes, at_end: bool, name: str, offset: int) -> ParsedBlock:
    """Split a block into lines without terminators; the last line of a file may lack one."""
    lines = block.split(b"\n")
    rest = lines.pop()
    used = len(block) - len(rest)
    if at_end and rest:
        lines.append(rest)
        used = len(block)
    if b"\r" in block:
        # Remove "\r" before "\n". A lone "\r" at the end of a file is part of its last line.
        ended = len(lines) - (1 if at_end and rest else 0)
        lines[:ended] = [line.removesuffix(b"\r") for line in lines[:ended]]
    return ParsedBlock(lines, used)


class TextLineSource(RecordFilesSource):
    r"""Lines of text files as `bytes`, without trailing `\n` or `\r\n`; an index is a file."""

    def make_parser(self) -> BlockParser:
        return parse_lines
