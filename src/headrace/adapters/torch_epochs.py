"""Numbers of the epochs of a torch DataLoader whose worker processes end with each epoch.

Such a worker starts with what its parent knew when it was started, and the parent does not read.
Therefore the workers count the iterations over a shared job in an unnamed file that they inherit.
All workers of an epoch have the same base seed, by which they agree on the epoch's number.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from headrace.plan.iteration_counter import IterationCounter

__all__ = ["WorkerEpochs", "is_spawning", "worker_epochs"]

T = TypeVar("T")

_MAX_EPOCHS = 8
"""Epochs of one process that are remembered, because it may read several DataLoaders at once."""
_MAX_BYTES = 1 << 20


class WorkerEpochs:
    """The epochs that worker processes began, grouped by the process that reads the DataLoader.

    Args:
        descriptor: Descriptor of the file that holds them; closed with this object.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        #: Last known next epoch number of this process.
        self._next = 0

    def begin(self, seed: int, worker: int, minimum: int) -> int:
        """Return the number of the epoch that a worker process of a DataLoader begins.

        Args:
            seed: Base seed of the epoch. If a program uses the same seed for each epoch, a worker
                that has already begun an epoch with it begins the next one.
            worker: Index of the worker.
            minimum: Smallest number that may be returned.
        """

        def begin_epoch(rows: dict[str, Any]) -> int:
            epochs = _reader_record(rows)["epochs"]
            for epoch in reversed(epochs):
                if epoch["seed"] == seed and worker not in epoch["workers"]:
                    epoch["workers"].append(worker)
                    return int(epoch["number"])
            number = _next_number(epochs, minimum)
            epochs.append({"seed": seed, "number": number, "workers": [worker]})
            del epochs[:-_MAX_EPOCHS]
            return number

        return self._update(begin_epoch)

    def next(self) -> int:
        """Return the number after the epochs that worker processes of this process began."""
        if get_worker_info() is not None:
            return self._next  # a worker gets its number from `begin`
        # A process that was forked from this one continues after the last known number.
        self._next = max(
            self._next, self._update(lambda rows: _next_number(_reader_record(rows)["epochs"], 0))
        )
        return self._next

    def note_joined(self) -> None:
        """Record that this process, or its parent, joined an iteration."""
        self._update(lambda rows: _reader_record(rows).update(joined=True))

    def has_joined(self) -> bool:
        """Return whether this process, its parent or a sibling worker joined an iteration."""
        return bool(self._update(lambda rows: _reader_record(rows)["joined"]))

    def _update(self, change: Callable[[dict[str, Any]], T]) -> T:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            rows = json.loads(os.pread(self._descriptor, _MAX_BYTES, 0) or b"{}")
            result = change(rows)
            written = json.dumps(rows).encode()
            os.pwrite(self._descriptor, written, 0)
            os.ftruncate(self._descriptor, len(written))
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (reduction.DupFd(self._descriptor),)


def _reader_record(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the process that reads, which may have worker processes."""
    reader = os.getpid()
    if get_worker_info() is not None:
        parent = multiprocessing.parent_process()
        reader = os.getppid() if parent is None or parent.pid is None else parent.pid
    row: dict[str, Any] = rows.setdefault(str(reader), {"epochs": [], "joined": False})
    return row


def _next_number(epochs: list[Any], minimum: int) -> int:
    return max([minimum, *(int(epoch["number"]) + 1 for epoch in epochs)])


def _rebuild(duplicate: Any) -> WorkerEpochs:
    return WorkerEpochs(duplicate.detach())


def is_spawning() -> bool:
    """Return whether a child process is being spawned that can inherit open files."""
    return get_spawning_popen() is not None


def worker_epochs(counter: IterationCounter) -> WorkerEpochs:
    """Return the epochs of a source that worker processes share; `counter` uses them too."""
    known = _known.get(counter)
    if known is None:
        with tempfile.TemporaryFile() as file:
            known = _known[counter] = WorkerEpochs(os.dup(file.fileno()))
        counter.peers = known
    return known


_known: weakref.WeakKeyDictionary[IterationCounter, WorkerEpochs] = weakref.WeakKeyDictionary()
