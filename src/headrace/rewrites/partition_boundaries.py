"""Partition boundaries of a plan: below them, every step works within one split.

An element id consists of the element's split (`rewrites.split_space`) and its ordinal among the
elements of the split at the partition boundary. The boundary is above the topmost step at which a
split's elements and their order depend on the split alone, not on its reader or on other splits. So
a worker that reads a split again produces the same element ids.

Which steps work within one split depends on how many elements a split has below them. If it has at
most one, the order does not matter: a shuffle then mixes splits, and an interleave opens one
dataset per split. If a split has several elements, they must stay in order.

Above the boundary, steps propagate element ids: they select, reorder or join elements
(`Node.propagates_ids`).
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import FailedPreconditionError
from headrace.plan.combining import Concatenate, Interleave
from headrace.plan.elements import Indices
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat, Shuffle
from headrace.plan.partition_nodes import PartitionBoundary
from headrace.plan.traverse import find_leaves, fold, transform
from headrace.plan.user_function import step_name

__all__ = [
    "PLACEHOLDER",
    "PlanFragment",
    "find_leaf_split_sizes",
    "id_propagating_fragment",
    "insert_boundaries",
    "leaf_fragment",
    "split_local_fragment",
    "without_boundaries",
]


class PlanFragment(NamedTuple):
    """A part of a plan, and the number of elements of a split in it."""

    plan: Node
    elements_per_split: int | None = None
    """Exact number of elements of a split, which are in order; None if it varies."""
    has_one_element: bool = False
    """Whether a split has at most one element."""
    has_boundary: bool = False

    @property
    def with_boundary(self) -> Node:
        """The plan, with a partition boundary above it unless it contains one."""
        return (
            self.plan
            if self.has_boundary
            else PartitionBoundary(input=self.plan, location=self.plan.location)
        )


def insert_boundaries(plan: Node, unordered_steps: frozenset[int]) -> Node:
    """Return a canonical plan with a `PartitionBoundary` over each split-local part.

    Args:
        plan: The plan, which can be assigned in splits. It may already contain partition
            boundaries.
        unordered_steps: `id` of each unordered step (`plan.determinism`).

    Raises:
        FailedPreconditionError: If a step works on the whole stream, so that its elements have no
            defined ids.
    """
    split_sizes = find_leaf_split_sizes(plan)

    def visit(node: Node, inputs: list[PlanFragment]) -> PlanFragment:
        if id(node) in split_sizes:
            return leaf_fragment(node, split_sizes[id(node)])
        if not inputs or inputs[0].plan is PLACEHOLDER:
            return PlanFragment(PLACEHOLDER)
        fragment = split_local_fragment(
            node, inputs, is_unordered=id(node) in unordered_steps
        ) or id_propagating_fragment(node, inputs)
        if fragment is None:
            raise FailedPreconditionError(
                f"{step_name(node)} works on the whole stream, so its elements cannot be "
                "attributed to splits; put it after `distribute`, where it runs in the client"
            )
        return fragment

    return fold(plan, visit).with_boundary


def without_boundaries(plan: Node) -> Node:
    """Return the plan without the nodes that assign element ids."""
    return transform(plan, lambda node: node.input if isinstance(node, PartitionBoundary) else node)


PLACEHOLDER: Node = Indices(size=0)
"""Placeholder for the steps within a leaf."""


def leaf_fragment(leaf: Node, split_size: int) -> PlanFragment:
    """Return a leaf with `split_size` positions per split."""
    return PlanFragment(leaf, split_size, split_size == 1)


def split_local_fragment(
    node: Node, inputs: list[PlanFragment], *, is_unordered: bool = False, in_order: bool = False
) -> PlanFragment | None:
    """Return a step over fragments that works within one split, or None if it does not.

    Args:
        node: The step.
        inputs: Its inputs.
        is_unordered: Whether the step is unordered.
        in_order: Whether splits themselves are read in order, so that none may overtake another.
    """
    if any(part.has_boundary for part in inputs):
        return None
    step = node.with_inputs([part.plan for part in inputs])
    rows, is_single = inputs[0].elements_per_split, all(part.has_one_element for part in inputs)
    if isinstance(node, Shuffle):
        return PlanFragment(step, rows, is_single) if is_single and not in_order else None
    if isinstance(node, Interleave):
        is_local = node.cycle_length == 1 or (is_single and not in_order)
        return PlanFragment(step) if is_local else None
    if rows is not None and not node.preserves_count and node.input_split_size(1) is not None:
        # Batches: a split consists of whole batches, without rows of the next split.
        size = node.input_split_size(1) or 1
        return PlanFragment(step, rows // size, rows == size) if rows % size == 0 else None
    if not node.is_split_local or (is_unordered and not is_single):
        return None
    counts = node.propagates_ids or node.preserves_count
    if isinstance(node, Repeat | Concatenate):
        rows = 1 if all(part.elements_per_split == 1 for part in inputs) else None
    elif not node.preserves_count:
        rows = None
    return PlanFragment(step, rows, is_single and counts)


def id_propagating_fragment(node: Node, inputs: list[PlanFragment]) -> PlanFragment | None:
    """Return a step over fragments that propagates element ids, or None if it does not."""
    if not node.propagates_ids:
        return None
    inputs_with_boundary = [
        part.plan if isinstance(node, PartitionBoundary) else part.with_boundary for part in inputs
    ]
    return PlanFragment(node.with_inputs(inputs_with_boundary), has_boundary=True)


def find_leaf_split_sizes(plan: Node) -> dict[int, int]:
    """Return the number of positions per split of each leaf, by the leaf's `id`."""
    leaf_ids = {id(leaf) for leaf in find_leaves(plan)}
    found: dict[int, int] = {}
    pending = [(plan, 1)]
    while pending:
        node, split_size = pending.pop()
        if id(node) in leaf_ids:
            found[id(node)] = split_size
        else:
            input_split_size = node.input_split_size(split_size) or 1
            pending.extend((input_, input_split_size) for input_ in node.inputs)
    return found
