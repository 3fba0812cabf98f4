"""From a plan as written to the plan that is executed."""

from __future__ import annotations

from headrace.element.spec import Spec
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Filter, Map, TakeWhile
from headrace.plan.node import Node
from headrace.plan.traverse import cardinality, element_spec, fold
from headrace.rewrites.columns import map_columns
from headrace.rewrites.normal import Normal, normalize

__all__ = ["optimize", "prepare"]


def prepare(plan: Node, *, is_nested: bool = False) -> Normal:
    """Return what executes a plan as written: its normal form, optimised.

    Args:
        plan: The plan.
        is_nested: Whether a user's function returned it, and will return others like it: to look
            for what would be faster costs more then than to do without it for a few elements.
    """
    normal = normalize(plan)
    if isinstance(plan, FromSource):  # and no more: most nested plans are
        return normal
    if is_nested and 0 <= cardinality(normal.plan) < _WORTH_A_PROOF:
        return normal
    optimized = optimize(normal.plan)
    return normal if optimized is normal.plan else Normal(optimized, normal.options)


def optimize(plan: Node) -> Node:
    """Return a plan in normal form that yields the same elements, faster.

    States, numbers of steps and index parts are the same in both.
    """
    if not _calls_functions(plan):
        return plan
    known: dict[int, Spec | None] = {}  # each spec is worked out once

    def spec_of(node: Node) -> Spec | None:
        return element_spec(node, known=known)

    # Each step of a normal form stands in one place.
    return fold(plan, lambda node, inputs: map_columns(node.over(inputs), spec_of))


def _calls_functions(plan: Node) -> bool:
    """Say whether there is a step that an optimisation may change."""
    pending = [plan]
    while pending:
        node = pending.pop()
        if isinstance(node, _WITH_FUNCTIONS):
            return True
        pending += node.inputs
    return False


_WITH_FUNCTIONS = (Map, Filter, TakeWhile)
_WORTH_A_PROOF = 128
"""Calls of a function that take about as long as to find out that it works on columns."""
