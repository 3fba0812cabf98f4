"""Walk a plan: in order, bottom up, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.element.spec import Spec
from headrace.plan.combining import Interleave
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.options import Options, WithOptions

__all__ = ["cardinality", "element_spec", "has_free_order", "outline", "transform", "walk"]


def walk(plan: Node) -> Iterator[Node]:
    """Yield all nodes, inputs before the step that takes them, left to right."""
    for node in plan.inputs:
        yield from walk(node)
    yield plan


def transform(plan: Node, rule: Callable[[Node], Node]) -> Node:
    """Return the plan with `rule` applied to every node, inputs first."""
    inputs = plan.inputs
    changed = [transform(node, rule) for node in inputs]
    if any(new is not old for new, old in zip(changed, inputs, strict=True)):
        plan = plan.with_inputs(changed)
    return rule(plan)


def cardinality(plan: Node) -> int:
    """Return the number of elements, INFINITE, or UNKNOWN."""
    return plan.cardinality(*[cardinality(node) for node in plan.inputs])


def element_spec(plan: Node, infer: Callable[[Node], Spec] | None = None) -> Spec | None:
    """Return the spec of the plan's elements.

    Args:
        plan: The plan.
        infer: Called for a node whose spec only running can tell. Without it such a plan has no
            spec, and None is returned.
    """
    inputs = []
    for node in plan.inputs:
        spec = element_spec(node, infer)
        if spec is None:
            return None
        inputs.append(spec)
    spec = plan.spec(*inputs)
    return infer(plan) if spec is None and infer is not None else spec


def has_free_order(plan: Node, options: Options) -> bool:
    """Say whether some step yields elements as they are ready, in an order that is not repeated."""
    match plan:
        case WithOptions():
            options = options.merged_with(plan.options)
        case Map() | Interleave() if plan.num_parallel_calls is not None:
            wish = options.deterministic if plan.deterministic is None else plan.deterministic
            if wish is False:
                return True
    return any(has_free_order(node, options) for node in plan.inputs)


def outline(plan: Node, depth: int = 0) -> str:
    """Return the plan as indented text, the last step first."""
    lines = ["  " * depth + plan.describe()]
    lines += [outline(node, depth + 1) for node in plan.inputs]
    return "\n".join(lines)
