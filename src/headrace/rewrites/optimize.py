"""Preparation of a plan as written for execution."""

from __future__ import annotations

from headrace.element.spec import Spec
from headrace.plan.combining import Interleave
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Filter, Map, TakeWhile
from headrace.plan.node import Node
from headrace.plan.traverse import cardinality, element_spec, fold
from headrace.rewrites.canonicalize import CanonicalPlan, canonicalize
from headrace.rewrites.columns import mark_columnar
from headrace.rewrites.window_batches import mark_window_batches

__all__ = ["optimize", "prepare", "proved_spec"]


def prepare(plan: Node, *, is_nested: bool = False) -> CanonicalPlan:
    """Return the canonical form of a plan as written, optimized for execution.

    Args:
        plan: The plan.
        is_nested: Whether a user's function returned the plan, and will return similar ones: for
            few elements, searching for optimizations costs more than it saves.
    """
    canonical = canonicalize(plan)
    if isinstance(plan, FromSource):  # only a source, as in most nested plans
        return canonical
    if is_nested and 0 <= cardinality(canonical.plan) < _MIN_ELEMENTS_FOR_PROOF:
        return canonical
    optimized = optimize(canonical.plan)
    return canonical if optimized is canonical.plan else CanonicalPlan(optimized, canonical.options)


def optimize(plan: Node) -> Node:
    """Return a plan in canonical form that yields the same elements, faster.

    States, step numbers and index plans are unchanged.
    """
    if not _calls_functions(plan):
        return plan
    known: dict[int, Spec | None] = {}  # each spec is computed once

    def spec_of(node: Node) -> Spec | None:
        return element_spec(node, known=known)

    # Each step of a canonical form occurs once.
    return fold(
        plan,
        lambda node, inputs: mark_window_batches(mark_columnar(node.with_inputs(inputs), spec_of)),
    )


def proved_spec(plan: Node) -> Spec | None:
    """Return the spec of the elements of a plan as written, or None if only a run can tell it.

    It is known for functions that `mark_columnar` proves to work on columns.
    """
    spec = element_spec(plan)
    return element_spec(prepare(plan).plan) if spec is None else spec


def _calls_functions(plan: Node) -> bool:
    """Return whether there is a step that can be optimized."""
    pending = [plan]
    while pending:
        node = pending.pop()
        if isinstance(node, _WITH_FUNCTIONS):
            return True
        pending += node.inputs
    return False


_WITH_FUNCTIONS = (Map, Filter, TakeWhile, Interleave)
_MIN_ELEMENTS_FOR_PROOF = 128
"""Number of function calls that take about as long as proving that the function works on columns.
"""
