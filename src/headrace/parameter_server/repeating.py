"""What may be asked of a server again, where nobody knows whether it was carried out."""

from __future__ import annotations

from typing import get_args

from headrace.parameter_server.operations import (
    Assign,
    AssignIds,
    Count,
    Keyed,
    Lookup,
    Operation,
    Scatter,
)

__all__ = ["may_be_repeated"]

_KEYED = frozenset(get_args(Keyed))


def may_be_repeated(operation: Operation) -> bool:
    """Whether an operation may be asked again that was perhaps carried out."""
    if type(operation) not in _KEYED or operation.key is not None:  # type: ignore[union-attr]
        return True
    match operation:
        case Assign(how=how):
            return how == "assign"
        case Scatter(how=how):
            return how in ("update", "min", "max")
        case Count(by=by):
            return by == 0
        # An id that is counted once too often is admitted a little earlier.
        case AssignIds() | Lookup():
            return True
    return False
