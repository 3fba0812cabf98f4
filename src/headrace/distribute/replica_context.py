"""What code on one replica may ask, and how it meets the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.arguments import check_callable
from headrace.distribute.collectives import ReduceOp
from headrace.distribute.context import CrossReplica, OnReplica, Rendezvous, here
from headrace.distribute.values import (
    DistributedValues,
    PerReplica,
    map_structure,
    select,
)
from headrace.errors import FailedPreconditionError

__all__ = ["Alone", "ReplicaContext", "across"]


class ReplicaContext(OnReplica):
    """One replica's view; `get_replica_context()` returns it inside `strategy.run`.

    Args:
        strategy: Whose replica it is.
        replica: Its number among those of this process.
        rendezvous: Where it meets the others.
    """

    __slots__ = ("_rendezvous", "_replica")

    def __init__(self, strategy: Any, replica: int, rendezvous: Rendezvous) -> None:
        self.strategy = strategy
        self._replica = replica
        self._rendezvous = rendezvous

    @property
    def replica_id_in_sync_group(self) -> int:
        """Which replica this is, from 0 to `num_replicas_in_sync - 1`."""
        first: int = self.strategy.first_replica
        return first + self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        count: int = self.strategy.num_replicas_in_sync
        return count

    @property
    def devices(self) -> tuple[str]:
        """The device that the replica runs on, in a tuple."""
        device: str = self.strategy.extended.worker_devices[self._replica]
        return (device,)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` once for all replicas.

        Every replica must call it; they wait for each other.

        Args:
            merge_fn: Called in cross-replica context, with a PerReplica of what the replicas passed
                where that differs. That of the first replica is called.
            args: This replica's.
            kwargs: This replica's.

        Returns:
            This replica's part of what `merge_fn` returned; of an array for all, its own copy.
        """
        check_callable("merge_fn", merge_fn)
        strategy = self.strategy

        def merged(values: list[Any]) -> list[Any]:
            result = merge_fn(
                strategy,
                *strategy.regroup([each[0] for each in values]),
                **strategy.regroup([each[1] for each in values]),
            )
            return _parts(result, strategy)

        return self.meet(merged, (tuple(args), dict(kwargs or {})))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return the sum or mean of the replicas' values, leaf by leaf.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or the name of one.
            value: This replica's: a structure of arrays and numbers.
            options: Accepted as in tf.distribute.
        """
        op = ReduceOp.of(reduce_op)
        strategy = self.strategy
        return self.meet(
            lambda values: _copies(_reduced(strategy, op, values), strategy),
            map_structure(_own, value),
        )

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return the replicas' values one after another, leaf by leaf.

        Args:
            value: This replica's; lengths along `axis` may differ between replicas.
            axis: From 0 to rank - 1.
            options: Accepted as in tf.distribute.
        """
        strategy = self.strategy
        return self.meet(
            lambda values: _copies(
                map_structure(lambda *leaves: strategy.gather_replicas(leaves, axis), *values),
                strategy,
            ),
            map_structure(_own, value),
        )

    def meet(self, function: Callable[[list[Any]], list[Any]], value: Any) -> Any:
        """Wait until every replica is here; return this one's part of what `function` returns.

        Args:
            function: Called once with the values of all replicas; returns a part for each.
            value: This replica's.
        """
        place = here.get()
        if place is not None and place is not self:
            raise FailedPreconditionError(
                "this replica context is not the one of the code that uses it; ask for it where "
                "it is used: get_replica_context()"
            )
        return self._rendezvous.merge(self._replica, function, value)

    def __repr__(self) -> str:
        return (
            f"<ReplicaContext {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}, "
            f"{self.strategy!r}>"
        )


class Alone:
    """The rendezvous of a replica that is the only one here."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def merge(self, replica: int, function: Callable[[list[Any]], list[Any]], value: Any) -> Any:
        """Meet nobody (`context.Rendezvous`)."""
        return across(self._strategy, lambda: function([value]))[0]


def across(strategy: Any, function: Callable[[], Any]) -> Any:
    """Return what a function returns in cross-replica context."""
    token = here.set(CrossReplica(strategy))
    try:
        return function()
    finally:
        here.reset(token)


def _reduced(strategy: Any, op: ReduceOp, values: Sequence[Any]) -> Any:
    """Return a structure of sums or means for those of the replicas: all leaves at once."""
    columns: list[Sequence[Any]] = []
    map_structure(lambda *leaves: columns.append(leaves), *values)
    made = iter(strategy.reduce_columns(op, columns))
    return map_structure(lambda *_: next(made), *values)


def _own(leaf: Any) -> Any:
    """Return a variable's value on this replica, since others would see another; else the leaf."""
    is_variable = isinstance(leaf, DistributedValues) and hasattr(leaf, "read")
    return leaf.read() if is_variable else leaf


def _copies(result: Any, strategy: Any) -> list[Any]:
    """Return a structure for each replica: what one writes into its own is not seen by others."""
    framework, devices = strategy.framework, strategy.framework_devices
    spread = map_structure(lambda leaf: PerReplica(framework.copies(leaf, devices)), result)
    return [select(replica, spread) for replica in range(len(devices))]


def _parts(result: Any, strategy: Any) -> list[Any]:
    """Return each replica's part of a structure; arrays for all are copied, as `_copies` does."""
    framework, devices = strategy.framework, strategy.framework_devices

    def part(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            others = [leaf.copy() if leaf.flags.writeable else leaf for _ in devices[1:]]
            return PerReplica([leaf, *others])
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, DistributedValues)
        return PerReplica(framework.copies(leaf, devices)) if is_array else leaf

    spread = map_structure(part, result) if len(devices) > 1 else result
    return [select(replica, spread) for replica in range(len(devices))]
