"""Methods of `Dataset` that change how steps run: in processes, once only, or despite errors."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from headrace.arguments import check_path
from headrace.data.step_methods import StepMethods
from headrace.plan.ignoring_errors import IgnoreErrors
from headrace.plan.snapshot import Snapshot
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["ExecutionMethods"]

_PROCESS_POOL = "headrace.service.process_pool"
"""Module of a higher layer, loaded on first use; its `in_processes` takes dataset and number."""


class ExecutionMethods(StepMethods):
    """Methods that change how the steps before them run, and not what they compute."""

    def in_processes(self, num_processes: int) -> Dataset[Any]:
        """Run the steps before this one in worker processes of this machine.

        Use it for functions that hold the global interpreter lock, which threads cannot run in
        parallel. Elements, their order and states are those of a single process, for any number of
        processes. Only a batch of which an element fails may be shorter, if `ignore_errors` is not
        below it. Functions must be picklable; those of a script or notebook are sent by value.

        Processes start at the first iteration, are shared by datasets with the same number, and
        stop when the last of these datasets is garbage collected, or with this process.

        >>> dataset = hr.Dataset.range(6).map(lambda x: x * x).in_processes(2)
        >>> [int(x) for x in dataset]
        [0, 1, 4, 9, 16, 25]

        Steps that need the elements in order, such as `scan`, run in this process, together with
        the steps after them. `explain()` shows where each step runs, and a warning is logged if no
        function runs in a worker process. `hr.service.distribute` ignores `in_processes`: its
        workers run all steps before it.

        Args:
            num_processes: Number of worker processes.

        Raises:
            FailedPreconditionError: If something in the dataset cannot be pickled, or if a step
                would open datasets in this process for elements of workers.
            DataLossError: While reading, in place of elements whose computation ended three worker
                processes. Reading continues after them.
        """
        module: Any = importlib.import_module(_PROCESS_POOL)
        result: Dataset[Any] = module.in_processes(self, num_processes)
        return result

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
            path: Directory on a local or mounted disk. Remove it to store the elements again.
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

    def ignore_errors(
        self,
        log_warning: bool = False,
        limit: int | None = None,
        dead_letter: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Drop elements that fail: a step before this one raises an error.

        The number of dropped elements is logged as a warning at the end of an epoch, and is
        `DatasetIterator.num_ignored_errors`. With the data service, a worker logs the number of
        elements that it dropped. Errors of the service itself, such as UnavailableError, are
        raised, and so is an error that the input raises twice at the same position.

        >>> import headrace as hr
        >>> inverse = hr.Dataset.range(-1, 3).map(lambda x: 6 // int(x)).ignore_errors()
        >>> iterator = iter(inverse)
        >>> [int(x) for x in iterator], iterator.num_ignored_errors
        ([-6, 6, 3], 1)

        Args:
            log_warning: Whether to log the error of each dropped element.
            limit: Largest number of elements to drop in an epoch; the next error is raised as a
                FailedPreconditionError. None drops any number. Each worker counts its own.
            dead_letter: File on a local disk to which one line of JSON is appended for each dropped
                element: `time`, `error` (the type), `message`, `step`, `position`, `element` (a
                short text). Processes of one machine may write to one file. In a name with
                `{worker}`, host and process number replace it: necessary if several machines share
                the disk. Elements that are read again, after a restore or on another worker, are
                written again.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            IgnoreErrors,
            log_warning=log_warning,
            limit=limit,
            dead_letter=dead_letter,
            name=name,
        )
