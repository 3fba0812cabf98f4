"""Execution context of code: outside any strategy, in a strategy's scope, or on a replica.

    None                  outside of strategies; the default strategy has one replica
    CrossReplicaContext   in `strategy.scope()` or a function of `merge_call`: code runs once for
                          all replicas
    ReplicaView           in a function that `strategy.run` called: code runs once on each replica

The context is a context variable: `run` copies it to the threads of the replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

from headrace.errors import FailedPreconditionError
from headrace.frameworks.keras_state import is_keras_3

__all__ = [
    "CrossReplicaContext",
    "ExecutionContext",
    "Rendezvous",
    "ReplicaView",
    "Scope",
    "before_replicas_hook",
    "check_cross_replica",
    "current_context",
    "refuse_mixing",
    "variable_refusal",
]


class Rendezvous(Protocol):
    """Protocol of a barrier that merges the values of all replicas of one `run`."""

    def merge(
        self,
        replica: int,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        description: str,
        timeout: float | None = None,
    ) -> Any:
        """Wait until every replica calls this; return this replica's part of `function`'s result.

        Args:
            replica: Index of the calling replica.
            function: Called once in cross-replica context, with the values of all replicas in
                order; returns a part for each. The function of replica 0 is called.
            value: This replica's value.
            description: Description of the operation, which must be the same on all replicas.
            timeout: Seconds to wait for the other replicas; None waits while they run.
        """


@dataclass(frozen=True)
class CrossReplicaContext:
    """Context in the scope of a strategy."""

    strategy: Any


class ReplicaView:
    """Context on one replica of a strategy; base class of `ReplicaContext`.

    Attributes:
        strategy: Strategy that runs the replica.
    """

    __slots__ = ("strategy",)

    strategy: Any

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica, from 0 to `num_replicas_in_sync - 1`."""
        raise NotImplementedError


ExecutionContext: TypeAlias = CrossReplicaContext | ReplicaView | None

current_context: ContextVar[ExecutionContext] = ContextVar(
    "headrace_execution_context", default=None
)
"""Context of the current code."""

before_replicas_hook: ContextVar[Callable[[], object] | None] = ContextVar(
    "headrace_before_replicas", default=None
)
"""Called before `run` starts functions on several replicas' threads; None disables the call."""

variable_refusal: ContextVar[Callable[[str], Exception] | None] = ContextVar(
    "headrace_variable_refusal", default=None
)
"""Returns the error for creating a variable of a given name here; None allows variables."""


def check_cross_replica(strategy: Any, method: str, instead: str = "merge_call()") -> None:
    """Raise unless a method of a strategy may be called in the current context.

    Args:
        strategy: Strategy of the method.
        method: Name of the method.
        instead: Alternative to call on a replica.

    Raises:
        FailedPreconditionError: If called on a replica, or in the scope of another strategy.
    """
    context = current_context.get()
    if context is None:
        return
    if isinstance(context, ReplicaView):
        raise FailedPreconditionError(
            f"Method requires being in cross-replica context: Strategy.{method} method requires "
            f"cross-replica context, use get_replica_context().{instead} instead"
        )
    if context.strategy is not strategy:
        refuse_mixing(context.strategy, strategy)


def refuse_mixing(entered: Any, other: Any) -> NoReturn:
    """Raise for the use of a strategy in the scope of another."""
    raise FailedPreconditionError(
        f"Mixing different Strategy objects: {entered!r} is not {other!r}; leave the scope of "
        "the first before you use the second"
    )


# --- Scope of a strategy --------------------------------------------------------------------------


class Scope:
    """Context manager that returns the strategy; reusable and reentrant.

    Args:
        strategy: Current strategy inside.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        #: Token of each entry, and whether Keras had been imported at that time.
        self._entries: list[tuple[Token[ExecutionContext], bool]] = []

    def __enter__(self) -> Any:
        check_cross_replica(self._strategy, "scope")
        has_keras = is_keras_3()
        if has_keras:
            _keras_fit().install()
        self._entries.append((current_context.set(CrossReplicaContext(self._strategy)), has_keras))
        return self._strategy

    def __exit__(self, *error: object) -> None:
        context = current_context.get()
        if not isinstance(context, CrossReplicaContext):
            raise FailedPreconditionError(
                "the scope of a strategy must be left in the thread and function that entered it"
            )
        if context.strategy is not self._strategy:
            refuse_mixing(context.strategy, self._strategy)
        token, had_keras = self._entries.pop()
        if not had_keras and is_keras_3():
            _keras_fit().install()
            _keras_fit().mark_models()
        current_context.reset(token)


def _keras_fit() -> Any:
    from headrace.adapters import keras_fit  # noqa: PLC0415 - where Keras is in use

    return keras_fit
