"""Where a dealt plan is rooted: below, every step works within one unit.

An origin names an element: the unit that it is of (`rewrites.positions`), and its ordinal among
those that the unit gives at the root. The root is the uppermost step such that the elements that a
unit gives there, and their order, follow from the unit alone, whoever reads it and with which
others. So a worker that reads a unit again gives the same origins.

Which steps work within one unit depends on how many elements a unit has below them. Of one that has
one at most, the order does not matter: a shuffle mixes units then, and an interleave opens one
dataset for a unit. Where a unit has many, its elements must stay in order.

Above the root, steps carry origins: they choose elements, reorder or join them (`Node.carries`).
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import FailedPreconditionError
from headrace.plan.combining import Concatenate, Interleave
from headrace.plan.elements import Indices
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat, Shuffle
from headrace.plan.traverse import fold, leaves, transform
from headrace.plan.units import Root
from headrace.plan.user_function import step_name

__all__ = [
    "NOWHERE",
    "Part",
    "carried",
    "leaf_part",
    "units_of_leaves",
    "with_roots",
    "within_units",
    "without_roots",
]


class Part(NamedTuple):
    """A part of a plan, and what a unit gives there."""

    plan: Node
    rows: int | None = None
    """Elements of a unit where it has just so many, in order; None: it has any number."""
    is_single: bool = False
    """Whether a unit has one element at most."""
    is_rooted: bool = False

    @property
    def rooted(self) -> Node:
        """The plan, with a root over it unless there are roots in it."""
        return self.plan if self.is_rooted else Root(input=self.plan, location=self.plan.location)


def with_roots(plan: Node, free: frozenset[int]) -> Node:
    """Return a plan in normal form, with a `Root` over each part that works within one unit.

    Args:
        plan: The plan, which can be dealt in units. It may have roots already.
        free: `id` of each step whose order is free (`plan.determinism`).

    Raises:
        FailedPreconditionError: A step works on the whole stream: whose elements its own are made
            of cannot be said.
    """
    units = units_of_leaves(plan)

    def visit(node: Node, inputs: list[Part]) -> Part:
        if id(node) in units:
            return leaf_part(node, units[id(node)])
        if not inputs or inputs[0].plan is NOWHERE:
            return Part(NOWHERE)
        part = within_units(node, inputs, is_free=id(node) in free) or carried(node, inputs)
        if part is None:
            raise FailedPreconditionError(
                f"{step_name(node)} works on the whole stream, so its elements have no origins in "
                "units that are dealt; put it after `distribute`, where the client runs it"
            )
        return part

    return fold(plan, visit).rooted


def without_roots(plan: Node) -> Node:
    """Return the plan without the nodes that assign element ids."""
    return transform(plan, lambda node: node.input if isinstance(node, Root) else node)


NOWHERE: Node = Indices(size=0)
"""Stands for the steps within a leaf."""


def leaf_part(leaf: Node, unit: int) -> Part:
    """Return a leaf with so many positions in a unit."""
    return Part(leaf, unit, unit == 1)


def within_units(
    node: Node, inputs: list[Part], *, is_free: bool = False, in_order: bool = False
) -> Part | None:
    """Return a step over parts of a plan that works within one unit; None: it does not.

    Args:
        node: The step.
        inputs: Its inputs.
        is_free: Whether its order is free.
        in_order: Whether units come in order, too, so that none may pass another.
    """
    if any(part.is_rooted for part in inputs):
        return None
    step = node.over([part.plan for part in inputs])
    rows, is_single = inputs[0].rows, all(part.is_single for part in inputs)
    if isinstance(node, Shuffle):
        return Part(step, rows, is_single) if is_single and not in_order else None
    if isinstance(node, Interleave):
        alone = node.cycle_length == 1 or (is_single and not in_order)
        return Part(step) if alone else None
    if rows is not None and not node.keeps_count and node.unit_below(1) is not None:
        # Batches: those of which a unit is made are not cut, nor do they take rows of the next.
        size = node.unit_below(1) or 1
        return Part(step, rows // size, rows == size) if rows % size == 0 else None
    if not node.within_units or (is_free and not is_single):
        return None
    counts = node.carries or node.keeps_count
    if isinstance(node, Repeat | Concatenate):
        rows = 1 if all(part.rows == 1 for part in inputs) else None
    elif not node.keeps_count:
        rows = None
    return Part(step, rows, is_single and counts)


def carried(node: Node, inputs: list[Part]) -> Part | None:
    """Return a step over parts of a plan that carries origins; None: it does not."""
    if not node.carries:
        return None
    over = [part.plan if isinstance(node, Root) else part.rooted for part in inputs]
    return Part(node.over(over), is_rooted=True)


def units_of_leaves(plan: Node) -> dict[int, int]:
    """Return how many positions a unit of each leaf has, by the leaf's `id`."""
    ends = {id(leaf) for leaf in leaves(plan)}
    found: dict[int, int] = {}
    pending = [(plan, 1)]
    while pending:
        node, unit = pending.pop()
        if id(node) in ends:
            found[id(node)] = unit
        else:
            below = node.unit_below(unit) or 1
            pending.extend((input_, below) for input_ in node.inputs)
    return found
