"""Every plan node has exactly one iterator, in the corresponding module of `execution`."""

from __future__ import annotations

import headrace.execution.build
from headrace.execution.iterator import make_iterator
from headrace.plan import (
    batching,
    buffering,
    combining,
    elements,
    elementwise,
    ignoring_errors,
    options,
    ordering,
    packing,
    partition_nodes,
    random_map,
    sliding_windows,
    unique,
    windows,
)
from headrace.plan.node import Node

#: Iterators in separate modules, and the modules that they belong to.
ITERATOR_MODULES = {
    "shuffle": "ordering",
    "scanning": "elementwise",
    "input_selection": "combining",
    "interleave": "combining",
    "caching": "buffering",
    "concat_then_split": "packing",
    "cost_batching": "packing",
    "reading": "elements",
    "boundary_iterators": "partition_nodes",
    "read_splits": "partition_nodes",
}


PACKAGES = [
    batching,
    buffering,
    combining,
    elements,
    elementwise,
    ignoring_errors,
    options,
    ordering,
    packing,
    partition_nodes,
    sliding_windows,
    unique,
    random_map,
    windows,
]


def nodes() -> set[type[Node]]:
    found: set[type[Node]] = set()
    for module in PACKAGES:
        kinds = {v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Node)}
        found |= {kind for kind in kinds if kind.kind}  # others are what several have in common
    # The canonical form has no options: they hold for the whole plan.
    return found - {options.WithOptions}


def test_every_node_has_an_iterator_in_the_corresponding_module():
    assert headrace.execution.build
    # Adapters define their own steps next to their iterators.
    registry = {
        kind: made
        for kind, made in make_iterator.registry.items()
        if kind.__module__.startswith("headrace.plan.")
    }
    assert set(registry) == nodes()
    for kind, made in registry.items():
        position = made.__module__.rpartition(".")[2]
        assert ITERATOR_MODULES.get(position, position) == kind.__module__.rpartition(".")[2], kind
