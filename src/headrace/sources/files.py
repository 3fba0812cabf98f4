"""Names of files as elements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.plan.source import IndexedSource
from headrace.storage.match import match_files
from headrace.storage.names import FileName, as_names

__all__ = ["FileNamesSource"]


@dataclass(frozen=True)
class FileNamesSource(IndexedSource):
    """The names of files, one str an index.

    Names that sharding by file recognises: each worker may take its own part of them.

    Args:
        patterns: The patterns that were asked for.
        names: The names that they matched, in the order in which they are to be given.
    """

    patterns: tuple[str, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", as_names("patterns", self.patterns))
        object.__setattr__(self, "names", as_names("names", self.names))

    @classmethod
    def matching(cls, patterns: FileName | Iterable[FileName]) -> FileNamesSource:
        """Return the sorted names of all files that match; see `match_files`."""
        wanted = as_names("patterns", patterns)
        return cls(wanted, match_files(wanted))

    @property
    def size(self) -> int:
        """Number of names."""
        return len(self.names)

    @property
    def element_spec(self) -> Spec | None:
        """One str."""
        return ArraySpec((), np.dtype("U"))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of names with the shape of `indices`."""
        names = self.names
        column = np.empty(indices.size, object)
        column[:] = [names[index] for index in indices.ravel().tolist()]
        return column.reshape(indices.shape)
