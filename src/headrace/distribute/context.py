"""Where a piece of code runs: outside any strategy, in one's scope, or on one of its replicas.

    None               nothing was entered; the default strategy, with one replica, stands in
    CrossReplica       in `strategy.scope()` or a function of `merge_call`: once for all replicas
    OnReplica          in a function that `strategy.run` called: once for each replica

What is entered holds for the thread, and for what `run` starts from it (a context variable).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

from headrace.errors import FailedPreconditionError
from headrace.frameworks.keras_state import is_keras_3

__all__ = [
    "CrossReplica",
    "OnReplica",
    "Place",
    "Rendezvous",
    "Scope",
    "before_replicas",
    "check_cross_replica",
    "here",
    "refuse_mixing",
    "refusing_variables",
]


class Rendezvous(Protocol):
    """Where the replicas of one `run` meet."""

    def merge(
        self,
        replica: int,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        what: str,
        limit: float | None = None,
    ) -> Any:
        """Wait until every replica is here; return this replica's part of what `function` returns.

        Args:
            replica: Who asks.
            function: Called once, with the values of all replicas in their order, in cross-replica
                context; returns what each of them gets. That of replica 0 is called.
            value: This replica's.
            what: What is done, in words, which must be the same on all replicas.
            limit: Seconds that the other replicas are waited for; None: as long as they run.
        """


@dataclass(frozen=True)
class CrossReplica:
    """In the scope of a strategy."""

    strategy: Any


class OnReplica:
    """On one replica of a strategy: what a `ReplicaContext` is.

    Attributes:
        strategy: The strategy that runs it.
    """

    __slots__ = ("strategy",)

    strategy: Any

    @property
    def replica_id_in_sync_group(self) -> int:
        """Which replica this is, from 0 to `num_replicas_in_sync - 1`."""
        raise NotImplementedError


Place: TypeAlias = CrossReplica | OnReplica | None

here: ContextVar[Place] = ContextVar("headrace_distribute_here", default=None)
"""Where the code that asks runs."""

before_replicas: ContextVar[Callable[[], object] | None] = ContextVar(
    "headrace_before_replicas", default=None
)
"""Called before code goes on on several replicas, on threads of theirs; None: nothing is."""

refusing_variables: ContextVar[Callable[[str], Exception] | None] = ContextVar(
    "headrace_refusing_variables", default=None
)
"""Where no variable may be made: takes the name of one, and returns the error; None: it may."""


def check_cross_replica(strategy: Any, method: str, instead: str = "merge_call()") -> None:
    """Raise unless a method of a strategy may be called here.

    Args:
        strategy: Whose method it is.
        method: Its name.
        instead: What does its work on a replica.

    Raises:
        FailedPreconditionError: It is called on a replica, or in the scope of another strategy.
    """
    place = here.get()
    if place is None:
        return
    if isinstance(place, OnReplica):
        raise FailedPreconditionError(
            f"Method requires being in cross-replica context: Strategy.{method} method requires "
            f"cross-replica context, use get_replica_context().{instead} instead"
        )
    if place.strategy is not strategy:
        refuse_mixing(place.strategy, strategy)


def refuse_mixing(entered: Any, other: Any) -> NoReturn:
    """Raise for the use of one strategy in the scope of another."""
    raise FailedPreconditionError(
        f"Mixing different Strategy objects: {entered!r} is not {other!r}; leave the scope of the "
        "one before you use the other"
    )


# --- The scope of a strategy: where it is the current one -----------------------------------------


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
