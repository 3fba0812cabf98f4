"""What can be dealt out of a plan: the sizes of its sources, in a fixed order."""

from __future__ import annotations

from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.traverse import walk

__all__ = ["split_sizes", "split_sources"]


def split_sources(plan: Node) -> tuple[FromSource, ...]:
    """Return the nodes whose indices are dealt out, in the order of their numbers.

    Sources that a user's function opens (inside `flat_map` or `interleave`) are not among them.
    A source that stands in the plan twice counts twice: each place reads on its own.
    """
    return tuple(node for node in walk(plan) if isinstance(node, FromSource))


def split_sizes(plan: Node) -> tuple[int, ...]:
    """Return the number of indices of each source; empty if one of them cannot be split."""
    sources = [node.source for node in split_sources(plan)]
    if not all(source.splittable for source in sources):
        return ()
    return tuple(source.size for source in sources)
