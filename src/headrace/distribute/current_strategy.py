"""Current strategy and replica of the code; by default a strategy with one replica."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.distribute.execution_context import (
    CrossReplicaContext,
    ReplicaView,
    current_context,
    variable_refusal,
)
from headrace.distribute.replica_context import ReplicaContext, SingleReplicaRendezvous
from headrace.distribute.spmd import CompiledReplica
from headrace.distribute.strategy import Strategy

__all__ = [
    "CreateOncePerStep",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class _DefaultStrategy(Strategy):
    """Default strategy outside of any scope: one replica, nothing is distributed."""

    def __init__(self) -> None:
        super().__init__(["cpu:0"])
        #: Result of `get_replica_context` outside of any scope.
        self.context = ReplicaContext(self, 0, SingleReplicaRendezvous(self))

    def _wraps_single_values(self) -> bool:
        return False


def get_strategy() -> Strategy:
    """Return the strategy of the current scope or replica, or the default strategy.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     hr.distribute.get_strategy() is strategy
    True
    >>> hr.distribute.get_strategy().num_replicas_in_sync
    1
    """
    context = current_context.get()
    strategy: Strategy = _DEFAULT if context is None else context.strategy
    return strategy


def has_strategy() -> bool:
    """Return whether the code runs in the scope of a strategy, or on a replica.

    >>> with hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     hr.distribute.has_strategy()
    True
    >>> hr.distribute.has_strategy()
    False
    """
    return get_strategy() is not _DEFAULT


def in_cross_replica_context() -> bool:
    """Return whether the code runs once for all replicas: in a scope, or in `merge_call`.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     hr.distribute.in_cross_replica_context()
    True
    >>> strategy.run(hr.distribute.in_cross_replica_context).values
    (False, False)
    """
    return isinstance(current_context.get(), CrossReplicaContext)


def get_replica_context() -> ReplicaContext | CompiledReplica | None:
    """Return the current replica, or None if the code runs once for all replicas.

    Outside of any strategy this is the replica of the default strategy.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def number():
    ...     return hr.distribute.get_replica_context().replica_id_in_sync_group
    >>> strategy.run(number).values
    (0, 1)
    """
    context = current_context.get()
    if context is None:
        return _DEFAULT.context
    if isinstance(context, CrossReplicaContext):
        return None
    assert isinstance(context, ReplicaContext | CompiledReplica)
    return context


_DEFAULT = _DefaultStrategy()
T = TypeVar("T")


# --- Creation of variables: their class, and once for all replicas --------------------------------


class CreateOncePerStep(ABCMeta):
    """Metaclass whose instances are created once for all replicas that create one in a step."""

    # Without this return type, a variable would have the type Any in pyright.
    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        """Create a variable of the strategy's class, unless variables are refused here."""
        refusal = variable_refusal.get()
        if refusal is not None:
            raise refusal(str(args[1] if len(args) > 1 else kwargs.get("name") or ""))
        kind: Callable[..., T] | None = get_strategy().variable_type
        if kind is not None:
            return kind(*args, **kwargs)

        def create(*_: Any) -> T:
            created: T = super(CreateOncePerStep, cls).__call__(*args, **kwargs)  # type: ignore[misc]
            return created

        context = current_context.get()
        if isinstance(context, ReplicaView) and has_strategy():
            # The first replica's arguments: a random initial value is the same on all.
            shared: T = context.merge_call(create)  # type: ignore[attr-defined]
            return shared
        return create()
