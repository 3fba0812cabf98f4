"""What shuffles of values hold, where one-to-one steps above sink below them (`cut`)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import flatten
from headrace.plan.combining import Concatenate
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.ordering import Shuffle
from headrace.plan.traverse import element_spec, leaves, walk

__all__ = ["bytes_by_spec", "held_by"]


def held_by(plan: Node, bytes_of: Callable[[Node], int | None]) -> int | None:
    """Return the bytes that shuffles of values hold if one-to-one steps above sink below them.

    0: there are none with such steps above. None: the size of an element is not known.
    """
    total = 0
    index = {id(step) for leaf in leaves(plan) for step in walk(leaf)}
    tops: dict[int, Node] = {}  # the uppermost one-to-one step over a node, by its `id`
    for node in reversed(list(walk(plan))):
        top = tops.pop(id(node), None)
        if isinstance(node, Shuffle) and top is not None and id(node) not in index:
            size = bytes_of(top)
            if size is None:
                return None
            total += node.buffer_size * size
        goes_on = isinstance(node, Map | Concatenate) or node.is_transparent or node.chooses
        for input_ in node.inputs:
            carried_on = top or (node if isinstance(node, Map) else None)
            if goes_on and carried_on is not None:
                tops[id(input_)] = carried_on
    return total


def bytes_by_spec(node: Node) -> int | None:
    """Return the bytes of an element of a step, where the plan's specs say them."""
    spec = element_spec(node)
    return None if spec is None else _bytes_in(spec)


def _bytes_in(spec: Spec) -> int | None:
    total = 0
    for leaf in flatten(spec)[0]:
        if not isinstance(leaf, ArraySpec) or None in leaf.shape or leaf.dtype.hasobject:
            return None
        count = 1
        for length in leaf.shape:
            count *= length or 0
        total += count * leaf.dtype.itemsize
    return total
