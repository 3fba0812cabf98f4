"""The method of `Dataset` that stores the first epoch for later programs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.arguments import check_path
from headrace.data.missing_names import MissingNamesMeta
from headrace.plan.node import Node
from headrace.plan.snapshot import Snapshot
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["SnapshotMethods"]


class SnapshotMethods(metaclass=MissingNamesMeta):
    """Methods that store elements while they are read."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Node: ...  # noqa: D102

        def _append_step(self, step: Callable[..., Node], **arguments: Any) -> Dataset[Any]: ...

    def snapshot(
        self,
        path: str | os.PathLike[str],
        compression: str | None = "AUTO",
        reader_func: None = None,
        shard_func: None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Store the elements of the first complete epoch below `path`; read them from there later.

        Later epochs and later programs with the same pipeline read the stored elements and call no
        function of the steps before. A pipeline that differs, in a step, in the code of a function
        or in a value that a function uses, is stored separately. Changed files are not noticed:
        use another `path` for other data.

        Random steps before it keep the order and the numbers of the epoch that was stored. If
        several processes store an epoch at once, the last one to finish replaces equal elements;
        an epoch that was not completed is not used. With a data service each worker stores its
        copy (OFF) or its dataset shard (FILE, DATA, HINT) on its own disk; DYNAMIC is refused.

        >>> import headrace as hr
        >>> calls = []
        >>> def square(x):
        ...     calls.append(x)
        ...     return x * x
        >>> squares = hr.Dataset.range(3).map(square).snapshot("squares")
        >>> [int(x) for x in squares], [int(x) for x in squares], len(calls)
        ([0, 1, 4], [0, 1, 4], 3)

        Args:
            path: Directory on a local or mounted disk. Remove it to store the elements anew.
            compression: "AUTO" or None; elements are stored as they are in memory.
            reader_func: Not supported.
            shard_func: Not supported.
            name: Name of the step in errors and in `explain`.

        Raises:
            ValueError: If the dataset is infinite, or for another compression.
        """
        check_path("path", path)
        if "://" in os.fspath(path):
            raise ValueError(
                f"`path` must be a directory on a disk, but is the URL {os.fspath(path)!r}; "
                "`save` and `load` accept URLs"
            )
        if compression not in ("AUTO", None):
            raise ValueError(
                f"`compression` must be 'AUTO' or None, but got {compression!r}: elements are "
                "stored as they are in memory, to be read fast; use a file system that compresses"
            )
        for argument, function in (("reader_func", reader_func), ("shard_func", shard_func)):
            if function is not None:
                raise ValueError(
                    f"`{argument}` is not supported, because a snapshot is one file in the order "
                    "of the elements; shuffle() or interleave() after snapshot() instead"
                )
        if cardinality(self.plan) == INFINITE:
            raise ValueError(
                "the dataset is infinite, so its first epoch is never complete: call snapshot() "
                "before repeat(), or after take(n)"
            )
        # Loaded on first use, because it imports cloudpickle.
        fingerprint = importlib.import_module("headrace.plan.fingerprint").fingerprint(self.plan)
        filename = os.path.join(os.path.abspath(path), fingerprint, "elements")
        return self._append_step(Snapshot, filename=filename, name=name)
