"""Whether all who read a plan get the same elements in the same order."""

from __future__ import annotations

from headrace.plan.determinism import free_steps
from headrace.plan.elements import FromSource, Read
from headrace.plan.node import Node
from headrace.plan.source import Source
from headrace.plan.traverse import merged_options, transform, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.normal import normalize

__all__ = ["differs_by_reader", "in_order", "sources"]


def sources(plan: Node) -> list[Source]:
    """Return what a plan reads."""
    return [node.source for node in walk(plan) if isinstance(node, FromSource | Read)]


def in_order(plan: Node) -> Node:
    """Return a plan whose steps give their elements in order, whatever the user wished for.

    That wish is about speed. Those who read a plan side by side, and each use a part of each
    element, need the same ones.
    """
    wish = merged_options(plan).deterministic

    def kept(node: Node) -> Node:
        return node.with_parameters(deterministic=True) if node.frees_order(wish) else node

    return transform(plan, kept)


def differs_by_reader(plan: Node) -> str:
    """Return why two readers get other elements, or another order, and what would do; "": no.

    Seeds that are left open are another matter.
    """
    normal = normalize(plan)
    free = free_steps(normal.plan, normal.options.deterministic)
    step = next((step_name(node) for node in walk(normal.plan) if id(node) in free), "")
    if step:
        return f"{step} gives elements as they are ready (deterministic=False); leave it in order"
    if all(map(_gives_all_the_same, sources(plan))):
        return ""
    return (
        "what comes from a data service comes first to one and then to another; use "
        "`distribute(..., ordered=True)` without a `job_name`"
    )


def _gives_all_the_same(source: Source) -> bool:
    is_local = source.keeper is None
    is_shared = getattr(source, "job_name", None) is not None
    return is_local or (source.has_order and source.has_halves and not is_shared)
