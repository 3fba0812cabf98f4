"""Context of code on one replica, and its collectives with the other replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.arguments import check_callable
from headrace.distribute.collectives import ReduceOp
from headrace.distribute.execution_context import (
    CrossReplicaContext,
    Rendezvous,
    ReplicaView,
    current_context,
)
from headrace.distribute.values import (
    DistributedValues,
    PerReplica,
    map_structure,
    select,
)
from headrace.errors import FailedPreconditionError

__all__ = [
    "MergeFunction",
    "ReplicaContext",
    "SingleReplicaRendezvous",
    "all_gather_values",
    "all_reduce_values",
    "call_cross_replica",
]

BACKWARD_TIMEOUT_SECONDS = 600.0
"""Timeout in seconds for the collectives of a backward pass. If two replicas compute on one GPU,
PyTorch runs their backward passes one after the other, so the first would wait forever."""


class ReplicaContext(ReplicaView):
    """View of one replica; `get_replica_context()` returns it inside `strategy.run`.

    >>> def step(x):
    ...     context = hr.distribute.get_replica_context()
    ...     return float(context.all_reduce(hr.distribute.ReduceOp.SUM, x))
    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.run(step, args=(hr.distribute.PerReplica([1.0, 2.0]),)).values
    (3.0, 3.0)

    Args:
        strategy: Strategy of the replica.
        replica: Index of the replica in this process.
        rendezvous: Merges values with those of the other replicas.
    """

    __slots__ = ("_num_collectives", "_rendezvous", "_replica")

    def __init__(self, strategy: Any, replica: int, rendezvous: Rendezvous) -> None:
        self.strategy = strategy
        self._replica = replica
        self._rendezvous = rendezvous
        #: Number of collectives started, for their names.
        self._num_collectives = 0

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica, from 0 to `num_replicas_in_sync - 1`."""
        first: int = self.strategy.first_replica
        return first + self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of all workers."""
        count: int = self.strategy.num_replicas_in_sync
        return count

    @property
    def devices(self) -> tuple[str]:
        """Tuple with the replica's device."""
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
            merge_fn: Called in cross-replica context, with a PerReplica for each argument that
                differs between replicas. The function of the first replica is called.
            args: This replica's arguments.
            kwargs: This replica's keyword arguments.

        Returns:
            This replica's value of the result of `merge_fn`; an array becomes a copy for each
            replica.
        """
        check_callable("merge_fn", merge_fn)
        strategy = self.strategy

        def merge_values(values: list[Any]) -> list[Any]:
            result = merge_fn(
                strategy,
                *strategy.regroup([each[0] for each in values]),
                **strategy.regroup([each[1] for each in values]),
            )
            return _split_result(result, strategy)

        return self.merge(merge_values, (tuple(args), dict(kwargs or {})))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return the sum or mean of the replicas' values, leaf by leaf.

        Gradients of PyTorch and JAX flow through it: the upstream gradients of all replicas are
        reduced in the same way. So all replicas run the backward pass, inside the function that
        `run` calls, or none does.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: This replica's structure of arrays and numbers.
            options: Accepted for compatibility with tf.distribute.

        Raises:
            FailedPreconditionError: If the replicas call different collectives, or gradients are
                recorded on some of them only.
        """
        op = ReduceOp.parse(reduce_op)
        description = f"all_reduce {self._next_collective()} ({op.name})"
        own = map_structure(_local_value, value)
        return all_reduce_values(
            self.strategy, op, own, description, self.merge, self._merge_in_backward
        )

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the replicas' values, leaf by leaf.

        Gradients flow through it as through `all_reduce`: a replica gets its part of the sum of all
        upstream gradients.

        Args:
            value: This replica's values; lengths along `axis` may differ between replicas.
            axis: From 0 to rank - 1.
            options: Accepted for compatibility with tf.distribute.

        Raises:
            FailedPreconditionError: As in `all_reduce`.
        """
        description = f"all_gather {self._next_collective()} (axis {axis})"
        own = map_structure(_local_value, value)
        return all_gather_values(
            self.strategy, own, axis, description, self.merge, self._merge_in_backward
        )

    def _next_collective(self) -> int:
        self._num_collectives += 1
        return self._num_collectives

    def merge(
        self,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        description: str = "merge_call or a variable write",
    ) -> Any:
        """Wait until every replica calls this; return this replica's part of `function`'s result.

        Args:
            function: Called once with the values of all replicas; returns a part for each.
            value: This replica's value.
            description: Description of the operation, which must be the same on all replicas.
        """
        context = current_context.get()
        if context is not None and context is not self:
            raise FailedPreconditionError(
                "this ReplicaContext belongs to another replica than the calling code; call "
                "get_replica_context() on the replica that uses it"
            )
        return self._rendezvous.merge(self._replica, function, value, description)

    def _merge_in_backward(
        self, function: Callable[[list[Any]], list[Any]], value: Any, description: str
    ) -> Any:
        """Merge in a backward pass, which may run on a thread of the framework."""
        return self._rendezvous.merge(
            self._replica, function, value, description, BACKWARD_TIMEOUT_SECONDS
        )

    def __repr__(self) -> str:
        return (
            f"<ReplicaContext {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}, "
            f"{self.strategy!r}>"
        )


class SingleReplicaRendezvous:
    """Rendezvous of a replica that is the only one in its process."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def merge(
        self,
        replica: int,
        function: Callable[[list[Any]], list[Any]],
        value: Any,
        description: str,
        timeout: float | None = None,
    ) -> Any:
        """Call the function with the only replica's value (`execution_context.Rendezvous`)."""
        return call_cross_replica(self._strategy, lambda: function([value]))[0]


