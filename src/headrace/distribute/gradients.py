"""Collectives of replicas through which gradients flow.

The loss of each replica depends on the values of all. So the gradient of `all_reduce` is the same
reduction of the upstream gradients of all replicas, and that of `all_gather` is the replica's own
part of their sum. The backward pass therefore runs collectives too: each has a name ("gradient of
all_reduce 1"), and collectives of different names never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.distribute.collectives import ReduceOp
from headrace.distribute.values import PerReplica, map_structure, select

__all__ = ["Meet", "all_gathered", "all_reduced"]


class Meet(Protocol):
    """Calls a function once with the values of all replicas, and returns this replica's part."""

    def __call__(self, function: Callable[[list[Any]], list[Any]], value: Any, what: str) -> Any:
        """Args are as those of `ReplicaContext.meet`."""


def all_reduced(strategy: Any, op: ReduceOp, value: Any, what: str, meet: Meet, later: Meet) -> Any:
    """Return the sum or mean of the replicas' values, leaf by leaf.

    Args:
        strategy: The strategy of the replica.
        op: Sum or mean.
        value: A structure of this replica's values.
        what: The name of the collective, the same on all replicas.
        meet: Used for the collective.
        later: Used for its gradient.
    """

    def forward(leaves: Sequence[Any], what: str, _: Sequence[int]) -> list[Any]:
        def merged(values: list[Any]) -> list[Any]:
            return _copies(_reduced(strategy, op, values, what), strategy)

        return _leaves_of(meet(merged, _with_leaves(value, leaves), what))

    def backward(upstream: Sequence[Any]) -> list[Any]:
        name = f"gradient of {what}"
        found: list[Any] = all_reduced(strategy, op, list(upstream), name, later, later)
        return found

    return _with_gradient(strategy.framework, forward, backward, value, what)


def all_gathered(strategy: Any, value: Any, axis: int, what: str, meet: Meet, later: Meet) -> Any:
    """Return the replicas' values one after another, leaf by leaf.

    Args:
        strategy: The strategy of the replica.
        value: A structure of this replica's values.
        axis: Lengths along it may differ.
        what: The name of the collective, the same on all replicas.
        meet: Used for the collective.
        later: Used for its gradient.
    """
    own: list[slice] = []

    def forward(leaves: Sequence[Any], what: str, traced: Sequence[int]) -> list[Any]:
        def merged(values: list[Any]) -> list[Any]:
            whole = map_structure(
                lambda *leaves: strategy.gather_replicas(leaves, axis, what), *values
            )
            lengths = [
                [_length(leaf, axis) for leaf in _leaves_of(each)] if traced else []
                for each in values
            ]
            parts = _own_parts(strategy, lengths, what) if traced else [[] for _ in values]
            return list(zip(_copies(whole, strategy), parts, strict=True))

        made, parts = meet(merged, _with_leaves(value, leaves), what)
        own[:] = [parts[index] for index in traced]
        return _leaves_of(made)

    def backward(upstream: Sequence[Any]) -> list[Any]:
        name = f"gradient of {what}"
        sums = all_reduced(strategy, ReduceOp.SUM, list(upstream), name, later, later)
        before = (slice(None),) * axis
        return [each[(*before, part)] for each, part in zip(sums, own, strict=True)]

    return _with_gradient(strategy.framework, forward, backward, value, what)


def _with_gradient(
    framework: Any,
    forward: Callable[[Sequence[Any], str, Sequence[int]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    value: Any,
    what: str,
) -> Any:
    """Return `forward(leaves, name, traced)` as a structure; `backward` is its gradient."""
    leaves = _leaves_of(value)
    traced: tuple[int, ...] = framework.traced(leaves)
    if not traced:
        return _with_leaves(value, forward(leaves, what, ()))
    # A part of the name, for replicas that disagree here would not all run the backward pass.
    name = f"{what} with gradients for values {', '.join(map(str, traced))} of {len(leaves)}"
    made = framework.with_gradient(
        lambda given: forward(given, name, traced), backward, leaves, traced
    )
    return _with_leaves(value, made)


def _own_parts(strategy: Any, lengths: Sequence[Sequence[int]], what: str) -> list[list[slice]]:
    """Return where the values of each local replica are in what was gathered."""
    rows = [np.array([each], np.int64) for each in lengths]
    gathered = strategy.gather_replicas(rows, 0, f"lengths of {what}")
    of_all = np.asarray(strategy.framework.numpy(gathered))
    ends = of_all.cumsum(axis=0)
    first: int = strategy.first_replica
    return [
        [
            slice(int(end - n), int(end))
            for end, n in zip(ends[replica], of_all[replica], strict=True)
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


def _reduced(strategy: Any, op: ReduceOp, values: Sequence[Any], what: str) -> Any:
    """Return a structure of sums or means for those of the replicas: all leaves at once."""
    columns: list[Sequence[Any]] = []
    map_structure(lambda *leaves: columns.append(leaves), *values)
    made = iter(strategy.reduce_columns(op, columns, what=what))
    return map_structure(lambda *_: next(made), *values)


def _copies(result: Any, strategy: Any) -> list[Any]:
    """Return a structure for each replica: what one writes into its own is not seen by others."""
    framework, devices = strategy.framework, strategy.framework_devices
    spread = map_structure(lambda leaf: PerReplica(framework.copies(leaf, devices)), result)
    return [select(replica, spread) for replica in range(len(devices))]
