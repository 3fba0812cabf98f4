"""The index part of a plan: its subtrees of index steps only, which are arithmetic.

An index part calls no function of the user's and reads nothing. Its elements follow from
(seed, pass), they are counted without reading, and the state of an iterator over it is one
integer. The plan is taken in its normal form (`rewrites.normal`).
"""

from __future__ import annotations

from headrace.plan.node import Node, distinct

__all__ = ["is_index_part", "leaves"]


def is_index_part(plan: Node) -> bool:
    """Say whether `plan` is index steps only, down to the numbers that it starts from."""
    return all(node.index_step for node in distinct([plan]))


def leaves(plan: Node) -> tuple[Node, ...]:
    """Return the roots of the largest index parts, in `walk` order.

    A leaf's number is its place here. An index part that stands in the plan several times is as
    many leaves: each is read for itself.
    """
    found: list[Node] = []
    inside = _index_steps(plan)
    pending = [plan]
    while pending:
        node = pending.pop()
        if id(node) in inside:
            found.append(node)
        else:
            pending.extend(reversed(node.inputs))
    return tuple(found)


def _index_steps(plan: Node) -> set[int]:
    """Return the `id` of each node that is the root of an index part."""
    inside: set[int] = set()
    for node in distinct([plan]):
        if node.index_step and all(id(input_) in inside for input_ in node.inputs):
            inside.add(id(node))
    return inside
