"""Compatibility of workers and datasets: functions are bytecode of one Python minor version.

A dataset is computed by workers of the Python minor version that registered it. Workers of other
versions may register but get no tasks of it. If only such workers are registered, its clients get
an error, since they would wait forever.
"""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher.state import (
    DispatcherState,
    JobIteration,
    RegisteredDataset,
    Worker,
)
from headrace.versions import python_mismatch

__all__ = ["can_run", "check_iteration_can_run", "check_workers_can_run"]

_MAX_NAMED = 3


def can_run(worker: Worker, dataset: RegisteredDataset) -> bool:
    """Return whether a worker can run the functions of a dataset."""
    return not python_mismatch(worker.versions.python, dataset.python_version)


def check_workers_can_run(state: DispatcherState, dataset: RegisteredDataset) -> None:
    """Check that a dataset can be read despite workers of other Python versions.

    Without any worker the check passes: one can still register.

    Raises:
        FailedPreconditionError: If only such workers are registered, or one of them holds a slot of
            the fixed list, whose shard no other worker reads.
    """
    # Called for each client that opens the dataset, and there may be many workers.
    versions = {worker.versions.python for worker in state.workers.values()}
    if not any(python_mismatch(each, dataset.python_version) for each in versions):
        return
    workers = [worker for worker in state.workers.values() if not worker.draining]
    incompatible = [worker for worker in workers if not can_run(worker, dataset)]
    if not incompatible or (len(incompatible) < len(workers) and not state.slots):
        return
    examples = ", ".join(
        f"{worker.address} (Python {worker.versions.python})"
        for worker in incompatible[:_MAX_NAMED]
    )
    more = f" and {len(incompatible) - _MAX_NAMED} more" if len(incompatible) > _MAX_NAMED else ""
    raise FailedPreconditionError(
        f"dataset {dataset.dataset_id} was registered by a client with Python "
        f"{dataset.python_version}, but these workers run another minor version: {examples}{more}. "
        "Functions are sent as bytecode, which differs between minor versions: run clients and "
        "workers on the same one. After an upgrade, register the dataset again, under another "
        "dataset_id if it was registered with one"
    )


def check_iteration_can_run(state: DispatcherState, iteration: JobIteration) -> None:
    """Check the same for an unfinished iteration without running tasks.

    Raises:
        FailedPreconditionError: As for `check_workers_can_run`.
    """
    if not (iteration.finished or iteration.num_active_tasks or iteration.num_draining_tasks):
        check_workers_can_run(state, state.dataset_of(iteration))
