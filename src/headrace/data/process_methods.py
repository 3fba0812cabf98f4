"""Method of `Dataset` that runs steps in other processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import MissingNamesMeta

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["ProcessMethods"]

_IMPLEMENTATION = "headrace.service.process_pool"
"""Module of a higher layer, loaded on first use; its `in_processes` takes dataset and number."""


class ProcessMethods(metaclass=MissingNamesMeta):
    """Runs steps in worker processes of this machine."""

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
        implementation: Any = importlib.import_module(_IMPLEMENTATION)
        result: Dataset[Any] = implementation.in_processes(self, num_processes)
        return result
