"""What a forked child of a coordinator's process finds where the coordinator's lock was."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from headrace.errors import FailedPreconditionError

__all__ = ["Refusal"]

_FORKED = (
    "this coordinator was made before a fork, and belongs to the process that made it: schedule "
    "there, or start processes with `subprocess` or the spawn method of multiprocessing"
)


class Refusal(AbstractContextManager[None]):
    """A lock that nobody gets: all ways into a coordinator lead through it."""

    def __enter__(self) -> NoReturn:
        raise FailedPreconditionError(_FORKED)

    def __exit__(self, *error: object) -> None:
        return
