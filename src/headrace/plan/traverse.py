"""Traversal of plans: in order, bottom-up, as text. Nothing recurses, because plans are deep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from headrace.element.spec import Spec
from headrace.plan.elements import FromSource
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.options import Options, WithOptions

__all__ = [
    "cardinality",
    "element_spec",
    "find_borrowing_steps",
    "find_leaves",
    "fold",
    "is_index_plan",
    "merged_options",
    "outline",
    "transform",
    "walk",
]

T = TypeVar("T")


def walk(plan: Node) -> Iterator[Node]:
    """Yield all nodes, inputs first, left to right.

    A node that occurs several times in the plan is yielded each time.
    """
    pending = [(plan, False)]
    while pending:
        node, is_ready = pending.pop()
        if is_ready:
            yield node
        else:
            pending.append((node, True))
            pending.extend((input_, False) for input_ in reversed(node.inputs))


def fold(plan: Node, visit: Callable[[Node, list[T]], T], *, once: bool = False) -> T:
    """Return `visit(plan, results)`, where `results` are computed the same way for its inputs.

    Args:
        plan: The plan.
        visit: Function called in `walk` order.
        once: Whether to call it once for a node that occurs several times.
    """
    if once:
        results_by_id: dict[int, T] = {}
        for node in distinct_nodes([plan]):
            results_by_id[id(node)] = visit(
                node, [results_by_id[id(input_)] for input_ in node.inputs]
            )
        return results_by_id[id(plan)]
    results: list[T] = []
    pending = [(plan, -1)]  # a node, and its number of inputs once they are visited
    while pending:
        node, count = pending.pop()
        if count < 0:
            inputs = node.inputs
            pending.append((node, len(inputs)))
            pending.extend((input_, -1) for input_ in reversed(inputs))
        else:
            first = len(results) - count
            input_results = results[first:]
            del results[first:]
            results.append(visit(node, input_results))
    return results[0]


def transform(plan: Node, rule: Callable[[Node], Node]) -> Node:
    """Return the plan with `rule` applied to every node, inputs first.

    A node that occurs several times is shared in the result, too.
    """
    return fold(plan, lambda node, inputs: rule(node.with_inputs(inputs)), once=True)


def cardinality(plan: Node) -> int:
    """Return the number of elements, INFINITE, or UNKNOWN."""
    return fold(plan, lambda node, inputs: node.cardinality(*inputs), once=True)


def element_spec(
    plan: Node,
    infer: Callable[[Node], Spec | None] | None = None,
    known: dict[int, Spec | None] | None = None,
) -> Spec | None:
    """Return the spec of the plan's elements, or None if it is unknown.

    Args:
        plan: The plan.
        infer: Function called for a node whose spec only a run can determine, and not for the
            nodes below it unless another step reads them. Without it, or if it returns None, the
            plan has no spec.
        known: Specs by the `id` of their nodes, shared by several calls on one plan; extended.
    """
    known = {} if known is None else known
    pending = [plan]
    while pending:
        node = pending[-1]
        inputs = () if node.has_own_spec else node.inputs
        missing = [input_ for input_ in inputs if id(input_) not in known]
        if missing:
            pending.extend(reversed(missing))
            continue
        pending.pop()
        if id(node) in known:
            continue
        specs = [known[id(input_)] for input_ in inputs]
        spec = None if any(spec is None for spec in specs) else node.spec(*specs)
        if spec is None and infer is not None:
            spec = infer(node)
        known[id(node)] = spec
    return known[id(plan)]


def merged_options(plan: Node) -> Options:
    """Return the options of the whole plan: later settings override earlier ones."""
    options = Options()
    for node in distinct_nodes([plan]):
        if isinstance(node, WithOptions):
            options = options.merged_with(node.options)
        elif isinstance(node, FromSource) and (remote_plan := node.source.remote_plan) is not None:
            options = options.merged_with(merged_options(remote_plan))
    return options


def outline(plan: Node, depth: int = 0, notes: Mapping[int, str] | None = None) -> str:
    """Return the plan as indented text, last step first.

    Args:
        plan: The plan.
        depth: Indentation level of the first line.
        notes: Annotations of nodes, by their `id`.
    """
    notes = notes or {}
    lines = []
    pending = [(plan, depth)]
    while pending:
        node, level = pending.pop()
        note = f"  <- {notes[id(node)]}" if id(node) in notes else ""
        lines.append("  " * min(level, _MAX_INDENT) + node.describe() + note)
        pending.extend((input_, level + 1) for input_ in reversed(node.inputs))
    return "\n".join(lines)


_MAX_INDENT = 60
"""In levels; without a limit the text of a long chain of steps would grow quadratically."""


# --- Index plans: subtrees that consist of index steps --------------------------------------------
#
# An index plan calls no user function and reads no data. Its elements follow from the seed and the
# epoch, can be counted without reading, and an iterator over it has an integer as its state. Plans
# are given in their canonical form (`rewrites.canonicalize`).


def is_index_plan(plan: Node) -> bool:
    """Return whether `plan` consists of index steps only."""
    return all(node.is_index_step for node in distinct_nodes([plan]))


def find_leaves(plan: Node) -> tuple[Node, ...]:
    """Return the leaves of a plan: the roots of its maximal index plans, in `walk` order.

    A leaf's number is its index in the result. An index plan that occurs several times counts as
    several leaves, because each occurrence is read separately.
    """
    found: list[Node] = []
    index_plan_ids = _find_index_steps(plan)
    pending = [plan]
    while pending:
        node = pending.pop()
        if id(node) in index_plan_ids:
            found.append(node)
        else:
            pending.extend(reversed(node.inputs))
    return tuple(found)


def _find_index_steps(plan: Node) -> set[int]:
    """Return the `id` of each node that is the root of an index plan."""
    index_plan_ids: set[int] = set()
    for node in distinct_nodes([plan]):
        if node.is_index_step and all(id(input_) in index_plan_ids for input_ in node.inputs):
            index_plan_ids.add(id(node))
    return index_plan_ids


# --- Steps that may return borrowed memory --------------------------------------------------------
#
# The consumer owns its elements, so sources and caches return copies of their data. A worker that
# sends elements only reads them. Then only user functions write to elements, and elements that are
# passed to none need not be copied.


def find_borrowing_steps(plan: Node) -> frozenset[int]:
    """Return the `id` of each step whose elements are passed to no user function.

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
        input_is_only_read = is_only_read and node.is_read_only
        pending.extend((input_, input_is_only_read) for input_ in node.inputs)
    # A step that occurs twice may return borrowed memory only if both occurrences may.
    return frozenset(found[True] - found[False])
