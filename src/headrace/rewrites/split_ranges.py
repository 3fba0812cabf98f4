"""Split ranges of each `ReadSplits` in a plan's client stage (`partition`), and their positions."""

from __future__ import annotations

from typing import TypeAlias

from headrace.plan.combining import Concatenate
from headrace.plan.elements import ReadIndices
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, find_leaves, fold, walk
from headrace.rewrites.partition_boundaries import find_leaf_split_sizes
from headrace.rewrites.split_space import compute_split_space

__all__ = [
    "SplitRange",
    "compute_split_ranges",
    "count_splits",
    "counts_source_rows",
    "leaf_positions",
]


def leaf_positions(plan: Node) -> tuple[int, int]:
    """Return the positions of a split and of an epoch if there is one leaf, else (0, 0)."""
    leaves = find_leaves(plan)
    if len(leaves) > 1 or any(isinstance(node, Repeat) for node in _above(plan, leaves[0])):
        return 0, 0
    return find_leaf_split_sizes(plan)[id(leaves[0])], cardinality(leaves[0])


def _above(plan: Node, leaf: Node) -> list[Node]:
    leaf_step_ids = {id(node) for node in walk(leaf)}
    return [node for node in walk(plan) if id(node) not in leaf_step_ids]


def counts_source_rows(plan: Node) -> bool:
    """Return whether the plan has exactly one element for each source row, in order."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return isinstance(plan, ReadIndices)


SplitRange: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Number of splits, number of splits before them in the plan's stream, and strides of the epochs.
"""


def count_splits(plan: Node) -> int:
    """Return the number of splits of a plan that can be assigned."""
    split_space = compute_split_space(plan)
    assert split_space is not None
    return split_space.size


def compute_split_ranges(splits: Node, sizes: list[int]) -> dict[int, SplitRange]:
    """Return the split range of each stream.

    Args:
        splits: The `repeat` and `concatenate` steps over streams.
        sizes: Number of splits of each stream in one epoch.
    """
    sizes_of: dict[int, int] = {}

    def measure(node: Node, inputs: list[int]) -> int:
        if isinstance(node, ReadSplits):
            size = sizes[node.stream]
        elif isinstance(node, Concatenate):
            size = INFINITE if INFINITE in inputs else sum(inputs)
        else:
            assert isinstance(node, Repeat)
            size = node.cardinality(inputs[0])
        sizes_of[id(node)] = size
        return size

    fold(splits, measure)
    found: dict[int, SplitRange] = {}
    pending: list[tuple[Node, int, tuple[int, ...]]] = [(splits, 0, ())]
    while pending:
        node, offset, strides = pending.pop()
        if isinstance(node, ReadSplits):
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
