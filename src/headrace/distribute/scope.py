"""The scope of a strategy: where it is the current one."""

from __future__ import annotations

from contextvars import Token
from typing import Any

from headrace.distribute.context import (
    CrossReplica,
    Place,
    check_cross_replica,
    here,
    refuse_mixing,
)
from headrace.errors import FailedPreconditionError

__all__ = ["Scope"]


class Scope:
    """A context manager whose value is the strategy; may be entered again, also inside itself.

    Args:
        strategy: What is the current strategy inside.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._tokens: list[Token[Place]] = []

    def __enter__(self) -> Any:
        check_cross_replica(self._strategy, "scope")
        self._tokens.append(here.set(CrossReplica(self._strategy)))
        return self._strategy

    def __exit__(self, *error: object) -> None:
        place = here.get()
        if not isinstance(place, CrossReplica):
            raise FailedPreconditionError(
                "the scope of a strategy is left where it was not entered: leave it in the thread "
                "and function that entered it"
            )
        if place.strategy is not self._strategy:
            refuse_mixing(place.strategy, self._strategy)
        here.reset(self._tokens.pop())
