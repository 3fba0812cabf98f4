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
from headrace.frameworks.keras_state import is_keras_3

__all__ = ["Scope"]


class Scope:
    """A context manager whose value is the strategy; may be entered again, also inside itself.

    Args:
        strategy: What is the current strategy inside.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        #: Of each entry; and whether Keras had been imported by then.
        self._entries: list[tuple[Token[Place], bool]] = []

    def __enter__(self) -> Any:
        check_cross_replica(self._strategy, "scope")
        has_keras = is_keras_3()
        if has_keras:
            _keras_fit().install()
        self._entries.append((here.set(CrossReplica(self._strategy)), has_keras))
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
        token, had_keras = self._entries.pop()
        if not had_keras and is_keras_3():
            _keras_fit().install()
            _keras_fit().mark_models()
        here.reset(token)


def _keras_fit() -> Any:
    from headrace.adapters import keras_fit  # noqa: PLC0415 - where Keras is in use

    return keras_fit