def call_cross_replica(strategy: Any, function: Callable[[], Any]) -> Any:
    """Call a function in cross-replica context and return its result."""
    token = current_context.set(CrossReplicaContext(strategy))
    try:
        return function()
    finally:
        current_context.reset(token)


def _local_value(leaf: Any) -> Any:
    """Return this replica's value of a variable, or the leaf; other replicas cannot read it."""
    is_variable = isinstance(leaf, DistributedValues) and hasattr(leaf, "read")
    return leaf.read() if is_variable else leaf


def _split_result(result: Any, strategy: Any) -> list[Any]:
    """Return each replica's part of a structure, with separate copies of an array for all."""
    framework, devices = strategy.framework, strategy.framework_devices

    def part(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            others = [leaf.copy() if leaf.flags.writeable else leaf for _ in devices[1:]]
            return PerReplica([leaf, *others])
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, DistributedValues)
        return PerReplica(framework.replicate(leaf, devices)) if is_array else leaf

    spread = map_structure(part, result) if len(devices) > 1 else result
    return [select(replica, spread) for replica in range(len(devices))]


# --- Collectives of replicas with gradients -------------------------------------------------------
#
# The loss of each replica depends on the values of all. So the gradient of `all_reduce` is the same
# reduction of the upstream gradients of all replicas, and that of `all_gather` is the replica's
# part of their sum. The backward pass therefore runs collectives, too: each has a name ("gradient
# of all_reduce 1"), and collectives of different names are never combined.


class MergeFunction(Protocol):
    """Calls a function once with the values of all replicas, and returns this replica's part."""

    def __call__(
        self, function: Callable[[list[Any]], list[Any]], value: Any, description: str
    ) -> Any:
        """Arguments as in `ReplicaContext.merge`."""


def all_reduce_values(
    strategy: Any,
    op: ReduceOp,
    value: Any,
    description: str,
    merge: MergeFunction,
    merge_in_backward: MergeFunction,
) -> Any:
    """Return the sum or mean of the replicas' values, leaf by leaf.

    Args:
        strategy: Strategy of the replica.
        op: Sum or mean.
        value: Structure of this replica's values.
        description: Name of the collective, the same on all replicas.
        merge: Used for the collective.
        merge_in_backward: Used for its gradient.
    """

    def forward(leaves: Sequence[Any], description: str, _: Sequence[int]) -> list[Any]:
        def merge_values(values: list[Any]) -> list[Any]:
            return _copy_for_replicas(
                _reduce_structures(strategy, op, values, description), strategy
            )

        return _leaves_of(merge(merge_values, _with_leaves(value, leaves), description))

    def backward(upstream: Sequence[Any]) -> list[Any]:
        name = f"gradient of {description}"
        found: list[Any] = all_reduce_values(
            strategy, op, list(upstream), name, merge_in_backward, merge_in_backward
        )
        return found

    return _with_gradient(strategy.framework, forward, backward, value, description)


