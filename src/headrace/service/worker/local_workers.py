"""Ids of the workers that run, or ran, in this process.

Ids are used because another process may listen at the address of a stopped worker.
"""

from __future__ import annotations

import os
import uuid

__all__ = ["is_local_worker", "new_worker_id"]

_ids: set[str] = set()
# A forked child has none of its parent's workers.
os.register_at_fork(after_in_child=_ids.clear)


def new_worker_id() -> str:
    """Return a new id for a worker of this process."""
    worker_id = uuid.uuid4().hex
    _ids.add(worker_id)
    return worker_id


def is_local_worker(worker_id: str) -> bool:
    """Return whether a worker of this process registered under this id, even if it has stopped."""
    return worker_id in _ids
