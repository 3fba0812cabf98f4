"""Methods of `Dataset` for elements that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import MissingNamesMeta
from headrace.plan.ignoring_errors import IgnoreErrors
from headrace.plan.node import Node

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["ErrorMethods"]


class ErrorMethods(metaclass=MissingNamesMeta):
    """Methods that decide what happens with elements that fail."""

    if TYPE_CHECKING:

        def _append_step(self, step: Callable[..., Node], **arguments: Any) -> Dataset[Any]: ...

    def ignore_errors(
        self,
        log_warning: bool = False,
        limit: int | None = None,
        dead_letter: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Drop the elements for which a step before this one raises an error.

        The number of dropped elements is logged as a warning at the end of an epoch, and is
        `DatasetIterator.num_ignored_errors`. With the data service, a worker logs the number of
        elements that it dropped. Errors of the service itself, such as UnavailableError, are
        raised, and so is an error that comes again without a new element.

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
