"""What must not live on in a process that is forked from this one."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["StaysWithParent", "stays_with_parent"]


class StaysWithParent(Protocol):
    """What has sockets or threads, which a forked child must not use."""

    def leave_to_parent(self) -> None:
        """Close the child's copies of all sockets and refuse further use. Must not wait."""


_owners: weakref.WeakSet[StaysWithParent] = weakref.WeakSet()


def stays_with_parent(owner: StaysWithParent) -> None:
    """Have `owner.leave_to_parent` called in each process that is forked from this one."""
    _owners.add(owner)


def _leave_all_to_parent() -> None:
    # A child that outlives its parent must not keep ports open that nobody listens at, nor
    # connections that look alive to their other ends.
    for owner in list(_owners):
        owner.leave_to_parent()
    _owners.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
