"""What code on one replica may ask, and how it meets the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.arguments import check_callable
from headrace.distribute.collectives import ReduceOp
from headrace.distribute.context import CrossReplica, OnReplica, Rendezvous, here
from headrace.distribute.gradients import all_gathered, all_reduced
from headrace.distribute.values import (
    DistributedValues,
    PerReplica,
    map_structure,
    select,
)
from headrace.errors import FailedPreconditionError

__all__ = ["Alone", "ReplicaContext", "across"]

GRADIENT_SECONDS = 600.0
"""How long a replica's backward pass waits for those of the others. They could never come where
two replicas compute on one GPU, whose backward passes PyTorch runs one after the other."""


class ReplicaContext(OnReplica):
    """One replica's view; `get_replica_context()` returns it inside `strategy.run`.

    Args:
        strategy: Whose replica it is.
        replica: Its number among those of this process.
        rendezvous: Where it meets the others.
    """

    __slots__ = ("_collectives", "_rendezvous", "_replica")

    def __init__(self, strategy: Any, replica: int, rendezvous: Rendezvous) -> None:
        self.strategy = strategy
        self._replica = replica
        self._rendezvous = rendezvous
        #: How many collectives it has begun, for their names.
        self._collectives = 0

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

        Gradients of PyTorch and JAX flow through it: the upstream gradients of all replicas are
        reduced in the same way. So all replicas run the backward pass, inside the function that
        `run` calls, or none does.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or the name of one.
            value: This replica's: a structure of arrays and numbers.
            options: Accepted as in tf.distribute.

        Raises:
            FailedPreconditionError: The replicas are at different collectives, or gradients are
                recorded on some of them only.
        """
        op = ReduceOp.of(reduce_op)
        what = f"all_reduce {self._next_collective()} ({op.name})"
        own = map_structure(_own, value)
        return all_reduced(self.strategy, op, own, what, self.meet, self._meet_later)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return the replicas' values one after another, leaf by leaf.

        Gradients flow through it as through `all_reduce`: a replica gets its part of the sum of
        all upstream gradients.

        Args:
            value: This replica's; lengths along `axis` may differ between replicas.
            axis: From 0 to rank - 1.
            options: Accepted as in tf.distribute.

        Raises:
            FailedPreconditionError: As of `all_reduce`.
        """
        what = f"all_gather {self._next_collective()} (axis {axis})"
        own = map_structure(_own, value)
        return all_gathered(self.strategy, own, axis, what, self.meet, self._meet_later)

    def _next_collective(self) -> int:
        self._collectives += 1
        return self._collectives

    def meet(
        self,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        what: str = "merge_call, or a write of a variable",
    ) -> Any:
        """Wait until every replica is here; return this one's part of what `function` returns.

        Args:
            function: Called once with the values of all replicas; returns a part for each.
            value: This replica's.
            what: What is done, in words, which must be the same on all replicas.
        """
        place = here.get()
        if place is not None and place is not self:
            raise FailedPreconditionError(
                "this replica context is not the one of the code that uses it; ask for it where "
                "it is used: get_replica_context()"
            )
        return self._rendezvous.merge(self._replica, function, value, what)

    def _meet_later(self, function: Callable[[list[Any]], list[Any]], value: Any, what: str) -> Any:
        """Meet in a backward pass, which may run on a thread of the framework."""
        return self._rendezvous.merge(self._replica, function, value, what, GRADIENT_SECONDS)

    def __repr__(self) -> str:
        return (
            f"<ReplicaContext {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}, "
            f"{self.strategy!r}>"
        )


class Alone:
    """The rendezvous of a replica that is the only one here."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def merge(
        self,
        replica: int,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        what: str,
        limit: float | None = None,
    ) -> Any:
        """Meet nobody (`context.Rendezvous`)."""
        return across(self._strategy, lambda: function([value]))[0]


def across(strategy: Any, function: Callable[[], Any]) -> Any:
    """Return what a function returns in cross-replica context."""
    token = here.set(CrossReplica(strategy))
    try:
        return function()
    finally:
        here.reset(token)


def _own(leaf: Any) -> Any:
    """Return a variable's value on this replica, since others would see another; else the leaf."""
    is_variable = isinstance(leaf, DistributedValues) and hasattr(leaf, "read")
    return leaf.read() if is_variable else leaf


def _parts(result: Any, strategy: Any) -> list[Any]:
    """Return each replica's part of a structure, with its own copy of an array for all."""
    framework, devices = strategy.framework, strategy.framework_devices

    def part(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            others = [leaf.copy() if leaf.flags.writeable else leaf for _ in devices[1:]]
            return PerReplica([leaf, *others])
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, DistributedValues)
        return PerReplica(framework.copies(leaf, devices)) if is_array else leaf

    spread = map_structure(part, result) if len(devices) > 1 else result
    return [select(replica, spread) for replica in range(len(devices))]
