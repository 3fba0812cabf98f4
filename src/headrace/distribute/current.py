"""Which strategy the code is in, and on which replica; outside any, a default with one replica."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from headrace.distribute.context import CrossReplica, OnReplica, here, refusing_variables
from headrace.distribute.replica_context import Alone, ReplicaContext
from headrace.distribute.spmd import CompiledReplica
from headrace.distribute.strategy import Strategy

__all__ = [
    "MadeOnce",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class _DefaultStrategy(Strategy):
    """Stands in where no strategy was entered: one replica, and nothing is distributed."""

    def __init__(self) -> None:
        super().__init__(["cpu:0"])
        #: What `get_replica_context` returns where nothing was entered.
        self.context = ReplicaContext(self, 0, Alone(self))

    def _wraps_single_values(self) -> bool:
        return False


def get_strategy() -> Strategy:
    """Return the strategy of the scope or replica that the code is in; outside any, a default.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     hr.distribute.get_strategy() is strategy
    True
    >>> hr.distribute.get_strategy().num_replicas_in_sync
    1
    """
    place = here.get()
    strategy: Strategy = _DEFAULT if place is None else place.strategy
    return strategy


def has_strategy() -> bool:
    """Say whether the code is in the scope of a strategy, or on one of its replicas.

    >>> with hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     hr.distribute.has_strategy()
    True
    >>> hr.distribute.has_strategy()
    False
    """
    return get_strategy() is not _DEFAULT


def in_cross_replica_context() -> bool:
    """Say whether the code runs once for all replicas: in a scope, or in `merge_call`.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     hr.distribute.in_cross_replica_context()
    True
    >>> strategy.run(hr.distribute.in_cross_replica_context).values
    (False, False)
    """
    return isinstance(here.get(), CrossReplica)


def get_replica_context() -> ReplicaContext | CompiledReplica | None:
    """Return the replica that the code runs on; None: it runs once for all.

    Outside any strategy it is the one replica of the default strategy.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def number():
    ...     return hr.distribute.get_replica_context().replica_id_in_sync_group
    >>> strategy.run(number).values
    (0, 1)
    """
    place = here.get()
    if place is None:
        return _DEFAULT.context
    if isinstance(place, CrossReplica):
        return None
    assert isinstance(place, ReplicaContext | CompiledReplica)
    return place


_DEFAULT = _DefaultStrategy()


# --- Making a variable: of which kind, and once for all replicas that make it ---------------------


class MadeOnce(ABCMeta):
    """The type of a class of which replicas that make one each make one together."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one, of the kind that the strategy has, unless the code may make none."""
        refuse = refusing_variables.get()
        if refuse is not None:
            raise refuse(str(args[1] if len(args) > 1 else kwargs.get("name") or ""))
        kind = get_strategy().variable_type
        if kind is not None:
            return kind(*args, **kwargs)

        def make(*_: Any) -> Any:
            return super(MadeOnce, cls).__call__(*args, **kwargs)

        place = here.get()
        if isinstance(place, OnReplica) and has_strategy():
            # That of the first replica: a random initial value is the same on all.
            return place.merge_call(make)  # type: ignore[attr-defined]
        return make()
