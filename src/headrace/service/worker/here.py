"""Which workers are, or were, of this process.

They are known by their ids: another process may listen where one of them did before it stopped.
"""

from __future__ import annotations

import os
import uuid

__all__ = ["new_worker_id", "was_here"]

_ids: set[str] = set()
# A forked child has none of its parent's workers.
os.register_at_fork(after_in_child=_ids.clear)


def new_worker_id() -> str:
    """Return an id for a worker of this process to register under, another each time."""
    worker_id = uuid.uuid4().hex
    _ids.add(worker_id)
    return worker_id


def was_here(worker_id: str) -> bool:
    """Whether a worker of this process registered under this id, stopped since or not."""
    return worker_id in _ids