def all_gather_values(
    strategy: Any,
    value: Any,
    axis: int,
    description: str,
    merge: MergeFunction,
    merge_in_backward: MergeFunction,
) -> Any:
    """Concatenate the replicas' values, leaf by leaf.

    Args:
        strategy: Strategy of the replica.
        value: Structure of this replica's values.
        axis: Axis of concatenation; lengths along it may differ.
        description: Name of the collective, the same on all replicas.
        merge: Used for the collective.
        merge_in_backward: Used for its gradient.
    """
    own: list[slice] = []

    def forward(leaves: Sequence[Any], description: str, traced: Sequence[int]) -> list[Any]:
        def merge_values(values: list[Any]) -> list[Any]:
            gathered = map_structure(
                lambda *leaves: strategy.gather_replicas(leaves, axis, description), *values
            )
            lengths = [
                [_length(leaf, axis) for leaf in _leaves_of(each)] if traced else []
                for each in values
            ]
            parts = (
                _local_slices(strategy, lengths, description) if traced else [[] for _ in values]
            )
            return list(zip(_copy_for_replicas(gathered, strategy), parts, strict=True))

        reduced, parts = merge(merge_values, _with_leaves(value, leaves), description)
        own[:] = [parts[index] for index in traced]
        return _leaves_of(reduced)

    def backward(upstream: Sequence[Any]) -> list[Any]:
        name = f"gradient of {description}"
        sums = all_reduce_values(
            strategy, ReduceOp.SUM, list(upstream), name, merge_in_backward, merge_in_backward
        )
        leading = (slice(None),) * axis
        return [each[(*leading, part)] for each, part in zip(sums, own, strict=True)]

    return _with_gradient(strategy.framework, forward, backward, value, description)


def _with_gradient(
    framework: Any,
    forward: Callable[[Sequence[Any], str, Sequence[int]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    value: Any,
    description: str,
) -> Any:
    """Return `forward(leaves, name, traced)` as a structure; `backward` is its gradient."""
    leaves = _leaves_of(value)
    traced: tuple[int, ...] = framework.traced_indices(leaves)
    if not traced:
        return _with_leaves(value, forward(leaves, description, ()))
    # Part of the name, since replicas that differ here would not all run the backward pass.
    name = f"{description} with gradients for values {', '.join(map(str, traced))} of {len(leaves)}"
    reduced = framework.with_gradient(
        lambda given: forward(given, name, traced), backward, leaves, traced
    )
    return _with_leaves(value, reduced)


def _local_slices(
    strategy: Any, lengths: Sequence[Sequence[int]], description: str
) -> list[list[slice]]:
    """Return the positions of each local replica's values in the concatenation."""
    rows = [np.array([each], np.int64) for each in lengths]
    gathered = strategy.gather_replicas(rows, 0, f"lengths of {description}")
    all_lengths = np.asarray(strategy.framework.to_numpy(gathered))
    ends = all_lengths.cumsum(axis=0)
    first: int = strategy.first_replica
    return [
        [
            slice(int(end - n), int(end))
            for end, n in zip(ends[replica], all_lengths[replica], strict=True)
        ]
        for replica in range(first, first + len(lengths))
    ]


def _length(leaf: Any, axis: int) -> int:
    return int(np.shape(leaf)[axis])


def _leaves_of(value: Any) -> list[Any]:
    leaves: list[Any] = []
    map_structure(leaves.append, value)
    return leaves


def _with_leaves(value: Any, leaves: Sequence[Any]) -> Any:
    rest = iter(leaves)
    return map_structure(lambda _: next(rest), value)


def _reduce_structures(strategy: Any, op: ReduceOp, values: Sequence[Any], description: str) -> Any:
    """Reduce the replicas' structures to one of sums or means: all leaves in one exchange."""
    columns: list[Sequence[Any]] = []
    map_structure(lambda *leaves: columns.append(leaves), *values)
    reduced = iter(strategy.reduce_columns(op, columns, description=description))
    return map_structure(lambda *_: next(reduced), *values)


def _copy_for_replicas(result: Any, strategy: Any) -> list[Any]:
    """Return a structure for each replica, so that writes of one do not affect others."""
    framework, devices = strategy.framework, strategy.framework_devices
    spread = map_structure(lambda leaf: PerReplica(framework.replicate(leaf, devices)), result)
    return [select(replica, spread) for replica in range(len(devices))]
