"""Memory of shuffles of values when one-to-one steps are pushed below them (`partition`)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import flatten
from headrace.plan.combining import Concatenate
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.ordering import Shuffle
from headrace.plan.traverse import element_spec, find_leaves, walk

__all__ = ["bytes_from_spec", "shuffle_buffer_bytes"]


def shuffle_buffer_bytes(plan: Node, element_bytes: Callable[[Node], int | None]) -> int | None:
    """Return the bytes in shuffles of values if one-to-one steps above are pushed down below them.

    Returns:
        The number of bytes: 0 without such steps, None if the size of an element is unknown.
    """
    total = 0
    index = {id(step) for leaf in find_leaves(plan) for step in walk(leaf)}
    tops: dict[int, Node] = {}  # topmost one-to-one step above a node, by the node's `id`
    for node in reversed(list(walk(plan))):
        top = tops.pop(id(node), None)
        if isinstance(node, Shuffle) and top is not None and id(node) not in index:
            size = element_bytes(top)
            if size is None:
                return None
            total += node.buffer_size * size
        goes_on = (
            isinstance(node, Map | Concatenate) or node.is_transparent or node.selects_by_position
        )
        for input_ in node.inputs:
            carried_on = top or (node if isinstance(node, Map) else None)
            if goes_on and carried_on is not None:
                tops[id(input_)] = carried_on
    return total


def bytes_from_spec(node: Node) -> int | None:
    """Return the size of a step's element in bytes, or None if the specs do not determine it."""
    spec = element_spec(node)
    return None if spec is None else _count_bytes(spec)


def _count_bytes(spec: Spec) -> int | None:
    total = 0
    for leaf in flatten(spec)[0]:
        if not isinstance(leaf, ArraySpec) or None in leaf.shape or leaf.dtype.hasobject:
            return None
        count = 1
        for length in leaf.shape:
            count *= length or 0
        total += count * leaf.dtype.itemsize
    return total
