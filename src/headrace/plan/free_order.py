"""Which steps may yield elements as they are ready.

The user's wish (`deterministic=False`) frees the order, and never which elements are left. So it
counts only where no step above would have to read the same elements again, in the same order, to
go on from a saved place. How many threads a step has does not count: a state is restored with other
numbers of them, so which steps are free follows from the plan and the wish alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.plan.node import Node

__all__ = ["free_steps", "kept_steps"]


def free_steps(plan: Node, deterministic: bool | None) -> frozenset[int]:
    """Return the `id` of each step whose order is free.

    Args:
        plan: The plan in its normal form, where each step stands in one place.
        deterministic: The option of this name that holds for the plan.
    """
    return frozenset(id(node) for node, keeper in _wished(plan, deterministic) if keeper is None)


def kept_steps(plan: Node, deterministic: bool | None) -> dict[int, Node]:
    """Return the `id` of each step whose order was freed in vain, and the step above that keeps it.

    Args:
        plan: As for `free_steps`.
        deterministic: As for `free_steps`.
    """
    wished = _wished(plan, deterministic)
    return {id(node): keeper for node, keeper in wished if keeper is not None}


def _wished(plan: Node, deterministic: bool | None) -> Iterator[tuple[Node, Node | None]]:
    """Yield each step whose order the user has freed, and the nearest step above that keeps it."""
    pending: list[tuple[Node, Node | None]] = [(plan, None)]
    while pending:
        node, keeper = pending.pop()
        is_wished = node.frees_order(deterministic)
        if is_wished:
            yield node, keeper
        # A step that is free knows its own elements by their order.
        if node.reads_again or (is_wished and keeper is None):
            keeper = node
        pending.extend((input_, keeper) for input_ in node.inputs)
