"""Which steps may lend what they hold, where whoever takes the plan's elements only reads them.

Elements belong to their consumer, so a source and a cache give copies of what they keep. A worker
that sends elements on only reads them. Then nobody writes into an element but a user's function
that it is passed to, and what is passed to none need not be copied.
"""

from __future__ import annotations

from headrace.plan.node import Node

__all__ = ["lending_steps"]


def lending_steps(plan: Node) -> frozenset[int]:
    """Return the `id` of each step whose elements are passed to no function of the user's.

    Args:
        plan: A plan whose elements are only read.
    """
    found: dict[bool, set[int]] = {True: set(), False: set()}
    pending = [(plan, True)]
    while pending:
        node, is_only_read = pending.pop()
        if id(node) in found[is_only_read]:
            continue
        found[is_only_read].add(id(node))
        below = is_only_read and node.only_reads
        pending.extend((input_, below) for input_ in node.inputs)
    # What stands in two places is lent in neither, unless it may be in both.
    return frozenset(found[True] - found[False])
