"""Every plan node has exactly one iterator, in the file of the same name or one of its part."""

from __future__ import annotations

import headrace.execution.build
from headrace.execution.iterator import make_iterator
from headrace.plan import (
    batching,
    buffering,
    combining,
    elements,
    elementwise,
    options,
    ordering,
    partition_nodes,
    windows,
)
from headrace.plan.node import Node

#: Iterators that have grown files of their own, and whose part they are.
TWINS = {
    "shuffle": "ordering",
    "scanning": "elementwise",
    "input_selection": "combining",
    "interleave": "combining",
    "caching": "buffering",
    "reading": "elements",
    "boundary_iterators": "partition_nodes",
    "read_splits": "partition_nodes",
}


ROOMS = [
    batching,
    buffering,
    combining,
    elements,
    elementwise,
    options,
    ordering,
    partition_nodes,
    windows,
]


def nodes() -> set[type[Node]]:
    found: set[type[Node]] = set()
    for module in ROOMS:
        kinds = {v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Node)}
        found |= {kind for kind in kinds if kind.kind}  # others are what several have in common
    # The canonical form has no options: they hold for the whole plan.
    return found - {options.WithOptions}


def test_every_node_has_an_iterator_in_its_twin():
    assert headrace.execution.build
    # Adapters have steps of their own, beside their iterators.
    registry = {
        kind: made
        for kind, made in make_iterator.registry.items()
        if kind.__module__.startswith("headrace.plan.")
    }
    assert set(registry) == nodes()
    for kind, made in registry.items():
        place = made.__module__.rpartition(".")[2]
        assert TWINS.get(place, place) == kind.__module__.rpartition(".")[2], kind
