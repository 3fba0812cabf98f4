"""Which units each `Units` of a plan's upper half has (`cut`), and what they are made of."""

from __future__ import annotations

from typing import TypeAlias

from headrace.plan.combining import Concatenate
from headrace.plan.elements import Read
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, fold, leaves, walk
from headrace.plan.units import Units
from headrace.rewrites.positions import deal_of
from headrace.rewrites.roots import units_of_leaves

__all__ = ["UnitRange", "counts_rows", "positions_of", "ranges_of", "size_of"]


def positions_of(plan: Node) -> tuple[int, int]:
    """Return the positions of a unit and of a pass, if there is one leaf; else (0, 0)."""
    ends = leaves(plan)
    if len(ends) > 1 or any(isinstance(node, Repeat) for node in _above(plan, ends[0])):
        return 0, 0
    return units_of_leaves(plan)[id(ends[0])], cardinality(ends[0])


def _above(plan: Node, leaf: Node) -> list[Node]:
    inside = {id(node) for node in walk(leaf)}
    return [node for node in walk(plan) if id(node) not in inside]


def counts_rows(plan: Node) -> bool:
    """Say whether the plan has an element for each that is read, in its place."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return isinstance(plan, Read)


UnitRange: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Number of units, those before them in the stream of the plan, and the strides of the passes."""


def size_of(plan: Node) -> int:
    """Return how many units a plan has that can be dealt."""
    deal = deal_of(plan)
    assert deal is not None
    return deal.size


def ranges_of(units: Node, sizes: list[int]) -> dict[int, UnitRange]:
    """Return which units each stream has.

    Args:
        units: The `repeat` and `concatenate` steps over streams.
        sizes: Units of each stream in one pass.
    """
    sizes_of: dict[int, int] = {}

    def measure(node: Node, inputs: list[int]) -> int:
        if isinstance(node, Units):
            size = sizes[node.stream]
        elif isinstance(node, Concatenate):
            size = INFINITE if INFINITE in inputs else sum(inputs)
        else:
            assert isinstance(node, Repeat)
            size = node.cardinality(inputs[0])
        sizes_of[id(node)] = size
        return size

    fold(units, measure)
    found: dict[int, UnitRange] = {}
    pending: list[tuple[Node, int, tuple[int, ...]]] = [(units, 0, ())]
    while pending:
        node, offset, strides = pending.pop()
        if isinstance(node, Units):
            found[node.stream] = sizes_of[id(node)], offset, strides
        elif isinstance(node, Repeat):
            pending.append((node.input, offset, (*strides, sizes_of[id(node.input)])))
        else:
            assert isinstance(node, Concatenate)
            pending.append((node.first, offset, strides))
            before = sizes_of[id(node.first)]
            if before != INFINITE:  # else the second is never read
                pending.append((node.second, offset + before, strides))
            else:
                pending.append((node.second, 0, strides))
    return found
