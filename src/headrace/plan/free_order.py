"""Which steps may yield elements as they are ready.

The user's wish (`deterministic=False`) frees the order, and never which elements are left. So it
counts only where no step above would have to read the same elements again, in the same order, to
go on from a saved place. How many threads a step has does not count: a state is gone to with other
numbers of them, so which steps are free follows from the plan and the wish alone.
"""

from __future__ import annotations

from headrace.plan.node import Node

__all__ = ["free_steps"]


def free_steps(plan: Node, deterministic: bool | None) -> frozenset[int]:
    """Return the `id` of each step whose order is free.

    Args:
        plan: The plan in its normal form, where each step stands in one place.
        deterministic: The option of this name that holds for the plan.
    """
    free: set[int] = set()
    pending = [(plan, False)]
    while pending:
        node, is_fixed = pending.pop()
        if node.frees_order(deterministic) and not is_fixed:
            free.add(id(node))
            is_fixed = True  # it knows its own elements by their order
        is_fixed = is_fixed or node.reads_again
        pending.extend((input_, is_fixed) for input_ in node.inputs)
    return frozenset(free)
