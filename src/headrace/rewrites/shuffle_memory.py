"""Memory of shuffles of values when one-to-one steps are pushed below them (`partition`)."""

from __future__ import annotations

from collections.abc import Callable

from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import flatten
from headrace.plan.combining import Concatenate
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.ordering import Shuffle
from headrace.plan.random_map import DrawRandomWords
from headrace.plan.traverse import element_spec, find_leaves, walk

__all__ = ["bytes_from_spec", "shuffle_buffer_bytes"]


def shuffle_buffer_bytes(plan: Node, element_bytes: Callable[[Node], int | None]) -> int | None:
    """Return the bytes in shuffles of values if one-to-one steps above are pushed down below them.

    Returns:
        The number of bytes: 0 without such steps, None if the size of an element is unknown.
    """
    total = 0
    index_step_ids = {id(step) for leaf in find_leaves(plan) for step in walk(leaf)}
    top_maps: dict[int, Node] = {}  # topmost `map` above a node, by the node's `id`
    for node in reversed(list(walk(plan))):
        top_map = top_maps.pop(id(node), None)
        if isinstance(node, Shuffle) and top_map is not None and id(node) not in index_step_ids:
            size = element_bytes(top_map)
            if size is None:
                return None
            total += node.buffer_size * size
        can_push_through = (
            isinstance(node, Map | DrawRandomWords | Concatenate)
            or node.is_transparent
            or node.selects_by_position
        )
        for input_ in node.inputs:
            pushed_map = top_map or (node if isinstance(node, Map) else None)
            if can_push_through and pushed_map is not None:
                top_maps[id(input_)] = pushed_map
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
